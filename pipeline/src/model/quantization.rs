//! The one quantisation of routed experts that is computed: MXFP4 as the release states it.

use super::fields::Fields;
use super::json::Json;
use super::layout::MXFP4_GROUP;

/// The number format of the routed experts, in the one place of the release or at the top.
pub(super) fn check(top: &Fields<'_>, text: &Fields<'_>) {
    let holder = if text.get("quantization_config").is_none() && top.get("quantization_config").is_some() {
        top
    } else {
        text
    };
    let Some(quant) = holder.object("quantization_config") else { return };
    quant.text_must_be("quant_method", &["compressed-tensors"], "compressed-tensors");
    quant.text_must_be("format", &[MXFP4_FORMAT], MXFP4_FORMAT);
    quant.if_present_must_be("kv_cache_scheme", &[Json::Null], "a cache that is not quantised (null)");
    let Some(groups) = quant.object("config_groups") else { return };
    for name in groups.names() {
        let Some(group) = groups.object(name) else { continue };
        group.if_present_must_be("format", &[Json::Text(MXFP4_FORMAT.to_owned())], MXFP4_FORMAT);
        group.if_present_must_be("input_activations", &[Json::Null], "activations that are not quantised");
        group.if_present_must_be("output_activations", &[Json::Null], "activations that are not quantised");
        let Some(weights) = group.object("weights") else { continue };
        check_weight_format(&weights);
    }
}

const MXFP4_FORMAT: &str = "mxfp4-pack-quantized";

fn check_weight_format(weights: &Fields<'_>) {
    let group = MXFP4_GROUP as u64;
    let integers = [("group_size", group, "MXFP4 groups of 32"), ("num_bits", 4, "4-bit weights")];
    for (name, value, supported) in integers {
        match weights.integer(name, 0, u64::from(u32::MAX)) {
            Some(found) if found != value => {
                weights.note(weights.unsupported(name, &Json::Unsigned(found), supported));
            }
            _ => {}
        }
    }
    weights.text_must_be("type", &["float"], "floating-point weights (E2M1)");
    weights.text_must_be("strategy", &["group"], "one scale per group");
    weights.flag_must_be("symmetric", true, "weights without a zero point (symmetric true)");
    let scale = [Json::Text("torch.uint8".to_owned())];
    weights.if_present_must_be("scale_dtype", &scale, "E8M0 scale bytes (torch.uint8)");
}
