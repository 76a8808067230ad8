//! `cargo xtask overlap`: is the time of a token the longer of disk and computation, or their sum? The model
//! runs behind readers of several speeds, with none, half and all of its layers in memory.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use k3_pipeline::machine::Machine;
use k3_pipeline::model::tensors::ModelTensors;
use k3_pipeline::plan::{ModelShape, plan};
use k3_pipeline::preset::Preset;
use k3_pipeline::units::{Bytes, Rate};
use serde::Serialize;

use crate::Failure;
use crate::run_k3::{self, Generate, K3, Report, Series, Spread, Stream, stop_flag};
use crate::synth;

/// Speeds, in terms of the disk that takes as long as the computation.
const SPEEDS: [f64; 4] = [0.5, 1.0, 2.0, 4.0];
/// What a token may take, in terms of the longer of the two.
const RATIO_MAX: f64 = 1.10;
const PRESET: &str = "auto";
/// Above any disk. Runs without a limit have this one, so that they read through the same threads as the
/// limited ones, whose work is part of the computation's time.
const NO_LIMIT: Rate = Rate(Bytes(1_000_000_000_000));

/// Arguments of `cargo xtask overlap`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask overlap
  cargo xtask overlap --model ~/Kimi-K3 --speeds 1GB/s,2GB/s --repeats 1
  cargo xtask overlap --direct off --json   from the page cache, where the disk is too slow

For 0, half and all of the layers in memory it runs without a limit first, which gives the
computation alone: the time of a token less its waits for the disk. Then it runs behind limits,
and compares the time of a token with the longer of that and of bytes read over speed; of repeats
the median counts. Without --speeds the limits are 0.5, 1, 2 and 4 times the speed at which both
are equal. A limit above what `k3 doctor` measures counts as what it measures.
Exit codes: 0 done; 1 failed; 3 two runs gave different tokens or logits.")]
pub(crate) struct Args {
    /// Model directory. Without it, the model of `cargo xtask synth`, made where it is not there.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Layers that stay in memory, as in 0,2. Without it: none, half and all.
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pinned: Vec<usize>,
    /// Speeds to read at, as in 1GB/s,3GB/s.
    #[arg(long, value_name = "RATE,RATE", value_delimiter = ',')]
    speeds: Vec<Rate>,
    /// Change one key of the preset auto; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Whether reads bypass the page cache: auto, on or off.
    #[arg(long, default_value = "auto", value_name = "MODE")]
    direct: String,
    /// Runs of each case.
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// Tokens to generate in a run; the last of them is decided, not fed.
    #[arg(long, default_value_t = 9, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=4096))]
    tokens: u32,
    /// The prompt, as token ids.
    #[arg(long, default_value = "163,907", value_name = "N,N,...", value_parser = run_k3::ids)]
    ids: String,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// One line of the table.
#[derive(Debug, Serialize)]
struct Row {
    pinned_layers: usize,
    /// `None`: without a limit.
    limit_bytes_per_second: Option<u64>,
    bytes_per_token: f64,
    /// Bytes over the speed.
    disk_seconds: f64,
    /// Without a wait, measured without a limit: the median.
    compute_seconds: f64,
    seconds_per_token: Spread,
    /// The median over the longer of disk and computation.
    ratio: f64,
}

#[derive(Serialize)]
struct Overlap {
    model: String,
    repeats: u32,
    tokens: u32,
    /// As `k3 doctor` measures it; `None` where the page cache answers.
    disk_bytes_per_second: Option<f64>,
    ratio_most: f64,
    stream: Stream,
    rows: Vec<Row>,
}

/// Runs, compares, reports.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let stop = stop_flag()?;
    let model = match &args.model {
        Some(dir) => dir.clone(),
        None => synth::default_model(&stop)?,
    };
    let layers = layers(&model, args)?;
    let k3 = K3::build(stop)?.quiet();
    let disk = if args.direct == "off" { None } else { Some(disk_rate(&k3, &model)?) };
    let case = |pinned: usize, disk: Option<Rate>| Generate {
        preset: PRESET,
        set: settings(args, pinned),
        model: &model,
        ids: &args.ids,
        tokens: args.tokens,
        disk: disk.or(Some(NO_LIMIT)),
        cap_bytes: None,
    };
    let note = |what: &[(usize, Option<Rate>)], case: usize, repeat: u32| {
        let (pinned, limit) = what[case];
        let limit = limit.map_or("no limit".to_owned(), |r| format!("{}/s", r.0.human()));
        eprintln!("run {} of {}: {pinned} layers pinned, {limit}", repeat + 1, args.repeats);
    };
    let runs = |what: &[(usize, Option<Rate>)]| {
        let cases: Vec<Generate<'_>> = what.iter().map(|&(pinned, disk)| case(pinned, disk)).collect();
        Series::run(&k3, &cases, args.repeats, |case, repeat| note(what, case, repeat))
    };
    let free: Vec<(usize, Option<Rate>)> = layers.iter().map(|&pinned| (pinned, None)).collect();
    let unlimited = runs(&free)?;
    let speeds = if args.speeds.is_empty() { speeds(&unlimited.0[0])? } else { args.speeds.clone() };
    let limited: Vec<(usize, Option<Rate>)> =
        layers.iter().flat_map(|&pinned| speeds.iter().map(move |&s| (pinned, Some(s)))).collect();
    let throttled = runs(&limited)?;

