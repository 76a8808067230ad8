//! `cargo xtask ladder`: time per token at every memory budget that fits the machine, and how a fixed budget
//! is best split between trunk and experts. One stream of tokens for all, or it fails.

mod cases;
mod picture;

use std::path::{Path, PathBuf};

use anyhow::Context;
use k3_pipeline::causes::with_causes;
use k3_pipeline::units::{Bytes, Rate};
use serde::Serialize;

use crate::Failure;
use crate::run_k3::{self, Cgroup, Generate, K3, Report, Series, Spread, Stream, stop_flag};
use crate::synth;
use cases::{Case, Kind};

/// Arguments of `cargo xtask ladder`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask ladder
  cargo xtask ladder --disk 2GB/s
  cargo xtask ladder --model ~/Kimi-K3 --budgets 1GB,8GB,16GB --repeats 1 --tokens 2
  cargo xtask ladder --split-at 6GB --out /tmp/ladder --json

Every budget runs with the largest built-in preset that is not above it, its budget set to it;
then, at one budget, with every number of pinned layers that fits, the rest going to cached
experts. Runs alternate. Budgets are hard limits (a memory cgroup) where this process may set
one. Writes OUT.tsv and OUT.svg.
Exit codes: 0 done; 1 failed; 3 two runs gave different tokens or logits.")]
pub(crate) struct Args {
    /// Model directory. Without it, the model of `cargo xtask synth`, made where it is not there.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Memory of the whole process; those that the machine does not have, or the model does not fit in, are
    /// left out.
    #[arg(long, value_name = "SIZE,SIZE", value_delimiter = ',',
          default_values = ["1GB", "2GB", "4GB", "8GB", "12GB", "16GB"])]
    budgets: Vec<Bytes>,
    /// Budget at which the split between trunk and experts is tried; 0 tries none. Without it, the middle one.
    #[arg(long, value_name = "SIZE")]
    split_at: Option<Bytes>,
    /// Runs of each case.
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// Tokens to generate in a run; the last of them is decided, not fed.
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=4096))]
    tokens: u32,
    /// The prompt, as token ids.
    #[arg(long, default_value = "163,907", value_name = "N,N,...", value_parser = run_k3::ids)]
    ids: String,
    /// Read no faster than this, as in 2GB/s.
    #[arg(long, value_name = "RATE")]
    disk: Option<Rate>,
    /// The files to write, without their endings.
    #[arg(long, default_value = "docs/ladder", value_name = "PATH")]
    out: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
struct Row {
    kind: Kind,
    preset: &'static str,
    budget_bytes: u64,
    pinned_layers: usize,
    pinned_head: bool,
    expert_slots: usize,
    seconds_per_token: Spread,
    waited_seconds_per_token: f64,
    bytes_per_token: f64,
    expert_hit_rate: f64,
    peak_rss_bytes: u64,
}

#[derive(Serialize)]
struct Ladder {
    model: String,
    disk_bytes_per_second: Option<u64>,
    repeats: u32,
    tokens: u32,
    hard_limit: bool,
    stream: Stream,
    rows: Vec<Row>,
    files: [PathBuf; 2],
}

/// Runs, compares, writes.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let stop = stop_flag()?;
    let model = match &args.model {
        Some(dir) => dir.clone(),
        None => synth::default_model(&stop)?,
    };
    let files = [args.out.with_extension("tsv"), args.out.with_extension("svg")];
    let parent = files[0].parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !parent.is_dir() {
        return Err(anyhow::anyhow!("--out: {} is no directory", parent.display()).into());
    }
    let cases = cases::choose(&model, &args.budgets, args.split_at)?;
    let hard_limit = can_cap();
    let k3 = K3::build(stop)?.quiet();
    let runs: Vec<Generate<'_>> = cases
        .iter()
        .map(|case| Generate {
            preset: case.preset,
            set: case.set.clone(),
            model: &model,
            ids: &args.ids,
            tokens: args.tokens,
            disk: args.disk,
            cap_bytes: hard_limit.then_some(case.budget.0),
        })
        .collect();
    let series = Series::run(&k3, &runs, args.repeats, |case, repeat| {
        eprintln!("run {} of {}: {}", repeat + 1, args.repeats, cases[case]);
    })?;
    let stream = series.one_stream()?;
    let rows: Vec<Row> = cases.iter().zip(&series.0).map(|(case, reports)| row(case, reports)).collect();
    let title = title(&model, args);
    std::fs::write(&files[0], tsv(&rows)).with_context(|| format!("cannot write {}", files[0].display()))?;
    picture::draw(&files[1], &title, &rows)?;
    if args.json {
        let ladder = Ladder {
            model: model.display().to_string(),
            disk_bytes_per_second: args.disk.map(|rate| rate.0.0),
            repeats: args.repeats,
            tokens: args.tokens,
            hard_limit,
            stream,
            rows,
            files,
        };
        println!("{}", serde_json::to_string_pretty(&ladder)?);
    } else {
        print!("{}", table(&rows));
        println!("one stream in all {} runs: {}", runs.len() * args.repeats as usize, stream.logits_digest);
        println!("written: {}, {}", files[0].display(), files[1].display());
    }
    Ok(())
}

