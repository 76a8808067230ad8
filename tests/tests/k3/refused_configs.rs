//! Configurations that must be refused, through the real binary: exit code 2, the field named.

use k3_tests::binary::assert_refused;
use k3_tests::corrupt::Model;
use serde_json::{Value, json};

/// Counts, and the part of the path before the name.
const COUNTS: &[&str] = &[
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "num_attention_heads",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "routed_expert_hidden_size",
    "moe_intermediate_size",
    "num_expert_group",
    "topk_group",
    "moe_layer_freq",
    "intermediate_size",
    "attn_res_block_size",
];

const LINEAR_COUNTS: &[&str] = &["num_heads", "head_dim", "short_conv_kernel_size"];

/// Required fields besides the counts.
const OTHERS: &[&str] = &[
    "model_type",
    "rms_norm_eps",
    "linear_attn_config",
    "mla_use_nope",
    "mla_use_output_gate",
    "latent_moe_use_norm",
    "moe_router_activation_func",
    "moe_renormalize",
    "routed_scaling_factor",
    "use_grouped_topk",
    "first_k_dense_replace",
    "hidden_act",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "quantization_config",
];

/// Counts whose absence has a meaning.
const MAY_BE_ABSENT: &[&str] = &["routed_expert_hidden_size", "attn_res_block_size"];

fn refused(case: &str, edit: impl FnOnce(&mut Value), says: &[&str]) {
    let model = Model::copy_of("k3-tiny-nan");
    model.edit_config(edit);
    assert_refused(case, &["inspect", &model.path().to_string_lossy()], 2, says);
}

fn refused_text(case: &str, edit: impl FnOnce(&str) -> String, says: &[&str]) {
    let model = Model::copy_of("k3-tiny-nan");
    model.edit_text("config.json", edit);
    assert_refused(case, &["inspect", &model.path().to_string_lossy()], 2, says);
}

#[test]
fn counts_that_are_no_counts() {
    let bad = [json!(3.9), json!(0), json!(1e9), json!(1_000_000_000), json!("64"), json!(-1), json!(true)];
    for field in COUNTS {
        for value in &bad {
            let says = format!("text_config.{field}: expected");
            let case = format!("{field} = {value}");
            refused(&case, |c| c[*field] = value.clone(), &["config.json", &says, "found"]);
        }
    }
    for field in LINEAR_COUNTS {
        for value in &bad {
            let says = format!("text_config.linear_attn_config.{field}: expected");
            refused(
                &format!("{field} = {value}"),
                |c| c["linear_attn_config"][*field] = value.clone(),
                &[&says],
            );
        }
    }
}

#[test]
fn missing_fields_are_never_defaulted() {
    for field in COUNTS.iter().chain(OTHERS).filter(|f| !MAY_BE_ABSENT.contains(f)) {
        let says = format!("text_config.{field}: missing");
        refused(&format!("no {field}"), |c| drop(c.as_object_mut().unwrap().remove(*field)), &[&says]);
    }
    for field in LINEAR_COUNTS.iter().chain(&["use_full_rank_gate", "full_attn_layers", "kda_layers"]) {
        let says = format!("text_config.linear_attn_config.{field}: missing");
        let remove = |c: &mut Value| drop(c["linear_attn_config"].as_object_mut().unwrap().remove(*field));
        refused(&format!("no {field}"), remove, &[&says]);
    }
    let all = |c: &mut Value| *c = json!({});
    refused("an empty text_config", all, &["hidden_size: missing", "pad_token_id: missing", "problems"]);
}

