//! `cargo xtask verify`: the engine against the released model's own numbers, and against itself.
//!
//! For each golden model: logits of every position, router choices, layer outputs and greedy
//! continuations against those of the released code, and the perplexity on a held-out text where there
//! is one; then full recompute, incremental decoding, every
//! chunk size and every memory setting against each other, bit for bit.

mod bits;
mod damaged;
mod engine;
mod heldout;
mod logits;
mod report;
mod taps;
mod vectors;

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use k3_golden::Golden;

use crate::Failure;
pub(crate) use bits::digest;
use report::Report;

/// Arguments of `cargo xtask verify`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask verify
  cargo xtask verify --model DIR   in the released layout, with golden/golden.safetensors
  cargo xtask verify --json

Exit codes: 0 all within tolerance; 1 could not run; 2 usage; 3 a check failed.")]
pub(crate) struct Args {
    /// Verify this model instead of those under golden/; may be given more than once.
    #[arg(long, value_name = "DIR")]
    model: Vec<PathBuf>,
    /// Print the checks as a JSON array.
    #[arg(long)]
    json: bool,
}

/// Runs every check; fails when one of them does.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let mut report = Report::new(!args.json);
    vectors::check(&mut report)?;
    let models = if args.model.is_empty() { k3_golden::model_dirs()? } else { args.model.clone() };
    for dir in &models {
        check_model(dir, &mut report).with_context(|| format!("model {}", dir.display()))?;
    }
    report.finish(args.json)
}

fn check_model(dir: &Path, report: &mut Report) -> anyhow::Result<()> {
    let file = dir.join("golden/golden.safetensors");
    if !file.is_file() {
        bail!(
            "{} is missing: verify needs the released code's own logits; golden/README.md says what the file holds",
            file.display()
        );
    }
    let golden = Golden::open(&file)?;
    report.model(dir);
    if golden.names()?.iter().any(|name| name.ends_with("logits_before_the_bad_expert")) {
        return damaged::check(dir, &golden, report);
    }
    let prompts = prompts(&golden)?;
    logits::check(dir, &golden, &prompts, report)?;
    heldout::check(dir, report)?;
    taps::check(dir, &golden, report)?;
    bits::check(dir, &golden, &prompts, report)
}

/// Names of the prompts, shortest first.
fn prompts(golden: &Golden) -> anyhow::Result<Vec<String>> {
    let names = golden.names()?;
    let mut prompts: Vec<String> =
        names.iter().filter_map(|name| name.strip_suffix(".logits_f64")).map(str::to_owned).collect();
    if prompts.is_empty() {
        bail!("no tensor pN.logits_f64");
    }
    prompts.sort_by_key(|prompt| prompt.trim_start_matches('p').parse::<usize>().unwrap_or(usize::MAX));
    Ok(prompts)
}
