//! `k3 inspect`: what a model directory holds, and what is missing.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::anyhow;
use k3_pipeline::model::check::{self, CheckReport};
use k3_pipeline::model::config::ModelConfig;
use k3_pipeline::model::tensors::ModelTensors;
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::model_summary::Summary;
use crate::preset_args::ShardArgs;
use crate::progress::Bar;
use crate::terminal::report;
use crate::{interrupt, output};

/// Arguments of `k3 inspect`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 inspect ~/Kimi-K3
  k3 inspect ~/Kimi-K3 --check     reads every weight: as long as the disk takes for all of them
  k3 inspect ~/Kimi-K3 --json

--check ends with exit code 3 where a weight is damaged; with --json the object says where, under
\"check\".")]
pub(crate) struct Args {
    /// Directory with config.json and the weight files.
    model: PathBuf,
    #[command(flatten)]
    shards: ShardArgs,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Also read the weights and look for NaN, infinity and scale bytes of 255.
    #[arg(long)]
    check: bool,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> Outcome {
    let started = Instant::now();
    let (config, tensors) = args.shards.open(&args.model)?;
    let summary = Summary::new(&args.model, &config, &tensors);
    report(&format!(
        "opened {} tensors in {:.3} s; {} of memory in use\n",
        summary.tensors,
        started.elapsed().as_secs_f64(),
        resident_bytes().map_or_else(|| "unknown".to_owned(), output::size)
    ));
    interrupt::end_at_once()?;
    if args.json {
        let check = if args.check { Some(check(&config, &tensors)?) } else { None };
        output::print_json(&Report { summary: &summary, check: check.as_ref() })?;
        return check.map_or(Ok(()), verdict);
    }
    let mut out = output::stdout();
    summary.print(&mut out)?;
    out.flush()?;
    drop(out);
    if args.check { verdict(check(&config, &tensors)?) } else { Ok(()) }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    summary: &'a Summary,
    #[serde(skip_serializing_if = "Option::is_none")]
    check: Option<&'a CheckReport>,
}

/// Memory of this process that is in RAM.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn check(config: &ModelConfig, tensors: &ModelTensors) -> Result<CheckReport, Failure> {
    let total = check::check_bytes(config, tensors);
    let bar = Bar::bytes("checking");
    let found = check::check_values(config, tensors, &mut |done| bar.show(done, total));
    drop(bar);
    found.map_err(Failure::run)
}

/// Says what was found; any fault ends with the exit code for one.
fn verdict(found: CheckReport) -> Outcome {
    let CheckReport { bytes, faults, fault_count } = found;
    if fault_count == 0 {
        report(&format!("checked {}: every weight is finite, no scale byte is 255\n", output::size(bytes)));
        return Ok(());
    }
    let mut text = format!("{fault_count} weights that no product may use; the download may be damaged");
    for fault in &faults {
        text.push_str(&format!("\n  {fault}"));
    }
    let more = fault_count - faults.len() as u64;
    if more > 0 {
        text.push_str(&format!("\n  and {more} more"));
    }
    Err(Failure::verification(anyhow!(text)))
}
