//! `config.json` -> [`ModelConfig`]: strict, and complete in its complaints.

use std::cell::RefCell;
use std::path::Path;

use super::config::{Attention, FeedForward, KdaConfig, LayerKind, MlaConfig, ModelConfig, MoeConfig};
use super::config_error::{ConfigError, ConfigProblem};
use super::fields::Fields;
use super::files::{self, OpenError};
use super::json::Json;
use super::layout::{self, MXFP4_GROUP};
use super::quantization;
use crate::units::{LayerIndex, TokenId};

/// Name of the configuration in a model directory.
pub const CONFIG_FILE: &str = "config.json";

/// Bytes of a `config.json`.
pub const CONFIG_BYTES_MAX: u64 = 4 << 20;
/// Widths: residual stream, heads, MLPs, ranks.
pub const WIDTH_MAX: u64 = 1 << 20;
/// Layers.
pub const LAYERS_MAX: u64 = 4096;
/// Token ids.
pub const VOCAB_MAX: u64 = 1 << 24;
/// Heads of either attention.
pub const HEADS_MAX: u64 = 4096;
/// Width of a head.
pub const HEAD_DIM_MAX: u64 = 4096;
/// Taps of the short convolution.
pub const CONV_TAPS_MAX: u64 = 64;
/// Routed experts of a layer.
pub const EXPERTS_MAX: u64 = 16_384;
/// Routed experts of a token.
pub const EXPERTS_PER_TOKEN_MAX: u64 = 255;
/// Shared experts.
pub const SHARED_EXPERTS_MAX: u64 = 256;
/// Sources of one attention-residual mix.
pub const RESIDUAL_SOURCES_MAX: usize = 64;
/// Bytes of all tensors of a model.
pub const MODEL_BYTES_MAX: u128 = 1 << 47;

/// Reads a configuration, nested under `text_config` as released, or flat.
///
/// # Errors
/// An unreadable file, text that is not JSON, or the list of everything that is missing, repeated,
/// contradictory, out of range or unsupported.
pub fn read_config(path: &Path) -> Result<ModelConfig, ConfigError> {
    parse_config(path, &read_text(path)?)
}

/// The text of a configuration.
///
/// # Errors
/// As for [`read_config`], except for what the text says.
pub fn read_text(path: &Path) -> Result<String, ConfigError> {
    let bytes = files::read_small(path, CONFIG_BYTES_MAX).map_err(|e| match e {
        OpenError::Io(source) => ConfigError::Unreadable { path: path.to_owned(), source },
        OpenError::NotAFile(found) => ConfigError::NotAFile { path: path.to_owned(), found },
        OpenError::TooLong(bytes) => {
            ConfigError::TooLong { path: path.to_owned(), bytes, max: CONFIG_BYTES_MAX }
        }
    })?;
    String::from_utf8(bytes)
        .map_err(|e| ConfigError::NotText { path: path.to_owned(), offset: e.utf8_error().valid_up_to() })
}

/// Reads a configuration from its text; `path` is named in errors.
///
/// # Errors
/// As for [`read_config`].
pub fn parse_config(path: &Path, text: &str) -> Result<ModelConfig, ConfigError> {
    let tree = Json::parse(text).map_err(|source| {
        let line = source.line().checked_sub(1).and_then(|n| text.lines().nth(n)).unwrap_or("");
        let excerpt = line.trim().chars().take(EXCERPT_CHARS_MAX).collect();
        ConfigError::NotJson { path: path.to_owned(), source, excerpt }
    })?;
    let Json::Object(entries) = &tree else {
        let source = serde::de::Error::custom(format!("expected an object, found {tree}"));
        return Err(ConfigError::NotJson { path: path.to_owned(), source, excerpt: String::new() });
    };
    let problems = RefCell::new(Vec::new());
    problems
        .borrow_mut()
        .extend(tree.repeated_keys().into_iter().map(|field| ConfigProblem::Duplicate { field }));
    let config = read_top(&Fields::new(entries, String::new(), &problems));
    match (config, problems.into_inner()) {
        (Some(config), problems) if problems.is_empty() => Ok(config),
        (_, problems) => Err(ConfigError::Problems { path: path.to_owned(), problems }),
    }
}

/// Characters of a faulty line shown in an error.
const EXCERPT_CHARS_MAX: usize = 100;

