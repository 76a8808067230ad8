//! `cargo xtask synth`: a model of the released widths with few layers and experts, every weight there,
//! to measure with.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use serde_json::{Value, json};

use crate::Failure;
use crate::checkpoint::{self, content};
use crate::run_k3::stop_flag;

/// The layer, 1-based, with full attention; the last of a model that has fewer.
const FULL_ATTENTION: usize = 4;
const LAYERS: usize = 5;
const EXPERTS: usize = 32;
const EXPERTS_PER_TOKEN: usize = 8;
const VOCAB: usize = 4096;

/// Arguments of `cargo xtask synth`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask synth
  cargo xtask synth --dir /mnt/fast/k3-wide
  cargo xtask synth --layers 2 --experts 8 --dir /tmp/k3-small
  k3 generate --preset auto --model target/synth --ids 1,2,3 --max-tokens 16

The released layout and widths, 5 layers (the first dense, one with full attention), 32 experts
of which a token takes 8, a vocabulary of 4,096, random weights: about 9 GB. Made once, used
again while it is the same; the disk is checked first.")]
pub(crate) struct Args {
    /// Where to make it, or find it. Without it, target/synth.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Layers; the first is dense (2.3 GB), the others have experts (1.2 GB each without them).
    #[arg(long, default_value_t = LAYERS, value_name = "N", value_parser = layers)]
    layers: usize,
    /// Experts of a layer (17.5 MB each).
    #[arg(long, default_value_t = EXPERTS, value_name = "N", value_parser = experts)]
    experts: usize,
}

fn layers(text: &str) -> Result<usize, String> {
    within(text, 2, 93)
}

fn experts(text: &str) -> Result<usize, String> {
    within(text, EXPERTS_PER_TOKEN, 896)
}

fn within(text: &str, least: usize, most: usize) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (least..=most).contains(&n) => Ok(n),
        _ => Err(format!("a whole number from {least} to {most} is expected")),
    }
}

/// Makes the model, or finds it; prints where it lies.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let dir = args.dir.clone().unwrap_or_else(default_dir);
    let stop = stop_flag()?;
    checkpoint::prepare(&dir, &config_text(args.layers, args.experts)?, content::all_rows, &stop)?;
    println!("{}", dir.display());
    Ok(())
}

/// The model that is measured when no other is given: made where it is not there yet.
///
/// # Errors
/// As `cargo xtask synth`.
pub(crate) fn default_model(stop: &AtomicBool) -> anyhow::Result<PathBuf> {
    let dir = default_dir();
    checkpoint::prepare(&dir, &config_text(LAYERS, EXPERTS)?, content::all_rows, stop)?;
    Ok(dir)
}

fn default_dir() -> PathBuf {
    crate::root().join("target/synth")
}

/// The released dimensions with fewer layers, experts and tokens.
fn config_text(layers: usize, experts: usize) -> anyhow::Result<String> {
    let path = k3_golden::golden_dir().join("k3-dimensions.json");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut config: Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let text_config = &mut config["text_config"];
    let full = FULL_ATTENTION.min(layers);
    let kda: Vec<usize> = (1..=layers).filter(|&layer| layer != full).collect();
    text_config["linear_attn_config"]["full_attn_layers"] = json!([full]);
    text_config["linear_attn_config"]["kda_layers"] = json!(kda);
    for (key, value) in [
        ("num_hidden_layers", layers),
        ("num_experts", experts),
        ("num_experts_per_token", EXPERTS_PER_TOKEN),
        ("vocab_size", VOCAB),
        ("bos_token_id", VOCAB - 3),
        ("eos_token_id", VOCAB - 2),
        ("pad_token_id", VOCAB - 1),
    ] {
        text_config[key] = json!(value);
    }
    Ok(serde_json::to_string_pretty(&config)?)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use k3_pipeline::model::config_json::parse_config;
    use k3_pipeline::model::synth::released_layout;

    use super::*;

    #[test]
    fn the_model_is_wide_and_of_a_size_to_measure_with() {
        let config = parse_config(Path::new("config.json"), &config_text(LAYERS, EXPERTS).unwrap()).unwrap();
        assert_eq!((config.hidden, config.layers.len(), config.moe.experts), (7168, LAYERS, EXPERTS));
        let bytes: u64 = released_layout(&config).iter().flat_map(|f| &f.tensors).map(|t| t.bytes()).sum();
        assert!((6_000_000_000..10_000_000_000).contains(&bytes), "{bytes}");
        let small = parse_config(Path::new("config.json"), &config_text(2, 8).unwrap()).unwrap();
        assert_eq!((small.hidden, small.layers.len(), small.moe.experts), (7168, 2, 8));
    }
}