#[test]
fn numbers_out_of_range() {
    let cases: &[(&str, Value)] = &[
        ("rms_norm_eps", json!(-1)),
        ("rms_norm_eps", json!(0)),
        ("rms_norm_eps", json!("1e-5")),
        ("rms_norm_eps", json!(1e-60)),
        ("routed_scaling_factor", json!(0)),
        ("routed_scaling_factor", json!(-2.5)),
        ("activation_situ_beta", json!(0.0)),
        ("activation_situ_linear_beta", json!(1e300)),
        ("bos_token_id", json!(128)),
        ("eos_token_id", json!(-1)),
        ("pad_token_id", json!(4_294_967_297_u64)),
        ("moe_renormalize", json!("true")),
        ("mla_use_output_gate", json!(1)),
        ("first_k_dense_replace", json!(0.5)),
    ];
    for (field, value) in cases {
        let says = format!("text_config.{field}: expected");
        refused(&format!("{field} = {value}"), |c| c[*field] = value.clone(), &[&says, "found"]);
    }
    let bound = |c: &mut Value| c["linear_attn_config"]["gate_lower_bound"] = json!(5.0);
    refused("a positive bound", bound, &["gate_lower_bound: expected a number from -10000 to below 0"]);
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let cases: &[(&str, Value, &str)] = &[
        ("hidden_act", json!("silu"), "\"silu\" is not supported"),
        ("moe_router_activation_func", json!("softmax"), "\"softmax\" is not supported"),
        ("mla_use_nope", json!(false), "without rotation"),
        ("tie_word_embeddings", json!(true), "an output head of its own"),
        ("model_type", json!("deepseek_v3"), "\"deepseek_v3\" is not supported"),
        ("num_key_value_heads", json!(1), "one key-value head per query head"),
        ("num_nextn_predict_layers", json!(1), "next-token prediction"),
        ("topk_method", json!("greedy"), "noaux_tc"),
        ("rope_scaling", json!({"type": "yarn"}), "without rotation"),
    ];
    for (field, value, says) in cases {
        let named = format!("text_config.{field}: ");
        refused(&format!("{field} = {value}"), |c| c[*field] = value.clone(), &[&named, says]);
    }
    let quant: &[(&str, Value, &str)] = &[
        ("group_size", json!(16), "MXFP4 groups of 32"),
        ("num_bits", json!(8), "4-bit weights"),
        ("type", json!("int"), "E2M1"),
        ("symmetric", json!(false), "without a zero point"),
        ("strategy", json!("channel"), "one scale per group"),
        ("scale_dtype", json!("torch.bfloat16"), "E8M0"),
    ];
    for (field, value, says) in quant {
        let set = |c: &mut Value| {
            c["quantization_config"]["config_groups"]["group_0"]["weights"][*field] = value.clone();
        };
        refused(&format!("quantisation {field}"), set, &[&format!("weights.{field}: "), says]);
    }
    let format = |c: &mut Value| c["quantization_config"]["format"] = json!("nvfp4-pack-quantized");
    refused("another format", format, &["quantization_config.format", "mxfp4-pack-quantized"]);
}

