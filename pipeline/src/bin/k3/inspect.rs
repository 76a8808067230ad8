//! `k3 inspect`: what a model directory holds, and what is missing.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use k3_pipeline::model::check::{self, CheckReport};
use k3_pipeline::model::config::ModelConfig;
use k3_pipeline::model::tensors::ModelTensors;

use crate::failure::{Failure, Outcome};
use crate::model_summary::Summary;
use crate::output;
use crate::preset_args::ShardArgs;

/// Arguments of `k3 inspect`.
#[derive(Debug, clap::Args)]
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
        "opened {} tensors in {:.3} s; {} of memory in use",
        summary.tensors,
        started.elapsed().as_secs_f64(),
        resident_bytes().map_or_else(|| "unknown".to_owned(), output::size)
    ));
    if args.json {
        output::print_json(&summary)?;
    } else {
        let mut out = output::stdout();
        summary.print(&mut out)?;
        out.flush()?;
    }
    if args.check { check(&config, &tensors) } else { Ok(()) }
}

/// Memory of this process that is in RAM.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// A line on stderr. A closed stderr leaves nobody to tell.
fn report(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

fn check(config: &ModelConfig, tensors: &ModelTensors) -> Outcome {
    let mut progress = Progress::new(check::check_bytes(config, tensors));
    let found =
        check::check_values(config, tensors, &mut |done| progress.show(done)).map_err(Failure::run)?;
    progress.end();
    let CheckReport { bytes, faults, fault_count } = found;
    if fault_count == 0 {
        report(&format!("checked {}: every weight is finite, no scale byte is 255", output::size(bytes)));
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

/// Progress and the time left, on stderr: rewritten in place on a terminal, now and then in a log.
struct Progress {
    total: u64,
    started: Instant,
    shown: Option<Instant>,
    every: Duration,
    in_place: bool,
}

impl Progress {
    fn new(total: u64) -> Self {
        let in_place = io::stderr().is_terminal();
        let every = if in_place { Duration::from_millis(500) } else { Duration::from_secs(10) };
        Self { total, started: Instant::now(), shown: None, every, in_place }
    }

    fn show(&mut self, done: u64) {
        let last = self.shown.unwrap_or(self.started);
        if last.elapsed() < self.every || done == 0 {
            return;
        }
        self.shown = Some(Instant::now());
        let seconds = self.started.elapsed().as_secs_f64();
        let rate = done as f64 / seconds;
        let left = self.total.saturating_sub(done) as f64 / rate;
        let line = format!(
            "checked {} of {} at {}/s, about {left:.0} s left",
            output::size(done),
            output::size(self.total),
            output::size(rate as u64)
        );
        if self.in_place {
            let _ = write!(io::stderr().lock(), "\r\x1b[K{line}");
        } else {
            report(&line);
        }
    }

    fn end(&self) {
        if self.in_place && self.shown.is_some() {
            report("");
        }
    }
}
