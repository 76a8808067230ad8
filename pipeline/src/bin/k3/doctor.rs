//! `k3 doctor`: what this machine can do, and what to type.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use k3_kernel::Kernels;
use k3_pipeline::doctor::{self, Candidate, DiskFigure, DiskSpace, DoctorError, MemoryFigure, Outlook};
use k3_pipeline::machine::Machine;
use k3_pipeline::model::config::ModelConfig;
use k3_pipeline::model::tensors::ModelTensors;
use k3_pipeline::plan::{ModelShape, Rates, ReaderPlan, machine_budget_bytes};
use k3_pipeline::preset::Preset;
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::output::{self, size};
use crate::preset_args::ShardArgs;

/// Arguments of `k3 doctor`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 doctor
  k3 doctor --model ~/Kimi-K3
  k3 doctor --model ~/Kimi-K3 --shards /disk2/k3,/disk3/k3 --json

It reads for a few seconds and writes nothing. Exit codes: 0 the figures were printed, even where no
preset fits; 1 the model or the machine cannot be read; 2 usage, or a refused config.")]
pub(crate) struct Args {
    /// Model directory. Without it there is nothing to read, so no disk is measured and nothing predicted.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    #[command(flatten)]
    shards: ShardArgs,
    /// Bytes that the disk test reads at most; it also ends after three seconds.
    #[arg(long, value_name = "N", default_value_t = 16_000_000_000,
          value_parser = clap::value_parser!(u64).range(1..))]
    disk_test_bytes: u64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

const DISK_TEST_TIME: Duration = Duration::from_secs(3);
const MEMORY_TEST_TIME: Duration = Duration::from_millis(500);

#[derive(Serialize)]
struct Report {
    cores: usize,
    isa: String,
    memory: Memory,
    memory_speed: MemoryFigure,
    space: Option<DiskSpace>,
    disk: Option<DiskFigure>,
    presets: Vec<Candidate>,
    advice: Option<Advice>,
    unknown: Vec<String>,
}

#[derive(Serialize)]
struct Memory {
    total_bytes: u64,
    available_bytes: u64,
    cgroup: Option<Cgroup>,
    /// What a plan may take.
    plan_bytes_max: u64,
}

#[derive(Serialize)]
struct Cgroup {
    path: PathBuf,
    limit_bytes: u64,
    used_bytes: u64,
}

#[derive(Serialize)]
struct Advice {
    preset: &'static str,
    seconds_per_token: Option<f64>,
    /// What to type, in order.
    commands: Vec<String>,
    /// What makes it faster still, where the disk has room for it.
    pack_commands: Vec<String>,
}

impl From<DoctorError> for Failure {
    fn from(error: DoctorError) -> Self {
        Self::run(error)
    }
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> Outcome {
    if args.model.is_none() && !args.shards.shards.is_empty() {
        return Err(Failure::refused(anyhow::anyhow!("--shards needs --model DIR")));
    }
    let model = args.model.as_deref().map(|dir| args.shards.open(dir)).transpose()?;
    let machine = Machine::detect().map_err(Failure::run)?;
    let kernels = Kernels::detect();
    let line = Line { watched: io::stderr().is_terminal() };
    line.show("measuring memory");
    let memory_speed = doctor::measure_memory(&machine, kernels, MEMORY_TEST_TIME)?;
    let mut report = Report {
        cores: machine.cores,
        isa: kernels.isa().to_string(),
        memory: memory(&machine),
        memory_speed,
        space: None,
        disk: None,
        presets: Vec::new(),
        advice: None,
        unknown: Vec::new(),
    };
    match (&args.model, &model) {
        (Some(dir), Some(model)) => examine(args, dir, model, &machine, &mut report, &line)?,
        _ => without_model(&machine, &mut report)?,
    }
    line.clear();
    if args.json { output::print_json(&report) } else { print(&report) }
}

fn memory(machine: &Machine) -> Memory {
    Memory {
        total_bytes: machine.memory_total_bytes,
        available_bytes: machine.memory_available_bytes,
        cgroup: machine.cgroup.as_ref().map(|c| Cgroup {
            path: c.path.clone(),
            limit_bytes: c.limit_bytes,
            used_bytes: c.used_bytes,
        }),
        plan_bytes_max: machine_budget_bytes(machine),
    }
}

/// What needs a model: the disk, the plans, the advice.
fn examine(
    args: &Args,
    dir: &Path,
    (config, tensors): &(ModelConfig, ModelTensors),
    machine: &Machine,
    report: &mut Report,
    line: &Line,
) -> Outcome {
    let shape = ModelShape::from_tensors(config, tensors);
    let preset = Preset::load("auto", &[]).map_err(Failure::run)?.reader;
    let reader = ReaderPlan { engine: preset.engine, direct: preset.direct, depth: preset.depth };
    let limits = (args.disk_test_bytes, DISK_TEST_TIME);
    let mut progress = |bytes| line.show(&format!("measuring the disk: {} read", size(bytes)));
    let disk = doctor::measure_disks(&tensors.files, &reader, shape.expert_bytes, limits, &mut progress)
        .map_err(Failure::run)?;
    let rates = Rates {
        disk: doctor::rate(disk.bytes_per_second),
        memory: Some(doctor::rate(report.memory_speed.product_bytes_per_second)),
    };
    if disk.is_buffered() {
        report.unknown.push(
            "the disk's own speed: some files cannot be read with O_DIRECT, so the page cache may have answered"
                .to_owned(),
        );
    }
    report.presets = doctor::candidates(config, &shape, machine, rates)?;
    let space = doctor::disk_space(dir)?;
    let packable: u64 = shape.matrices.iter().map(|m| m.stored_bytes()).sum();
    report.advice = doctor::advised(&report.presets)
        .map(|(best, outlook)| advice(args, dir, best, outlook, packable < space.free_bytes));
    report.space = Some(space);
    report.disk = Some(disk);
    Ok(())
}

fn without_model(machine: &Machine, report: &mut Report) -> Outcome {
    report.unknown.push("the disk: without --model DIR there is no weight file to read".to_owned());
    report.unknown.push("seconds per token: they follow from the model and its disk".to_owned());
    report.advice = doctor::rung_by_memory(machine)?.map(|preset| Advice {
        preset,
        seconds_per_token: None,
        commands: vec![
            format!("k3 plan --preset {preset} --config config.json"),
            "k3 doctor --model DIR".to_owned(),
        ],
        pack_commands: Vec::new(),
    });
    Ok(())
}

fn advice(args: &Args, dir: &Path, best: &Candidate, outlook: &Outlook, room_for_pack: bool) -> Advice {
    let preset = best.preset;
    let mut model = format!("--preset {preset} --model {}", quoted(&dir.to_string_lossy()));
    for shards in &args.shards.shards {
        model.push_str(&format!(" --shards {}", quoted(&shards.to_string_lossy())));
    }
    let prompt =
        if dir.join("tiktoken.model").exists() { "'The capital of France is'" } else { "--ids 1,2,3" };
    let pack_commands = if room_for_pack {
        vec![
            format!("k3 pack {model} --out trunk.k3pack"),
            format!("k3 generate {model} --set trunk.pack=trunk.k3pack {prompt}"),
        ]
    } else {
        Vec::new()
    };
    Advice {
        preset,
        seconds_per_token: Some(outlook.prediction.seconds_per_token),
        commands: vec![format!("k3 generate {model} {prompt}")],
        pack_commands,
    }
}

/// As a shell takes it for one word.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+:@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn print(report: &Report) -> Outcome {
    let mut out = output::stdout();
    for line in figures(report).into_iter().chain(presets(report)).chain(conclusion(report)) {
        writeln!(out, "{line}")?;
    }
    out.flush()?;
    Ok(())
}