#[test]
fn contradictions() {
    let cases: &[(&str, Value, &str)] = &[
        ("num_experts_per_token", json!(9), "a token cannot use more experts than there are"),
        ("topk_group", json!(2), "no more groups can be kept than there are"),
        ("num_expert_group", json!(3), "the groups must divide the experts evenly"),
        ("num_expert_group", json!(8), "a group is scored by its two best experts"),
        ("moe_intermediate_size", json!(48), "48 is not a multiple of 32"),
        ("routed_expert_hidden_size", json!(40), "40 is not a multiple of 32"),
        ("num_hidden_layers", json!(6), "not named: 6"),
        ("num_hidden_layers", json!(4), "no such layer: 5"),
        ("bos_token_id", json!(7), "they must be the same"),
    ];
    for (field, value, says) in cases {
        refused(&format!("{field} = {value}"), |c| c[*field] = value.clone(), &[says]);
    }
    let groups = |c: &mut Value| {
        c["num_expert_group"] = json!(4);
        c["num_experts_per_token"] = json!(4);
    };
    refused("too few experts in the kept groups", groups, &["the kept groups hold fewer experts"]);
    let off = |c: &mut Value| {
        c["num_expert_group"] = json!(4);
        c["use_grouped_topk"] = json!(false);
    };
    refused("groups without the grouped choice", off, &["several groups need the grouped choice"]);
    let lists: &[(Value, &str)] = &[
        (json!([4]), "not named: 5"),
        (json!([3, 4, 5]), "named twice: 3"),
        (json!([0, 4, 5]), "no such layer: 0"),
        (json!([4, 5, 99]), "no such layer: 99"),
        (json!([4, "5"]), "full_attn_layers: expected a list of layers"),
        (json!([4, 5.5]), "full_attn_layers: expected a list of layers"),
        (json!("4,5"), "full_attn_layers: expected a list of layers"),
    ];
    for (list, says) in lists {
        let set = |c: &mut Value| c["linear_attn_config"]["full_attn_layers"] = list.clone();
        refused(&format!("full_attn_layers = {list}"), set, &[says]);
    }
    let huge = |c: &mut Value| {
        c["hidden_size"] = json!(1 << 20);
        c["moe_intermediate_size"] = json!(1 << 20);
        c["routed_expert_hidden_size"] = json!(1 << 20);
        c["num_experts"] = json!(16384);
    };
    refused("beyond any storage", huge, &["bytes, at most"]);
}

#[test]
fn texts_that_are_no_configuration() {
    refused_text("trailing text", |t| format!("{t} and so on"), &["config.json", "trailing characters"]);
    refused_text("two objects", |t| format!("{t}{t}"), &["trailing characters"]);
    refused_text("cut short", |t| t[..t.len() / 2].to_owned(), &["not valid JSON"]);
    refused_text("empty", |_| String::new(), &["not valid JSON"]);
    refused_text("a list", |_| "[]".to_owned(), &["expected an object, found a list of 0"]);
    refused_text("deep", |_| "[".repeat(100_000), &["recursion limit"]);
    let nan = |t: &str| t.replace("\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": NaN");
    refused_text("NaN", nan, &["not valid JSON", "\"rms_norm_eps\": NaN"]);
    let inf = |t: &str| t.replace("\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e999");
    refused_text("1e999", inf, &["number out of range", "\"rms_norm_eps\": 1e999"]);
    let twice = |t: &str| t.replace("\"hidden_size\": 64", "\"hidden_size\": 64, \"hidden_size\": 64");
    refused_text("a key twice", twice, &["text_config.hidden_size: stands twice"]);
    let top = |t: &str| t.replacen("\"model_type\": \"kimi_k3\"", "\"model_type\": \"llama\"", 1);
    refused_text("another model", top, &["model_type: the string \"llama\" is not supported"]);
    let model = Model::copy_of("k3-tiny-nan");
    model.edit_bytes("config.json", |b| b[20] = 0xff);
    assert_refused(
        "not UTF-8",
        &["inspect", &model.path().to_string_lossy()],
        2,
        &["not UTF-8", "offset 20"],
    );
}

#[test]
fn files_that_are_no_configuration() {
    type Damage = fn(&Model);
    let cases: [(&str, Damage, &str); 4] = [
        ("no config.json", |m| m.remove("config.json"), "cannot be read"),
        ("a directory", |m| m.make_directory("config.json"), "found a directory"),
        ("a pipe", |m| m.make_pipe("config.json"), "found a pipe"),
        ("unreadable", |m| m.make_unreadable("config.json"), "cannot be read"),
    ];
    for (case, damage, says) in cases {
        let model = Model::copy_of("k3-tiny-nan");
        damage(&model);
        assert_refused(case, &["inspect", &model.path().to_string_lossy()], 2, &["config.json", says]);
    }
    assert_refused(
        "no directory",
        &["inspect", "/nonexistent/model"],
        2,
        &["/nonexistent/model/config.json"],
    );
    assert_refused("no arguments", &["inspect"], 2, &["Usage"]);
}
