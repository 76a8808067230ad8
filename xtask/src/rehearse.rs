//! `cargo xtask rehearse`: the full-scale dress rehearsal. A checkpoint with the released model's names,
//! shapes, types and sizes as sparse files, and the release binary on it under a real memory limit.

use std::path::PathBuf;

use anyhow::{Context, bail};
use k3_pipeline::preset::{MemoryBudget, Preset};
use k3_pipeline::units::{Bytes, Rate};
use serde::Serialize;
use serde_json::Value;

use crate::checkpoint::{self, content};
use crate::run_k3::{self, Generate, K3, Report, stop_flag};
use crate::{Failure, bench};

/// Arguments of `cargo xtask rehearse`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask rehearse --preset pocket --tokens 2      all of the model under a hard 1 GB cap
  cargo xtask rehearse --preset laptop --tokens 2      the same ids and digest at 8 GB
  cargo xtask rehearse --preset max --cap none         whatever memory the machine has
  cargo xtask rehearse --preset auto --cap none --ids 163 --tokens 3 --in-turn
                                                       what computing alone takes
  cargo xtask rehearse --preset pocket --disk 3.2GB/s  as on a slower disk
  cargo xtask rehearse --preset pocket --model DIR     a real checkpoint instead

The checkpoint is made once, in sparse files: 1.56 TB to look at, a few GB of disk. Router, norms
and whatever else steers the computation is real, every matrix has real rows in every part, the
rest is zeros, which cost the same time to compute. Reading holes costs no disk time: --disk
stands for one. Filling holes costs processor time, though, which a disk does not: --in-turn keeps it
out of the time of computing. That is compared with reading the same bytes from memory once:
--ids 163 --tokens 3 makes every pass one of a single token. The cap is a memory cgroup and needs
root. Results go to stdout, the rest to stderr.")]
pub(crate) struct Args {
    /// A built-in preset, or the path of a preset file.
    #[arg(long, default_value = "pocket", value_name = "NAME|FILE")]
    preset: String,
    /// Change one key of the preset; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Read and compute in turn: one ring slot and one staging slot, whatever the preset says.
    #[arg(long)]
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
    let cap = cap(args)?;
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
    let mut set = args.set.clone();
    if args.in_turn {
        set.extend(["trunk.ring_slots=1", "experts.staging_slots=1"].map(str::to_owned));
    }
    let run = Generate {
        preset: &args.preset,
        set,
        model: &model,
        ids: &args.ids,
        tokens: args.tokens,
        disk: args.disk,
        cap_bytes: cap,
    };
    let k3 = K3::build(stop)?;
    let planned = Planned::of(&k3, &run)?;
    let before = bench::read_rate(planned.threads);
    let report = k3.generate(&run)?;
    let rate = f64::midpoint(before, bench::read_rate(planned.threads));
    let rehearsal = Rehearsal { computing: Computing::of(&report, &planned, rate)?, report };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&rehearsal)?);
    } else {
        println!("{}\n{}", rehearsal.report.text(), rehearsal.computing.text());
    }
    Ok(())
}

/// What the run has cost, and its computation beside what memory allows.
#[derive(Serialize)]
struct Rehearsal {
    #[serde(flatten)]
    report: Report,
    #[serde(flatten)]
    computing: Computing,
}

/// The computation of a token beside reading each of its bytes once.
#[derive(Serialize)]
struct Computing {
    /// Bytes of weights and state that a token is computed from, wherever they lie.
    touched_bytes_per_token: u64,
    /// How fast as many threads read memory, measured for a second before the run and one after it: the mean.
    memory_bytes_per_second: f64,
    /// Computing by the clock over reading those bytes. The system's work for reads is in it where they do not
    /// take turns.
    compute_over_memory: f64,
    /// The threads' time in `k3`'s own code over the same. The system's work is not in it; the waiting of the
    /// threads for each other is.
    user_over_memory: f64,
}

impl Computing {
    fn of(report: &Report, planned: &Planned, rate: f64) -> anyhow::Result<Self> {
        let number =
            |phase: &Value, what: &str| phase[what].as_f64().with_context(|| format!("k3 reports no {what}"));
        let (mut passes, mut user) = (0.0, 0.0);
        for phase in [&report.prompt, &report.output] {
            passes += number(phase, "passes")?;
            user += number(phase, "user_seconds")?;
        }
        let once = planned.touched_bytes as f64 / rate;
        Ok(Self {
            touched_bytes_per_token: planned.touched_bytes,
            memory_bytes_per_second: rate,
            compute_over_memory: report.compute_seconds_per_token / once,
            user_over_memory: user / (planned.threads as f64 * passes) / once,
        })
    }

    fn text(&self) -> String {
        format!(
            "computing    {:.2} times what reading {} from memory takes at {}/s; without the system's work for \
             reads {:.2} times",
            self.compute_over_memory,
            Bytes(self.touched_bytes_per_token).human(),
            Bytes(self.memory_bytes_per_second as u64).human(),
            self.user_over_memory
        )
    }
}

/// What the plan of a run says, as `k3 plan` prints it.
struct Planned {
    threads: usize,
    touched_bytes: u64,
}

impl Planned {
    fn of(k3: &K3, run: &Generate<'_>) -> anyhow::Result<Self> {
        let model = run.model.display().to_string();
        let args = ["plan", "--json", "--preset", run.preset, "--model", &model].map(str::to_owned);
        let changes = run.set.iter().flat_map(|set| ["--set".to_owned(), set.clone()]);
        let plan = k3.run(&args.into_iter().chain(changes).collect::<Vec<_>>(), None)?.json;
        let number = |at: &str| {
            plan.pointer(at).and_then(Value::as_u64).with_context(|| format!("the plan of k3 has no {at}"))
        };
        let threads = usize::try_from(number("/compute/threads")?)?;
        Ok(Self { threads, touched_bytes: number("/traffic/touched_bytes")? })
    }
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
