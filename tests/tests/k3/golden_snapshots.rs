//! Bit-level snapshots of our own: digests of logits, partitions, presets as parsed, refusals. They say
//! that nothing changed unseen, not that it is right: that is what `cargo xtask verify` checks.
//! `cargo xtask golden build` renews them. (Plans and refused presets have theirs beside their code.)

use std::fmt::Write as _;
use std::path::Path;

use k3_golden::{Golden, golden_dir, sha256_hex};
use k3_pipeline::engine::Engine;
use k3_pipeline::model::config_json::read_config;
use k3_pipeline::model::tensors::ModelTensors;
use k3_pipeline::plan::ModelShape;
use k3_pipeline::preset::{BUILTIN_NAMES, Preset};
use k3_pipeline::schedule::{BlockShape, Partition};
use k3_pipeline::session::{Prefill, Progress, Session};
use k3_pipeline::units::TokenId;
use k3_tests::corrupt::Model;
use k3_tests::harness::{ids, preset_engine};
use k3_tests::resident::golden_model;
use serde_json::json;

const RESIDENT: &[&str] =
    &["trunk.pinned=all", "trunk.head=pinned", "experts.cache=64 MiB", "memory.budget=700 MB"];
const ONE_SLOT: &[&str] = &[
    "trunk.pinned=0",
    "trunk.head=streamed",
    "trunk.ring_slots=1",
    "experts.cache=0",
    "experts.staging_slots=1",
];

fn engine(model: &str, overrides: &[&str]) -> Engine {
    let overrides: Vec<String> = overrides.iter().map(|&o| o.to_owned()).collect();
    preset_engine(&Preset::load("demo", &overrides).unwrap(), &golden_model(model))
}

/// Digest of the logits of every position, as float32 in little-endian order.
fn logits_digest(engine: &mut Engine, text: &[TokenId]) -> String {
    let mut bytes = Vec::new();
    let mut observe = |seen: Progress<'_>| {
        bytes.extend(seen.logits.data().iter().flat_map(|v| v.to_le_bytes()));
    };
    let how = Prefill { all_logits: true, observe: Some(&mut observe), ..Prefill::default() };
    Session::new(engine).prefill(engine, text, how).unwrap();
    assert_eq!(bytes.len(), text.len() * engine.config().vocab * 4);
    sha256_hex(&bytes)
}

#[test]
fn digests_of_logits() {
    let mut report = String::new();
    for model in ["k3-tiny-a", "k3-tiny-b"] {
        let golden = Golden::open(&golden_model(model).join("golden/golden.safetensors")).unwrap();
        let (mut resident, mut one_slot) = (engine(model, RESIDENT), engine(model, ONE_SLOT));
        for prompt in ["p7", "p40"] {
            let text = ids(&golden.i32(&format!("{prompt}.ids")).unwrap().data);
            let digest = logits_digest(&mut resident, &text);
            assert_eq!(digest, logits_digest(&mut one_slot, &text), "{model} {prompt}: one slot, no cache");
            writeln!(report, "{model} {prompt} {digest}").unwrap();
        }
    }
    insta::assert_snapshot!(report);
}

fn shown(block: &BlockShape) -> String {
    let layer = block.id.layer.map_or("-".to_owned(), |layer| layer.to_string());
    format!(
        "{layer} {:?} {:?} of {} {:?} columns, {} bytes stored, {} resident",
        block.id.kind, block.id.rows, block.cols, block.dtype, block.stored_bytes, block.resident_bytes
    )
}

/// Number and digest of all lines, and the first and last of them.
fn schedule(blocks: &[BlockShape]) -> String {
    let lines: Vec<String> = blocks.iter().map(shown).collect();
    let ends = 12.min(lines.len());
    let (head, tail) = (&lines[..ends], &lines[lines.len() - ends..]);
    let digest = sha256_hex(lines.join("\n").as_bytes());
    format!("{} blocks, sha256 {digest}\n{}\n...\n{}", lines.len(), head.join("\n"), tail.join("\n"))
}

#[test]
fn schedule_of_a_tiny_model() {
    let (config, tensors) = ModelTensors::open(&golden_model("k3-tiny-a"), &[]).unwrap();
    let shape = ModelShape::from_tensors(&config, &tensors);
    insta::assert_snapshot!(schedule(&Partition::new(&config, 8 << 10).blocks(shape.matrices)));
}

#[test]
fn schedule_of_the_release() {
    let config = read_config(&golden_dir().join("k3-dimensions.json")).unwrap();
    let shape = ModelShape::from_config(&config);
    insta::assert_snapshot!(schedule(&Partition::new(&config, 32 << 20).blocks(shape.matrices)));
}

#[test]
fn presets_as_parsed() {
    let presets = BUILTIN_NAMES.map(|name| Preset::load(name, &[]).unwrap());
    insta::assert_debug_snapshot!(presets);
}

/// What the model in `dir` is refused with, without the name of the directory.
fn refusal(dir: &Path) -> String {
    let error = ModelTensors::open(dir, &[]).map(|_| ()).unwrap_err().to_string();
    error.replace(&*dir.to_string_lossy(), "DIR")
}

#[test]
fn refusals() {
    const SHARD: &str = "model-00002-of-000008.safetensors";
    const Q_PROJ: &str = "language_model.model.layers.1.self_attn.q_proj.weight";
    type Damage = fn(&Model);
    let cases: [(&str, Damage); 8] = [
        ("eps of -1", |m| m.edit_config(|c| c["rms_norm_eps"] = json!(-1))),
        ("a count that is a text", |m| m.edit_config(|c| c["num_experts"] = json!("8"))),
        ("rotation", |m| m.edit_config(|c| c["mla_use_nope"] = json!(false))),
        ("a tensor of another type", |m| m.edit_header(SHARD, |h| h[Q_PROJ]["dtype"] = json!("F16"))),
        ("a tensor of another shape", |m| m.edit_header(SHARD, |h| h[Q_PROJ]["shape"] = json!([64, 32]))),
        ("a header of 2^60 bytes", |m| {
            m.edit_bytes(SHARD, |b| b[..8].copy_from_slice(&(1_u64 << 60).to_le_bytes()));
        }),
        ("a shard cut short", |m| m.cut(SHARD, 40_000)),
        ("no shard", |m| m.remove(SHARD)),
    ];
    let mut report = String::new();
    for (case, damage) in cases {
        let model = Model::copy_of("k3-tiny-nan");
        damage(&model);
        writeln!(report, "# {case}\n{}", refusal(model.path())).unwrap();
    }
    let mut engine = engine("k3-tiny-nan", RESIDENT);
    let text: Vec<TokenId> = (1..30).map(TokenId).collect();
    let error = Session::new(&engine).prefill(&mut engine, &text, Prefill::default()).map(|_| ());
    writeln!(report, "# a scale byte of 255\n{}", error.unwrap_err()).unwrap();
    insta::assert_snapshot!(report);
}