fn read_top(top: &Fields<'_>) -> Option<ModelConfig> {
    if top.get("text_config").is_none() {
        top.text_must_be("model_type", &["kimi_linear", "kimi_k3"], "kimi_linear and kimi_k3");
        quantization::check(top, top);
        return read_text_model(top);
    }
    top.text_must_be("model_type", &["kimi_k3"], "kimi_k3");
    top.if_present_must_be("tie_word_embeddings", &[Json::Bool(false)], UNTIED);
    let text = top.object("text_config")?;
    text.text_must_be("model_type", &["kimi_linear"], "kimi_linear inside text_config");
    for name in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        same_in_both(top, &text, name);
    }
    quantization::check(top, &text);
    read_text_model(&text)
}

const UNTIED: &str = "an output head of its own (tie_word_embeddings false)";

fn same_in_both(top: &Fields<'_>, text: &Fields<'_>, name: &str) {
    if let (Some(outer), Some(inner)) = (top.get_some(name), text.get(name))
        && outer != inner
    {
        top.note(ConfigProblem::Contradiction {
            field: top.path(name),
            found: outer.to_string(),
            other: text.path(name),
            other_found: inner.to_string(),
            rule: "they must be the same",
        });
    }
}

fn read_text_model(text: &Fields<'_>) -> Option<ModelConfig> {
    check_unimplemented(text);
    let hidden = text.count("hidden_size", WIDTH_MAX);
    let layer_count = text.count("num_hidden_layers", LAYERS_MAX);
    let vocab = text.count("vocab_size", VOCAB_MAX);
    let rms_eps = text.number("rms_norm_eps", 0.0, 1.0);
    let kda = text.object("linear_attn_config").map(|linear| (read_kda(&linear), linear));
    let mla = read_mla(text);
    let moe = read_moe(text, hidden);
    let dense_width = text.count("intermediate_size", WIDTH_MAX);
    let situ_beta = text.number("activation_situ_beta", 0.0, 1e6);
    let situ_linear_beta = text.number("activation_situ_linear_beta", 0.0, 1e6);
    let attn_res_block = text.optional_count("attn_res_block_size", LAYERS_MAX, false);
    if let (Some(Some(block)), Some(layers)) = (attn_res_block, layer_count) {
        check_residual_sources(text, block, layers);
    }
    let feed_forward = read_feed_forward(text);
    let ids = [
        read_token(text, "bos_token_id", vocab),
        read_token(text, "eos_token_id", vocab),
        read_token(text, "pad_token_id", vocab),
    ];
    let (kda, linear) = kda?;
    let layers = read_layers(&linear, layer_count?, feed_forward);
    let config = ModelConfig {
        hidden: hidden?,
        vocab: vocab?,
        rms_eps: rms_eps?,
        kda: kda?,
        mla: mla?,
        moe: moe?,
        dense_width: dense_width?,
        situ_beta: situ_beta?,
        situ_linear_beta: situ_linear_beta?,
        attn_res_block: attn_res_block?,
        layers: layers?,
        bos: ids[0]?,
        eos: ids[1]?,
        pad: ids[2]?,
    };
    check_size(text, &config);
    Some(config)
}

/// Fields that choose a computation of which only one is implemented.
fn check_unimplemented(text: &Fields<'_>) {
    text.text_must_be("hidden_act", &["situ"], "the activation situ");
    text.text_must_be("moe_router_activation_func", &["sigmoid"], "a sigmoid router");
    text.flag_must_be("mla_use_nope", true, "full attention without rotation (mla_use_nope true)");
    text.flag_must_be("tie_word_embeddings", false, UNTIED);
    let noaux = [Json::Text("noaux_tc".to_owned())];
    text.if_present_must_be("topk_method", &noaux, "the selection noaux_tc");
    text.if_present_must_be(
        "num_nextn_predict_layers",
        &[Json::Unsigned(0), Json::Null],
        "models without next-token prediction layers (0)",
    );
    text.if_present_must_be(
        "rope_scaling",
        &[Json::Null],
        "full attention without rotation, so without scaling of it",
    );
}

