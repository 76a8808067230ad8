//! Weight files that must be refused, through the real binary: exit code 1, the file and the tensor
//! named, before anything is computed.

use k3_tests::binary::{assert_refused, run};
use k3_tests::corrupt::Model;
use serde_json::{Map, Value, json};

const SHARD: &str = "model-00002-of-000008.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const Q_PROJ: &str = "language_model.model.layers.1.self_attn.q_proj.weight";
const A_LOG: &str = "language_model.model.layers.1.self_attn.A_log";
const EXPERT: &str = "language_model.model.layers.1.block_sparse_moe.experts.5.w2.weight_packed";

fn refused(case: &str, damage: impl FnOnce(&Model), says: &[&str]) {
    let model = Model::copy_of("k3-tiny-nan");
    damage(&model);
    assert_refused(case, &["inspect", &model.path().to_string_lossy()], 1, says);
}

fn length(value: u64) -> impl FnOnce(&Model) {
    move |m| m.edit_bytes(SHARD, |b| b[..8].copy_from_slice(&value.to_le_bytes()))
}

fn header(edit: impl FnOnce(&mut Map<String, Value>)) -> impl FnOnce(&Model) {
    move |m| m.edit_header(SHARD, edit)
}

#[test]
fn header_lengths() {
    for value in [1 << 60, u64::MAX - 3, u64::MAX, 100_000_001, 1 << 20] {
        let says = format!("a header of {value} bytes");
        refused(&format!("length {value}"), length(value), &[SHARD, &says]);
    }
    for value in [0, 1, 40, 4000] {
        refused(&format!("length {value}"), length(value), &[SHARD, "its header is not valid"]);
    }
    refused("longer than the JSON", |m| m.edit_bytes(SHARD, |b| b[1] += 1), &[SHARD, "not valid"]);
}

#[test]
fn header_texts() {
    let not_json = |m: &Model| m.edit_bytes(SHARD, |b| b[8] = b'!');
    refused("not JSON", not_json, &[SHARD, "its header is not valid"]);
    let list = |m: &Model| m.edit_header_text(SHARD, |_| "[]".to_owned());
    refused("a list", list, &[SHARD, "expected an object of tensors"]);
    let trailing = |m: &Model| m.edit_header_text(SHARD, |t| format!("{} {{}}", t.trim_end()));
    refused("trailing text", trailing, &[SHARD, "trailing characters"]);
    let binary = |m: &Model| m.edit_bytes(SHARD, |b| b[8..4000].fill(0xff));
    refused("binary", binary, &[SHARD, "not valid"]);
    let twice = |m: &Model| {
        m.edit_header_text(SHARD, |t| {
            let tree: Value = serde_json::from_str(t).unwrap();
            t.replacen('{', &format!("{{\"{Q_PROJ}\":{},", tree[Q_PROJ]), 1)
        });
    };
    refused("one name twice", twice, &[SHARD, Q_PROJ, "stands twice in its header"]);
    let extra = |h: &mut Map<String, Value>| h[Q_PROJ]["compression"] = json!("zip");
    refused("an unknown key", header(extra), &[SHARD, Q_PROJ, "unknown field `compression`"]);
    let long = |m: &Model| {
        m.edit_header_text(SHARD, |t| {
            t.replace("self_attn.q_proj", &format!("\\n\\n{}", "x".repeat(1 << 16)))
        });
    };
    refused("a long name with line ends", long, &[SHARD, "\\n\\nxxx", "x…"]);
    let key = |h: &mut Map<String, Value>| drop(h[Q_PROJ].as_object_mut().unwrap().remove("shape"));
    refused("no shape", header(key), &[SHARD, Q_PROJ, "missing field `shape`"]);
}