    let mut rows: Vec<Row> = Vec::new();
    for (&pinned, reports) in layers.iter().zip(&unlimited.0) {
        let compute = compute_seconds(reports);
        rows.push(row((pinned, None), reports, compute, disk));
        let own = limited.iter().zip(&throttled.0).filter(|((p, _), _)| *p == pinned);
        rows.extend(own.map(|(&what, reports)| row(what, reports, compute, disk)));
    }
    let all = Series(unlimited.0.into_iter().chain(throttled.0).collect());
    let overlap = Overlap {
        model: model.display().to_string(),
        repeats: args.repeats,
        tokens: args.tokens,
        disk_bytes_per_second: disk,
        ratio_most: rows.iter().map(|r| r.ratio).fold(0.0, f64::max),
        stream: all.one_stream()?,
        rows,
    };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&overlap)?);
    } else {
        print!("{}", table(&overlap));
    }
    Ok(())
}

fn settings(args: &Args, pinned: usize) -> Vec<String> {
    let own = [format!("trunk.pinned={pinned}"), "trunk.head=fit".to_owned()];
    let direct = format!("reader.direct={}", args.direct);
    own.into_iter().chain([direct]).chain(args.set.iter().cloned()).collect()
}

/// Those asked for; else none, half and all of the layers, fewer where this machine has no room for all of them.
fn layers(model: &Path, args: &Args) -> anyhow::Result<Vec<usize>> {
    let (config, tensors) = ModelTensors::open(model, &[])?;
    let shape = ModelShape::from_tensors(&config, &tensors);
    let machine = Machine::detect()?;
    let fits = |pinned: usize| -> anyhow::Result<bool> {
        let preset = Preset::load(PRESET, &settings(args, pinned))?;
        Ok(plan(&preset, &config, &shape, &machine).is_ok())
    };
    let total = config.layers.len();
    if let Some(n) = args.pinned.iter().find(|&&n| n > total) {
        bail!("--pinned {n}: the model has {total} layers");
    }
    if !args.pinned.is_empty() {
        return Ok(args.pinned.clone());
    }
    let mut most = total;
    while most > 0 && !fits(most)? {
        most -= 1;
    }
    if most < total {
        eprintln!("this machine has room for {most} of {total} layers: that is the most that is pinned");
    }
    let mut layers = vec![0, most / 2, most];
    layers.dedup();
    Ok(layers)
}

/// Speeds around the one at which the disk takes as long as the computation.
fn speeds(streamed: &[Report]) -> anyhow::Result<Vec<Rate>> {
    let equal = middle(streamed, |r| r.bytes_per_token) / compute_seconds(streamed);
    if !equal.is_finite() || equal < 1.0 {
        bail!("nothing was read, or nothing computed: there is no overlap to measure; give --tokens more");
    }
    Ok(SPEEDS.iter().map(|times| Rate(Bytes((equal * times) as u64))).collect())
}

fn middle(reports: &[Report], value: fn(&Report) -> f64) -> f64 {
    Spread::of(reports.iter().map(value)).median
}

fn compute_seconds(reports: &[Report]) -> f64 {
    middle(reports, |r| r.compute_seconds_per_token)
}