fn read_kda(linear: &Fields<'_>) -> Option<KdaConfig> {
    let heads = linear.count("num_heads", HEADS_MAX);
    let head_dim = linear.count("head_dim", HEAD_DIM_MAX);
    let conv_kernel = linear.integer("short_conv_kernel_size", 2, CONV_TAPS_MAX);
    let lower_bound = linear.optional_negative("gate_lower_bound", -1e4);
    let full_rank_gate = linear.flag("use_full_rank_gate");
    Some(KdaConfig {
        heads: heads?,
        head_dim: head_dim?,
        conv_kernel: usize::try_from(conv_kernel?).ok()?,
        lower_bound: lower_bound?,
        full_rank_gate: full_rank_gate?,
    })
}

fn read_mla(text: &Fields<'_>) -> Option<MlaConfig> {
    let heads = text.count("num_attention_heads", HEADS_MAX);
    if let (Some(heads), Some(kv_heads)) = (heads, text.get("num_key_value_heads"))
        && *kv_heads != Json::Unsigned(heads as u64)
    {
        text.note(text.unsupported(
            "num_key_value_heads",
            kv_heads,
            "one key-value head per query head (num_key_value_heads = num_attention_heads)",
        ));
    }
    let q_rank = text.optional_count("q_lora_rank", WIDTH_MAX, true);
    let kv_rank = text.count("kv_lora_rank", WIDTH_MAX);
    let nope_dim = text.count("qk_nope_head_dim", HEAD_DIM_MAX);
    let rope_dim = text.count("qk_rope_head_dim", HEAD_DIM_MAX);
    let v_dim = text.count("v_head_dim", HEAD_DIM_MAX);
    let output_gate = text.flag("mla_use_output_gate");
    Some(MlaConfig {
        heads: heads?,
        q_rank: q_rank?,
        kv_rank: kv_rank?,
        nope_dim: nope_dim?,
        rope_dim: rope_dim?,
        v_dim: v_dim?,
        output_gate: output_gate?,
    })
}

fn read_moe(text: &Fields<'_>, hidden: Option<usize>) -> Option<MoeConfig> {
    let experts = text.count("num_experts", EXPERTS_MAX);
    let experts_per_token = text.count("num_experts_per_token", EXPERTS_PER_TOKEN_MAX);
    let shared_experts = text.count("num_shared_experts", SHARED_EXPERTS_MAX);
    let latent = text.optional_count("routed_expert_hidden_size", WIDTH_MAX, false);
    let expert_width = text.count("moe_intermediate_size", WIDTH_MAX);
    let latent_norm = text.flag("latent_moe_use_norm");
    let renormalize = text.flag("moe_renormalize");
    let scaling = text.number("routed_scaling_factor", 0.0, 1e6);
    let groups = text.count("num_expert_group", EXPERTS_MAX);
    let groups_kept = text.count("topk_group", EXPERTS_MAX);
    let grouped = text.flag("use_grouped_topk");
    divisible(text, "moe_intermediate_size", expert_width);
    match latent {
        Some(Some(width)) => divisible(text, "routed_expert_hidden_size", Some(width)),
        Some(None) => divisible(text, "hidden_size", hidden),
        None => {}
    }
    if grouped == Some(false) && groups.is_some_and(|n| n > 1) {
        contradict(
            text,
            ("use_grouped_topk", "false".to_owned()),
            ("num_expert_group", groups?),
            GROUPS_USED,
        );
    }
    let moe = MoeConfig {
        experts: experts?,
        experts_per_token: experts_per_token?,
        shared_experts: shared_experts?,
        latent: latent?,
        expert_width: expert_width?,
        // Without a latent width there is no sum in it to norm.
        latent_norm: latent_norm? && latent?.is_some(),
        renormalize: renormalize?,
        scaling: scaling?,
        groups: groups?,
        groups_kept: groups_kept?,
    };
    check_groups(text, &moe);
    Some(moe)
}

const GROUPS_USED: &str = "several groups need the grouped choice";

fn divisible(text: &Fields<'_>, name: &str, width: Option<usize>) {
    if let Some(found) = width.filter(|w| !w.is_multiple_of(MXFP4_GROUP)) {
        text.note(ConfigProblem::NotDivisible { field: text.path(name), found, divisor: MXFP4_GROUP });
    }
}

fn contradict(text: &Fields<'_>, one: (&str, String), other: (&str, usize), rule: &'static str) {
    text.note(ConfigProblem::Contradiction {
        field: text.path(one.0),
        found: one.1,
        other: text.path(other.0),
        other_found: other.1.to_string(),
        rule,
    });
}