#[test]
fn offsets() {
    let begin = |h: &Map<String, Value>| h[Q_PROJ]["data_offsets"][0].as_u64().unwrap();
    let end = |h: &Map<String, Value>| h[Q_PROJ]["data_offsets"][1].as_u64().unwrap();
    let negative = |h: &mut Map<String, Value>| h[Q_PROJ]["data_offsets"] = json!([-8, 8]);
    refused("negative", header(negative), &[SHARD, Q_PROJ, "-8"]);
    let fraction = |h: &mut Map<String, Value>| h[Q_PROJ]["data_offsets"] = json!([0.5, 8]);
    refused("a fraction", header(fraction), &[SHARD, Q_PROJ, "0.5"]);
    let backwards = |h: &mut Map<String, Value>| h[Q_PROJ]["data_offsets"] = json!([end(h), begin(h)]);
    refused("backwards", header(backwards), &[SHARD, Q_PROJ, "end before they begin"]);
    let overlap = |h: &mut Map<String, Value>| h[Q_PROJ]["data_offsets"] = json!([begin(h) - 2, end(h) - 2]);
    refused("overlapping", header(overlap), &[SHARD, Q_PROJ, "inside"]);
    let hole = |h: &mut Map<String, Value>| h[Q_PROJ]["data_offsets"] = json!([begin(h) + 2, end(h) + 2]);
    refused("a hole", header(hole), &[SHARD, Q_PROJ, "bytes between belong to nothing"]);
    let outside = |h: &mut Map<String, Value>| {
        let far = 1_u64 << 40;
        h[Q_PROJ]["data_offsets"] = json!([begin(h) + far, end(h) + far]);
    };
    refused("past the end of the file", header(outside), &[SHARD, "bytes between belong to nothing"]);
    let wrap = |h: &mut Map<String, Value>| h[Q_PROJ]["data_offsets"] = json!([u64::MAX - 4095, u64::MAX]);
    refused("at the end of 64 bits", header(wrap), &[SHARD, Q_PROJ]);
    let size = |h: &mut Map<String, Value>| h[Q_PROJ]["shape"] = json!([32, 63]);
    refused("too small a shape", header(size), &[SHARD, Q_PROJ, "needs 4032 bytes", "hold 4096"]);
    let huge = |h: &mut Map<String, Value>| h[Q_PROJ]["shape"] = json!([1_u64 << 40, 1_u64 << 40]);
    refused("a shape beyond 64 bits", header(huge), &[SHARD, Q_PROJ, "needs over 2^64 bytes"]);
}

#[test]
fn types_and_shapes() {
    let f16 = |h: &mut Map<String, Value>| h[Q_PROJ]["dtype"] = json!("F16");
    refused("BF16 relabelled F16", header(f16), &[SHARD, Q_PROJ, "expected type BF16 or F32, found F16"]);
    let unknown = |h: &mut Map<String, Value>| h[Q_PROJ]["dtype"] = json!("BF17");
    refused("an unknown type", header(unknown), &[SHARD, Q_PROJ, "BF17"]);
    let number = |h: &mut Map<String, Value>| h[Q_PROJ]["dtype"] = json!(16);
    refused("a type that is a number", header(number), &[SHARD, Q_PROJ, "expected a string"]);
    let turned = |h: &mut Map<String, Value>| h[Q_PROJ]["shape"] = json!([64, 32]);
    refused("transposed", header(turned), &[Q_PROJ, "expected shape [32, 64], found [64, 32]"]);
    let flat = |h: &mut Map<String, Value>| h[Q_PROJ]["shape"] = json!([2048]);
    refused("flattened", header(flat), &[Q_PROJ, "found [2048]"]);
    let conv = "language_model.model.layers.1.self_attn.q_conv1d.weight";
    let taps = |h: &mut Map<String, Value>| h[conv]["shape"] = json!([32, 4]);
    refused("no middle axis", header(taps), &[conv, "expected shape [32, 1, 4], found [32, 4]"]);
    let packed = |h: &mut Map<String, Value>| h[EXPERT]["dtype"] = json!("I8");
    refused("packed bytes as I8", header(packed), &[EXPERT, "expected type U8, found I8"]);
    let turned = |h: &mut Map<String, Value>| h[EXPERT]["shape"] = json!([16, 32]);
    refused("a transposed expert", header(turned), &[EXPERT, "expected shape [32, 16], found [16, 32]"]);
    let unpadded = |h: &mut Map<String, Value>| h[A_LOG]["shape"] = json!([16, 1]);
    refused("A_log of two axes", header(unpadded), &[A_LOG, "[2 or more]"]);
}