/// What the disk of the model gives, measured apart from any computation.
fn disk_rate(k3: &K3, model: &Path) -> anyhow::Result<f64> {
    let args = ["doctor", "--json", "--model"].map(str::to_owned);
    let args: Vec<String> = args.into_iter().chain([model.display().to_string()]).collect();
    let report = k3.run(&args, None)?.json;
    let rate = report.pointer("/disk/bytes_per_second").and_then(serde_json::Value::as_f64);
    rate.context("the report of k3 doctor has no disk speed")
}

fn row(
    (pinned_layers, limit): (usize, Option<Rate>),
    reports: &[Report],
    compute_seconds: f64,
    disk: Option<f64>,
) -> Row {
    let bytes_per_token = middle(reports, |r| r.bytes_per_token);
    let limit_rate = limit.map_or(f64::INFINITY, |limit| limit.0.0 as f64);
    let disk_seconds = bytes_per_token / disk.unwrap_or(f64::INFINITY).min(limit_rate);
    let seconds_per_token = Spread::of(reports.iter().map(|r| r.seconds_per_token));
    Row {
        pinned_layers,
        limit_bytes_per_second: limit.map(|limit| limit.0.0),
        bytes_per_token,
        disk_seconds,
        compute_seconds,
        seconds_per_token,
        ratio: seconds_per_token.median / disk_seconds.max(compute_seconds),
    }
}

fn table(overlap: &Overlap) -> String {
    let mut text =
        "pinned   limit          disk/token       disk     compute   s/token (least to most)    ratio\n"
            .to_owned();
    for r in &overlap.rows {
        let limit = r.limit_bytes_per_second.map_or("none".to_owned(), |b| format!("{}/s", Bytes(b).human()));
        let s = r.seconds_per_token;
        text.push_str(&format!(
            "{:<9}{:<14}{:>11}{:>9.3} s{:>10.3} s{:>9.3} ({:.3} to {:.3}){:>9.3}\n",
            r.pinned_layers,
            limit,
            Bytes(r.bytes_per_token as u64).human(),
            r.disk_seconds,
            r.compute_seconds,
            s.median,
            s.least,
            s.most,
            r.ratio
        ));
    }
    let verdict = if overlap.ratio_most <= RATIO_MAX { "within" } else { "above" };
    let disk = overlap
        .disk_bytes_per_second
        .map_or("page cache".to_owned(), |rate| format!("a disk of {}/s", Bytes(rate as u64).human()));
    text.push_str(&format!(
        "{disk}; largest ratio {:.3}, {verdict} {RATIO_MAX}; one stream: {}\n",
        overlap.ratio_most, overlap.stream.logits_digest
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(seconds: f64, waited: f64, bytes: f64) -> Report {
        Report {
            seconds_per_token: seconds,
            compute_seconds_per_token: seconds - waited,
            bytes_per_token: bytes,
            ..Report::default()
        }
    }

    #[test]
    fn the_longer_of_both_counts_and_a_limit_no_more_than_the_disk() {
        let rate = |bytes| Some(Rate(Bytes(bytes)));
        // 100 bytes; computing takes 2 s.
        let slow = row((0, rate(10)), &[report(11.0, 9.0, 100.0)], 2.0, Some(1000.0));
        assert_eq!((slow.disk_seconds, slow.ratio), (10.0, 1.1));
        let three = [2.0, 9.0, 3.0].map(|seconds| report(seconds, 0.0, 100.0));
        assert_eq!(row((0, rate(100)), &three, 2.0, Some(1000.0)).ratio, 1.5);
        let beyond = row((0, rate(100_000)), &[report(5.0, 0.0, 100.0)], 2.0, Some(20.0));
        assert_eq!((beyond.disk_seconds, beyond.ratio), (5.0, 1.0));
        let nothing = row((5, None), &[report(2.0, 0.0, 0.0)], 2.0, None);
        assert_eq!(nothing.ratio, 1.0);
    }

    #[test]
    fn speeds_lie_around_the_balance() {
        let rates: Vec<u64> = speeds(&[report(3.0, 1.0, 100.0)]).unwrap().iter().map(|r| r.0.0).collect();
        assert_eq!(rates, [25, 50, 100, 200]);
        assert!(speeds(&[report(3.0, 1.0, 0.0)]).is_err());
    }
}