/// The choice of experts must be possible: enough experts in the groups that are kept.
fn check_groups(text: &Fields<'_>, moe: &MoeConfig) {
    let (experts, chosen) = (moe.experts, moe.experts_per_token);
    if chosen > experts {
        let one = ("num_experts_per_token", chosen.to_string());
        contradict(text, one, ("num_experts", experts), "a token cannot use more experts than there are");
        return;
    }
    if moe.groups_kept > moe.groups {
        let one = ("topk_group", moe.groups_kept.to_string());
        contradict(text, one, ("num_expert_group", moe.groups), "no more groups can be kept than there are");
        return;
    }
    let groups = ("num_expert_group", moe.groups.to_string());
    if !experts.is_multiple_of(moe.groups) {
        contradict(text, groups, ("num_experts", experts), "the groups must divide the experts evenly");
    } else if moe.groups > 1 && experts / moe.groups < 2 {
        contradict(text, groups, ("num_experts", experts), "a group is scored by its two best experts");
    } else if chosen > experts / moe.groups * moe.groups_kept {
        let one = ("num_experts_per_token", chosen.to_string());
        contradict(text, one, ("topk_group", moe.groups_kept), "the kept groups hold fewer experts");
    }
}

/// Which layers have experts: `first_k_dense_replace` and `moe_layer_freq`.
fn read_feed_forward(text: &Fields<'_>) -> Option<(u64, u64)> {
    let first = text.integer("first_k_dense_replace", 0, LAYERS_MAX);
    let every = text.integer("moe_layer_freq", 1, LAYERS_MAX);
    Some((first?, every?))
}

fn read_token(text: &Fields<'_>, name: &str, vocab: Option<usize>) -> Option<TokenId> {
    let max = vocab.map_or(VOCAB_MAX, |v| v as u64) - 1;
    text.integer(name, 0, max).and_then(|n| u32::try_from(n).ok()).map(TokenId)
}

fn check_residual_sources(text: &Fields<'_>, block: usize, layers: usize) {
    // One source per finished block, and the running sum.
    if layers.div_ceil(block) + 1 > RESIDUAL_SOURCES_MAX {
        contradict(
            text,
            ("attn_res_block_size", block.to_string()),
            ("num_hidden_layers", layers),
            "at most 63 residual blocks are supported",
        );
    }
}

/// Joins the two layer lists, which count from 1, with the rule for experts, which counts from 0.
fn read_layers(
    linear: &Fields<'_>,
    count: usize,
    feed_forward: Option<(u64, u64)>,
) -> Option<Vec<LayerKind>> {
    let full = linear.layer_list("full_attn_layers");
    let kda = linear.layer_list("kda_layers");
    let (full, kda) = (full?, kda?);
    let mut attention: Vec<Option<Attention>> = vec![None; count];
    let (mut twice, mut outside) = (Vec::new(), Vec::new());
    let named = full.iter().map(|n| (*n, Attention::Mla)).chain(kda.iter().map(|n| (*n, Attention::Kda)));
    for (number, kind) in named {
        let slot = number.checked_sub(1).and_then(|n| attention.get_mut(usize::try_from(n).ok()?));
        match slot {
            None => outside.push(number),
            Some(Some(_)) => twice.push(number),
            Some(slot) => *slot = Some(kind),
        }
    }
    let unnamed: Vec<u64> = (1u64..).zip(&attention).filter(|(_, a)| a.is_none()).map(|(n, _)| n).collect();
    if !(unnamed.is_empty() && twice.is_empty() && outside.is_empty()) {
        linear.note(ConfigProblem::LayerLists {
            field: linear.path("full_attn_layers"),
            other: linear.path("kda_layers"),
            layers: count,
            unnamed,
            twice,
            outside,
        });
        return None;
    }
    let (first, every) = feed_forward?;
    let kinds = (0u64..).zip(attention).map(|(index, attention)| {
        let moe = index >= first && index.is_multiple_of(every);
        let feed_forward = if moe { FeedForward::Moe } else { FeedForward::Dense };
        attention.map(|attention| LayerKind { attention, feed_forward })
    });
    kinds.collect()
}

