//! `cargo xtask rehearse`: the full-scale dress rehearsal. A checkpoint with the released model's names,
//! shapes, types and sizes as sparse files, and the release binary on it under a real memory limit.

use std::path::PathBuf;

use anyhow::{Context, bail};
use k3_pipeline::preset::{MemoryBudget, Preset};
use k3_pipeline::units::{Bytes, Rate, TokenId};
use serde::Serialize;

use crate::Failure;
use crate::checkpoint::{self, content};
use crate::run_k3::{self, Generate, K3, Report, stop_flag};
use in_turn::InTurn;

mod in_turn;

/// Arguments of `cargo xtask rehearse`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask rehearse --preset pocket --tokens 2      all of the model under a hard 1 GB cap
  cargo xtask rehearse --preset laptop --tokens 2      the same ids and digest at 8 GB
  cargo xtask rehearse --preset max --cap none         whatever memory the machine has
  cargo xtask rehearse --preset auto --in-turn --tokens 8
                                                       what computing alone takes, beside memory
  cargo xtask rehearse --preset pocket --disk 3.2GB/s  as on a slower disk
  cargo xtask rehearse --preset pocket --model DIR     a real checkpoint instead

The checkpoint is made once, in sparse files: 1.56 TB to look at, a few GB of disk. Router, norms
and whatever else steers the computation is real, every matrix has real rows in every part, the
rest is zeros, which cost the same time to compute. Reading holes costs no disk time, for which
--disk stands, but time of the processor, which a disk leaves alone. --in-turn therefore reads
and computes in turn, in this process: one slot for blocks and one for experts, what the preset
keeps in memory in front, no cap. It compares the computation of each pass with reading the bytes
it touches from memory once, at the bandwidth measured before and after that pass. The cap is a
memory cgroup and needs root. Results go to stdout, the rest to stderr.")]
pub(crate) struct Args {
    /// A built-in preset, or the path of a preset file.
    #[arg(long, default_value = "pocket", value_name = "NAME|FILE")]
    preset: String,
    /// Change one key of the preset; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Read and compute in turn, a token at a time, and compare the computation with memory.
    #[arg(long, conflicts_with_all = ["cap", "disk"])]
    in_turn: bool,
    /// Tokens to generate; the last of them is decided, not fed.
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    tokens: u32,
    /// The prompt, as token ids.
    #[arg(long, default_value = "163,907", value_name = "N,N,...", value_parser = run_k3::ids)]
    ids: String,
    /// Hard limit on the memory of the process, as in 1GB; "none" runs without. Without it, the
    /// preset's budget.
    #[arg(long, value_name = "SIZE")]
    cap: Option<String>,
    /// Read no faster than this, as in 3.2GB/s.
    #[arg(long, value_name = "RATE")]
    disk: Option<Rate>,
    /// A real checkpoint, instead of making one.
    #[arg(long, value_name = "DIR", conflicts_with = "dir")]
    model: Option<PathBuf>,
    /// Where to make the checkpoint, or find it. Without it, target/rehearse.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Make the checkpoint and stop.
    #[arg(long, conflicts_with = "model")]
    prepare_only: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Makes the checkpoint, runs, reports.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let cap = if args.in_turn { None } else { cap(args)? };
    let stop = stop_flag()?;
    let model = match &args.model {
        Some(dir) => dir.clone(),
        None => {
            let dir = args.dir.clone().unwrap_or_else(|| crate::root().join("target/rehearse"));
            let config = k3_golden::golden_dir().join("k3-dimensions.json");
            let config = std::fs::read_to_string(&config)
                .with_context(|| format!("cannot read {}", config.display()))?;
            checkpoint::prepare(&dir, &config, content::few_rows, &stop)?;
            dir
        }
    };
    if args.prepare_only {
        return Ok(());
    }
    if args.in_turn {
        let run = in_turn::Run {
            preset: &args.preset,
            set: &args.set,
            model: &model,
            prompt: args.ids.split(',').filter_map(|id| id.trim().parse().ok()).map(TokenId).collect(),
            tokens: args.tokens,
            stop,
        };
        return print(args, &in_turn::measure(run)?, InTurn::text);
    }
    let run = Generate {
        preset: &args.preset,
        set: args.set.clone(),
        model: &model,
        ids: &args.ids,
        tokens: args.tokens,
        disk: args.disk,
        cap_bytes: cap,
    };
    let k3 = K3::build(stop)?;
    let report = k3.generate(&run)?;
    print(args, &report, Report::text)
}

/// Prints what was found, as JSON or for people.
fn print<R: Serialize>(args: &Args, found: &R, text: fn(&R) -> String) -> Result<(), Failure> {
    println!("{}", if args.json { serde_json::to_string_pretty(found)? } else { text(found) });
    Ok(())
}

/// The limit, from `--cap` or the preset.
fn cap(args: &Args) -> anyhow::Result<Option<u64>> {
    match args.cap.as_deref() {
        Some("none") => Ok(None),
        Some(text) => match text.parse::<Bytes>() {
            Ok(bytes) if bytes.0 > 0 => Ok(Some(bytes.0)),
            _ => bail!("--cap {text}: a size is expected, as in 1GB, or none"),
        },
        None => match Preset::load(&args.preset, &args.set)?.budget {
            MemoryBudget::Limit(bytes) => Ok(Some(bytes.0)),
            MemoryBudget::Auto => bail!(
                "preset {} has no budget of its own to cap; give --cap SIZE, or --cap none",
                args.preset
            ),
        },
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn cap_of(args: &[&str]) -> anyhow::Result<Option<u64>> {
        cap(&Cli::try_parse_from(["rehearse"].iter().chain(args))?.args)
    }

    #[test]
    fn the_cap_is_the_budget_unless_said_otherwise() {
        assert_eq!(cap_of(&[]).unwrap(), Some(1_000_000_000));
        assert_eq!(cap_of(&["--preset", "laptop"]).unwrap(), Some(8_000_000_000));
        assert_eq!(cap_of(&["--cap", "2GB"]).unwrap(), Some(2_000_000_000));
        assert_eq!(cap_of(&["--preset", "auto", "--cap", "none"]).unwrap(), None);
        for bad in [&["--cap", "0"][..], &["--cap", "much"], &["--preset", "auto"], &["--tokens", "0"]] {
            assert!(cap_of(bad).is_err(), "{bad:?}");
        }
        // Not after the minutes that the checkpoint takes.
        for bad in ["x", "", "1,,2", "-1", "4294967296"] {
            assert!(cap_of(&["--ids", bad]).is_err(), "{bad:?}");
        }
        assert!(cap_of(&["--ids", "1, 2"]).is_ok());
    }
}