/// Whether this process may set hard limits; says so where it may not.
fn can_cap() -> bool {
    match Cgroup::create(1 << 30) {
        Ok(_) => true,
        Err(error) => {
            eprintln!("budgets are not enforced: {}", with_causes(error.as_ref()));
            false
        }
    }
}

fn title(model: &Path, args: &Args) -> String {
    let name = model.file_name().map_or_else(|| model.display().to_string(), |n| n.display().to_string());
    let disk = args.disk.map_or("this machine's disk".to_owned(), |r| format!("disk of {}/s", r.0.human()));
    format!("{name}, {disk}, {} runs each", args.repeats)
}

fn row(case: &Case, reports: &[Report]) -> Row {
    let mean = |value: fn(&Report) -> f64| Spread::of(reports.iter().map(value)).mean;
    Row {
        kind: case.kind,
        preset: case.preset,
        budget_bytes: case.budget.0,
        pinned_layers: case.pinned_layers,
        pinned_head: case.pinned_head,
        expert_slots: case.expert_slots,
        seconds_per_token: Spread::of(reports.iter().map(|r| r.seconds_per_token)),
        waited_seconds_per_token: mean(|r| r.waited_seconds_per_token),
        bytes_per_token: mean(|r| r.bytes_per_token),
        expert_hit_rate: mean(Report::hit_rate),
        peak_rss_bytes: reports.iter().map(|r| r.peak_rss_bytes).max().unwrap_or(0),
    }
}

const COLUMNS: [&str; 13] = [
    "kind",
    "preset",
    "budget_bytes",
    "pinned_layers",
    "pinned_head",
    "expert_slots",
    "seconds_per_token",
    "seconds_least",
    "seconds_most",
    "waited_seconds_per_token",
    "bytes_per_token",
    "expert_hit_rate",
    "peak_rss_bytes",
];

fn tsv(rows: &[Row]) -> String {
    let mut text = COLUMNS.join("\t") + "\n";
    for r in rows {
        let s = r.seconds_per_token;
        text.push_str(&format!(
            "{}\t{}\t{}\t{}\t{}\t{}\t{:.4}\t{:.4}\t{:.4}\t{:.4}\t{:.0}\t{:.4}\t{}\n",
            r.kind,
            r.preset,
            r.budget_bytes,
            r.pinned_layers,
            r.pinned_head,
            r.expert_slots,
            s.mean,
            s.least,
            s.most,
            r.waited_seconds_per_token,
            r.bytes_per_token,
            r.expert_hit_rate,
            r.peak_rss_bytes
        ));
    }
    text
}

fn table(rows: &[Row]) -> String {
    let mut text =
        "kind    budget     pinned  slots   s/token (least to most)       disk/token   hits   peak RSS\n"
            .to_owned();
    for r in rows {
        let s = r.seconds_per_token;
        let head = if r.pinned_head { "+head" } else { "" };
        text.push_str(&format!(
            "{:<8}{:<10}{:>3}{head:<6}{:>5}   {:>8.3} ({:.3} to {:.3}){:>16}{:>6.1} %{:>11}\n",
            r.kind.to_string(),
            Bytes(r.budget_bytes).human(),
            r.pinned_layers,
            r.expert_slots,
            s.mean,
            s.least,
            s.most,
            Bytes(r.bytes_per_token as u64).human(),
            100.0 * r.expert_hit_rate,
            Bytes(r.peak_rss_bytes).human()
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_column_has_a_value() {
        let case = Case {
            kind: Kind::Budget,
            preset: "pocket",
            budget: Bytes(1_000_000_000),
            set: Vec::new(),
            pinned_layers: 2,
            pinned_head: true,
            expert_slots: 9,
        };
        let report = |seconds: f64| Report { seconds_per_token: seconds, ..Report::default() };
        let row = row(&case, &[report(1.0), report(3.0)]);
        let text = tsv(std::slice::from_ref(&row));
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split('\t').collect()).collect();
        assert_eq!((lines[0].len(), lines[1].len()), (COLUMNS.len(), COLUMNS.len()));
        assert_eq!(lines[1][6..9], ["2.0000", "1.0000", "3.0000"]);
        assert!(table(&[row]).contains("2+head"));
    }
}