#[test]
fn missing_and_extra_tensors() {
    let rename = |from: &'static str, to: &'static str| {
        move |m: &Model| {
            m.edit_header(SHARD, |h| {
                let info = h.remove(from).unwrap();
                h.insert(to.to_owned(), info);
            });
            m.edit_index(|map| {
                let file = map.remove(from).unwrap();
                map.insert(to.to_owned(), file);
            });
        }
    };
    let other = "language_model.model.layers.1.self_attn.p_proj.weight";
    refused("a missing matrix", rename(Q_PROJ, other), &[Q_PROJ, "missing; expected BF16 or F32 [32, 64]"]);
    refused("an unknown tensor", rename(Q_PROJ, other), &[other, "no part of the model"]);
    let expert = "language_model.model.layers.1.block_sparse_moe.experts.8.w2.weight_packed";
    refused("a missing expert tensor", rename(EXPERT, expert), &[EXPERT, "missing; expected U8 [32, 16]"]);
    refused("an expert past the last", rename(EXPERT, expert), &[expert, "no part of the model"]);
    let padded = "language_model.model.layers.01.self_attn.q_proj.weight";
    refused("a layer number with a zero", rename(Q_PROJ, padded), &[padded, "no part of the model"]);
    let beyond = "language_model.model.layers.5.self_attn.q_proj.weight";
    refused("a layer past the last", rename(Q_PROJ, beyond), &[beyond, "no part of the model"]);
    let copied = |m: &Model| {
        let third = "model-00003-of-000008.safetensors";
        m.edit_header_text(third, |t| t.replace("layers.2.input_layernorm", "layers.1.input_layernorm"));
    };
    let tensor = "language_model.model.layers.1.input_layernorm.weight";
    refused("in two files", copied, &[tensor, "lies in both model-00002-of-000008.safetensors and"]);
}

#[test]
fn the_index() {
    let lacks = |m: &Model| m.edit_index(|map| drop(map.remove(Q_PROJ)));
    refused("a tensor that is not indexed", lacks, &[Q_PROJ, "the index does not say so"]);
    let names = |m: &Model| m.edit_index(|map| drop(map.insert("vision_tower.extra".into(), json!(SHARD))));
    refused("an indexed tensor that is not there", names, &["vision_tower.extra", "does not hold it"]);
    let away =
        |m: &Model| m.edit_index(|map| drop(map.insert("vision_tower.x".into(), json!("../x.safetensors"))));
    refused("a path out of the directory", away, &[INDEX, "vision_tower.x", "expected a plain file name"]);
    let file =
        |m: &Model| m.edit_index(|map| drop(map.insert("vision_tower.x".into(), json!("more.safetensors"))));
    refused("a file that is not there", file, &["more.safetensors", "but not in"]);
    let number = |m: &Model| m.edit_index(|map| drop(map.insert("vision_tower.x".into(), json!(7))));
    refused("a file that is a number", number, &[INDEX, "not a valid index"]);
    let twice = |m: &Model| {
        m.edit_text(INDEX, |t| {
            t.replacen("\"weight_map\": {", &format!("\"weight_map\": {{\"{Q_PROJ}\": \"{SHARD}\","), 1)
        });
    };
    refused("a key twice", twice, &[INDEX, Q_PROJ, "stands twice in weight_map"]);
    let none = |m: &Model| m.edit_text(INDEX, |_| "{}".to_owned());
    refused("no weight_map", none, &[INDEX, "weight_map: missing"]);
    let trailing = |m: &Model| m.edit_text(INDEX, |t| format!("{t}x"));
    refused("trailing text", trailing, &[INDEX, "trailing characters"]);
    refused("no index and many shards", |m| m.remove(INDEX), &["holds neither"]);
    refused("an index that is a pipe", |m| m.make_pipe(INDEX), &[INDEX, "found a pipe"]);
    refused("an index that is a directory", |m| m.make_directory(INDEX), &[INDEX, "found a directory"]);
}

