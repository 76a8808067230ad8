//! `cargo xtask bench`: every kernel in GB/s, GFLOP/s and as a share of the read bandwidth of the same run,
//! beside a body with f64 lanes, timed in turn.

mod matrices;
mod measure;
mod sequence;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use k3_kernel::Kernels;
use serde::Serialize;

use crate::Failure;
use measure::{Clock, Work};
pub use measure::{Read, median};

/// Settings of the benchmark.
#[derive(Args)]
pub struct Options {
    /// Writes an array of results to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only kernels whose name contains this.
    #[arg(long, value_name = "NAME", default_value = "")]
    kernel: String,
    /// How often each figure is taken, in turn with the others; the median counts.
    #[arg(long, value_name = "N", default_value_t = 9)]
    rounds: usize,
    /// The clock that counts.
    #[arg(long, value_enum, default_value_t = Clock::Wall)]
    clock: Clock,
    /// Thread counts.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [1, 2])]
    threads: Vec<usize>,
}

/// A maker of the cases of one kernel, with its name.
pub type Maker = (&'static str, fn(Kernels) -> Vec<Case>);

/// One kernel at one shape.
pub struct Case {
    /// Its name.
    pub kernel: &'static str,
    /// Its shape, in words.
    pub shape: String,
    /// Columns or vectors at once.
    pub batch: usize,
    /// Whether its data come from memory.
    pub cold: bool,
    /// Floating-point operations of a call, a multiply-add counted as two.
    pub flops: f64,
    /// Bytes of a call that must be read (and written, for a kernel that changes a state).
    pub bytes: f64,
    /// The kernel.
    pub work: Box<dyn Work>,
    /// The same with f64 lanes and one vector, and its operations.
    pub reference: Option<(Box<dyn Work>, f64)>,
}

#[derive(Serialize)]
struct Figures {
    kernel: &'static str,
    shape: String,
    threads: usize,
    batch: usize,
    state: &'static str,
    gflops: f64,
    gbps: f64,
    bandwidth_share: f64,
    vs_f64: Option<f64>,
    microseconds: f64,
}

/// Time for one sample, in seconds.
const SAMPLE: f64 = 0.03;

/// Runs the benchmark.
pub fn run(options: &Options) -> Result<(), Failure> {
    let kernels = Kernels::detect();
    let read = Read::new();
    let mut all = Vec::new();
    println!("instruction set: {}", kernels.isa());
    println!(
        "{:<18} {:<18} {:>2} {:>3} {:<5} {:>10} {:>8} {:>7} {:>7} {:>7}",
        "kernel", "shape", "th", "col", "state", "us/call", "GFLOP/s", "GB/s", "of read", "vs f64"
    );
    for make in matrices::CASES.iter().chain(sequence::CASES) {
        if !make.0.contains(&options.kernel) {
            continue;
        }
        for case in (make.1)(kernels) {
            for &threads in &options.threads {
                let figures = measure(&case, &read, threads, options);
                print(&figures);
                all.push(figures);
            }
        }
    }
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&all).context("cannot write the figures as JSON")?;
        std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Bytes per second at which `threads` threads read memory: the median over a second.
pub fn read_rate(read: &Read, threads: usize) -> f64 {
    let (start, mut times) = (Instant::now(), Vec::new());
    while start.elapsed() < Duration::from_secs(1) {
        times.push(Clock::Wall.time(read, threads, 0, 1));
    }
    read.bytes() / median(times)
}

/// GFLOP/s of the matrix kernel of this name at its largest batch, its weights from memory.
pub fn batch_gflops(kernel: &str, threads: usize) -> Option<f64> {
    let (_, make) = matrices::CASES.iter().find(|(name, _)| *name == kernel)?;
    let cases = make(Kernels::detect());
    let case = cases.iter().filter(|case| case.cold).max_by_key(|case| case.batch)?;
    let calls = Clock::Wall.calls_for(&*case.work, threads, SAMPLE);
    let times = (0..9).map(|round| Clock::Wall.time(&*case.work, threads, round * calls, calls));
    Some(case.flops / median(times.collect()) / 1e9)
}

fn measure(case: &Case, read: &Read, threads: usize, options: &Options) -> Figures {
    let clock = options.clock;
    let calls = clock.calls_for(&*case.work, threads, SAMPLE);
    let reference_calls = case.reference.as_ref().map(|(work, _)| clock.calls_for(&**work, threads, SAMPLE));
    let (mut times, mut shares, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..options.rounds {
        let read_rate = read.bytes() / clock.time(read, threads, 0, 1);
        let time = clock.time(&*case.work, threads, round * calls, calls);
        times.push(time);
        shares.push(case.bytes / time / read_rate);
        if let (Some((work, flops)), Some(calls)) = (&case.reference, reference_calls) {
            let reference = clock.time(&**work, threads, round * calls, calls);
            ratios.push((case.flops / time) / (flops / reference));
        }
    }
    let time = median(times);
    Figures {
        kernel: case.kernel,
        shape: case.shape.clone(),
        threads,
        batch: case.batch,
        state: if case.cold { "cold" } else { "hot" },
        gflops: case.flops / time / 1e9,
        gbps: case.bytes / time / 1e9,
        bandwidth_share: median(shares),
        vs_f64: (!ratios.is_empty()).then(|| median(ratios)),
        microseconds: time * 1e6,
    }
}

fn print(f: &Figures) {
    let ratio = f.vs_f64.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
    println!(
        "{:<18} {:<18} {:>2} {:>3} {:<5} {:>10.2} {:>8.1} {:>7.2} {:>6.0}% {ratio:>7}",
        f.kernel,
        f.shape,
        f.threads,
        f.batch,
        f.state,
        f.microseconds,
        f.gflops,
        f.gbps,
        f.bandwidth_share * 100.0,
    );
}