/// Every dimension is within its own maximum, so that no product of two overflows; their sum over all
/// layers and experts may still be beyond any storage.
fn check_size(text: &Fields<'_>, config: &ModelConfig) {
    let matrix_bytes = |m: &layout::MatrixShape| m.rows as u128 * m.cols as u128 * 2;
    let mut bytes = 2 * matrix_bytes(&layout::head(config));
    let expert = u128::from(layout::expert_bytes(config)) * config.moe.experts as u128;
    for (layer, kind) in config.numbered_layers() {
        bytes += layout::matrices(config, LayerIndex(layer.0)).iter().map(matrix_bytes).sum::<u128>();
        if kind.feed_forward == FeedForward::Moe {
            bytes += expert;
        }
    }
    if bytes > MODEL_BYTES_MAX {
        text.note(ConfigProblem::TooLarge {
            bytes,
            max: MODEL_BYTES_MAX,
            fields: "hidden_size, vocab_size, the widths, num_experts and num_hidden_layers",
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> String {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../golden/models/k3-tiny-a/config.json");
        read_text(Path::new(path)).unwrap()
    }

    fn problems(text: &str) -> Vec<ConfigProblem> {
        match parse_config(Path::new("config.json"), text) {
            Err(ConfigError::Problems { problems, .. }) => problems,
            other => panic!("expected problems, found {other:?}"),
        }
    }

    #[test]
    fn reads_the_nested_and_the_flat_form_alike() {
        let nested = parse_config(Path::new("n"), &tiny()).unwrap();
        let tree: serde_json::Value = serde_json::from_str(&tiny()).unwrap();
        let flat = parse_config(Path::new("f"), &tree["text_config"].to_string()).unwrap();
        assert_eq!(nested, flat);
        assert_eq!((nested.hidden, nested.layers.len(), nested.eos), (128, 13, TokenId(242)));
        let mla: Vec<usize> = (0..13).filter(|i| nested.layers[*i].attention == Attention::Mla).collect();
        assert_eq!(mla, [3, 7, 11, 12], "the lists of config.json count from 1");
        assert_eq!(nested.layers[0].feed_forward, FeedForward::Dense);
        assert!(nested.layers[1..].iter().all(|l| l.feed_forward == FeedForward::Moe));
    }

    #[test]
    fn every_problem_is_reported_at_once() {
        let text = tiny()
            .replace("\"hidden_size\": 128", "\"hidden_size\": 3.9")
            .replace("\"vocab_size\": 256", "\"vocab_size\": \"256\"")
            .replace("\"kv_lora_rank\": 32,", "")
            .replace("\"moe_renormalize\": true", "\"moe_renormalize\": true, \"moe_renormalize\": false");
        let found = problems(&text);
        let fields: Vec<String> = found.iter().map(|p| p.to_string()).collect();
        assert_eq!(found.len(), 4, "{fields:#?}");
        assert!(
            matches!(&found[0], ConfigProblem::Duplicate { field } if field == "text_config.moe_renormalize")
        );
        assert!(
            matches!(&found[3], ConfigProblem::Missing { field, .. } if field == "text_config.kv_lora_rank")
        );
    }

    #[test]
    fn absence_has_a_meaning_only_where_the_model_gives_it_one() {
        let text = tiny()
            .replace("\"routed_expert_hidden_size\": 64,", "")
            .replace("\"attn_res_block_size\": 3,", "")
            .replace("\"gate_lower_bound\": -5.0,", "")
            .replace("\"q_lora_rank\": 48", "\"q_lora_rank\": null");
        let config = parse_config(Path::new("c"), &text).unwrap();
        assert_eq!((config.moe.latent, config.moe.latent_norm), (None, false));
        assert_eq!((config.attn_res_block, config.kda.lower_bound, config.mla.q_rank), (None, None, None));
        let text = tiny().replace("\"q_lora_rank\": 48,", "");
        assert!(matches!(&problems(&text)[..], [ConfigProblem::Missing { .. }]));
    }

    #[test]
    fn layer_lists_must_partition_the_layers() {
        let tree: serde_json::Value = serde_json::from_str(&tiny()).unwrap();
        let mut broken = tree.clone();
        broken["text_config"]["linear_attn_config"]["full_attn_layers"] = serde_json::json!([3, 8, 12, 14]);
        match &problems(&broken.to_string())[..] {
            [ConfigProblem::LayerLists { unnamed, twice, outside, .. }] => {
                assert_eq!((&unnamed[..], &twice[..], &outside[..]), (&[4, 13][..], &[3][..], &[14][..]));
            }
            other => panic!("{other:?}"),
        }
    }
}