fn speed(bytes_per_second: f64) -> String {
    format!("{}/s", size(bytes_per_second as u64))
}

fn figures(report: &Report) -> Vec<String> {
    let memory = &report.memory;
    let mut lines = vec![
        format!("cores         {}, {}", report.cores, report.isa),
        format!("memory        {}, {} available", size(memory.total_bytes), size(memory.available_bytes)),
    ];
    lines.extend(memory.cgroup.as_ref().map(|c| {
        format!("control group {}: {} of {} used", c.path.display(), size(c.used_bytes), size(c.limit_bytes))
    }));
    let speeds = &report.memory_speed;
    lines.push(format!("for a plan    {} at most, head-room kept", size(memory.plan_bytes_max)));
    lines.push(format!(
        "memory speed  {} read, {} of bf16 weights multiplied, {} threads",
        speed(speeds.read_bytes_per_second),
        speed(speeds.product_bytes_per_second),
        speeds.threads
    ));
    lines.extend(report.space.as_ref().map(|space| {
        let (free, total) = (size(space.free_bytes), size(space.total_bytes));
        format!("disk space    {free} of {total} free at {}", space.path.display())
    }));
    if let Some(disk) = &report.disk {
        lines.push(format!(
            "disk speed    {}: random extents of {}, {} at once, {} in {:.2} s",
            speed(disk.bytes_per_second),
            size(disk.extent_bytes),
            disk.extents_at_once,
            size(disk.bytes),
            disk.seconds
        ));
        lines.extend(disk.disks.iter().map(|d| {
            let (path, direct) = (d.directory.display(), d.direct_files);
            format!(
                "              {path}: {}, depth {}, O_DIRECT for {direct} of {} files",
                d.engine, d.depth, d.files
            )
        }));
    }
    lines.extend(report.unknown.iter().map(|what| format!("not known     {what}")));
    lines
}

fn presets(report: &Report) -> Vec<String> {
    if report.presets.is_empty() {
        return Vec::new();
    }
    let mut lines =
        vec![String::new(), "preset            memory   disk per token   predicted per token".to_owned()];
    lines.extend(report.presets.iter().map(|c| match &c.outlook {
        Some(o) => format!(
            "{:<12}{:>12}{:>17}{:>20.3} s",
            c.preset,
            size(o.planned_bytes),
            size(o.disk_bytes_per_token_max),
            o.prediction.seconds_per_token
        ),
        None => format!("{:<12}does not fit: k3 plan --preset {} says why", c.preset, c.preset),
    }));
    lines
}

fn conclusion(report: &Report) -> Vec<String> {
    let Some(advice) = &report.advice else {
        return vec![String::new(), "No built-in preset fits this machine.".to_owned()];
    };
    let why = match advice.seconds_per_token {
        Some(seconds) => format!("predicted at most {seconds:.3} s per token without cache hits"),
        None => "by memory alone".to_owned(),
    };
    let mut lines = vec![String::new(), format!("advice: preset {}, {why}. Type:", advice.preset)];
    lines.extend(advice.commands.iter().map(|command| format!("  {command}")));
    if !advice.pack_commands.is_empty() {
        lines.push("with a packed trunk fewer bytes are read, with the same output:".to_owned());
        lines.extend(advice.pack_commands.iter().map(|command| format!("  {command}")));
    }
    lines
}

/// One line on stderr, for those who watch.
struct Line {
    watched: bool,
}

impl Line {
    fn show(&self, text: &str) {
        if self.watched {
            // A closed stderr leaves nobody to tell.
            let _ = write!(io::stderr(), "\r{text}\x1b[K");
        }
    }

    fn clear(&self) {
        self.show("");
    }
}