#[test]
fn files_that_are_no_weight_files() {
    refused("a missing shard", |m| m.remove(SHARD), &[SHARD, "named in model.safetensors.index.json"]);
    refused("a pipe", |m| m.make_pipe(SHARD), &[SHARD, "found a pipe"]);
    refused("a directory", |m| m.make_directory(SHARD), &[SHARD, "found a directory"]);
    refused("unreadable", |m| m.make_unreadable(SHARD), &[SHARD, "cannot be read"]);
    refused("empty", |m| m.cut(SHARD, 0), &[SHARD, "0 bytes long"]);
    refused("7 bytes", |m| m.cut(SHARD, 7), &[SHARD, "7 bytes long"]);
    refused("8 bytes", |m| m.cut(SHARD, 8), &[SHARD, "the file has 8 bytes"]);
    refused("cut in the header", |m| m.cut(SHARD, 500), &[SHARD, "the file has 500 bytes"]);
    refused("cut in the tensors", |m| m.cut(SHARD, 40_000), &[SHARD, "truncated"]);
    let longer = |m: &Model| m.edit_bytes(SHARD, |b| b.push(0));
    refused("a byte too many", longer, &[SHARD, "belong to no tensor"]);
}

#[test]
fn one_cause_is_not_told_for_every_tensor() {
    let model = Model::copy_of("k3-tiny-nan");
    model.edit_config(|config| config["hidden_size"] = json!(96));
    let dir = model.path().to_string_lossy().into_owned();
    let says = ["problems in the weight files", "and ", " more", "do not follow from config.json"];
    assert_refused("another width", &["inspect", &dir], 1, &says);
    let ended = run(&["inspect", &dir]);
    assert!(ended.stderr.lines().count() <= 8, "{ended:#?}");
    // The directory is named once.
    let model = Model::copy_of("k3-tiny-nan");
    model.cut(SHARD, 7);
    let dir = model.path().to_string_lossy().into_owned();
    let ended = run(&["inspect", &dir]);
    assert_eq!(ended.stderr.matches(&dir).count(), 1, "{ended:#?}");
}

#[test]
fn values_are_found_and_named_by_the_check() {
    let bad = "language_model.model.layers.1.block_sparse_moe.experts.5.w1.weight_scale";
    let check = |m: &Model| run(&["inspect", "--check", &m.path().to_string_lossy()]);
    let model = Model::copy_of("k3-tiny-nan");
    let ended = check(&model);
    assert_eq!(ended.code, Some(3), "{ended:#?}");
    let says = format!("{bad}: row 11, group 0 has the scale byte 255");
    assert!(ended.stderr.contains(&says), "{ended:#?}");
    // [32 rows, 1 group]: row 11 is byte 11.
    model.poke(bad, 11, &[127]);
    assert_eq!(check(&model).code, Some(0));
    model.poke(Q_PROJ, 2 * (64 * 3 + 7), &0x7fc0_u16.to_le_bytes());
    model.poke("language_model.lm_head.weight", 2, &0xff80_u16.to_le_bytes());
    model.poke("language_model.model.layers.0.self_attn.dt_bias", 4, &f32::INFINITY.to_le_bytes());
    // Padding of A_log is never read: two heads, sixteen values.
    model.poke(A_LOG, 8, &f32::NAN.to_le_bytes());
    let ended = check(&model);
    assert_eq!(ended.code, Some(3), "{ended:#?}");
    assert!(ended.stderr.contains("3 weights"), "{ended:#?}");
    let found = run(&["inspect", "--check", "--json", &model.path().to_string_lossy()]);
    assert_eq!(found.code, Some(3), "{found:#?}");
    let object: Value = serde_json::from_str(&found.stdout).unwrap();
    assert_eq!(object["check"]["fault_count"], 3);
    let fault = json!({"fault": "not_finite", "tensor": Q_PROJ, "row": 3, "col": 7, "value": "NaN"});
    assert!(object["check"]["faults"].as_array().unwrap().contains(&fault), "{object:#}");
    for says in [
        format!("{Q_PROJ}: row 3, column 7 is NaN"),
        "lm_head.weight: row 0, column 1 is -infinity".to_owned(),
        "dt_bias: row 0, column 1 is infinity".to_owned(),
    ] {
        assert!(ended.stderr.contains(&says), "{says}; {ended:#?}");
    }
}
