//! `k3 doctor`: what this machine can do, and what to type.

mod table;

use std::path::{Path, PathBuf};
use std::time::Duration;

use k3_kernel::Kernels;
use k3_pipeline::doctor::{
    self, Candidate, DiskFigure, DiskSpace, DoctorError, MemoryFigure, Outlook, ProbeFile,
};
use k3_pipeline::machine::Machine;
use k3_pipeline::model::config::ModelConfig;
use k3_pipeline::model::config_json::read_config;
use k3_pipeline::model::error::ModelError;
use k3_pipeline::model::tensors::{ModelTensors, WeightFile};
use k3_pipeline::plan::{ModelShape, Rates, ReaderPlan, machine_budget_bytes};
use k3_pipeline::preset::Preset;
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::preset_args::ShardArgs;
use crate::progress::Bar;
use crate::{interrupt, output};

/// Arguments of `k3 doctor`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 doctor
  k3 doctor --model ~/Kimi-K3
  k3 doctor --model ~/Kimi-K3 --shards /disk2/k3,/disk3/k3 --json
  k3 doctor --config config.json --probe /mnt/fast      before the weights are there

It reads for a few seconds. With --probe it first writes up to 1 GB to that disk, into a file
without a name that is gone when it ends; else it writes nothing. Times per token are predicted
from bytes and speeds alone: those of small models, which have little to read, are longer.
Exit codes: 0 the figures were printed, even where no preset fits; 1 the model or the machine
cannot be read, or it was interrupted; 2 usage, or a refused config.")]
pub(crate) struct Args {
    /// Model directory: its disk is measured by reading its weight files.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["config", "probe"])]
    model: Option<PathBuf>,
    /// A config.json alone: sizes as released are taken for granted.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A directory on the disk that is to hold the weights.
    #[arg(long, value_name = "DIR")]
    probe: Option<PathBuf>,
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
/// Size of the file that a disk without weights is measured with, and one part in how many of its free
/// space it takes at most.
const PROBE_BYTES_MAX: u64 = 1_000_000_000;
const PROBE_SHARE: u64 = 4;
/// A random read while no model is known: an expert of the release.
const RELEASED_EXPERT_BYTES: u64 = 17_547_264;

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

/// What is examined.
struct Subject {
    config: ModelConfig,
    shape: ModelShape,
    /// Its weight files, where they are there.
    tensors: Option<ModelTensors>,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> Outcome {
    if args.model.is_none() && !args.shards.shards.is_empty() {
        return Err(Failure::refused(anyhow::anyhow!("--shards needs --model DIR")));
    }
    if let Some(probe) = args.probe.as_ref().filter(|probe| !probe.is_dir()) {
        return Err(Failure::refused(anyhow::anyhow!("--probe: {} is no directory", probe.display())));
    }
    interrupt::end_at_once()?;
    let subject = subject(args)?;
    let machine = Machine::detect().map_err(Failure::run)?;
    let kernels = Kernels::detect();
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
    examine_disk(args, subject.as_ref(), &mut report)?;
    match &subject {
        Some(subject) => examine_presets(args, subject, &machine, &mut report)?,
        None => without_model(&machine, &mut report)?,
    }
    if args.json { output::print_json(&report) } else { table::print(&report) }
}

fn subject(args: &Args) -> Result<Option<Subject>, Failure> {
    match (&args.model, &args.config) {
        (Some(dir), _) => {
            let (config, tensors) = args.shards.open(dir)?;
            let shape = ModelShape::from_tensors(&config, &tensors);
            Ok(Some(Subject { config, shape, tensors: Some(tensors) }))
        }
        (None, Some(file)) => {
            let config = read_config(file).map_err(ModelError::from)?;
            Ok(Some(Subject { shape: ModelShape::from_config(&config), config, tensors: None }))
        }
        (None, None) => Ok(None),
    }
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

/// Measures the disk where there is something to read, or where something may be written.
fn examine_disk(args: &Args, subject: Option<&Subject>, report: &mut Report) -> Outcome {
    let tensors = subject.and_then(|s| s.tensors.as_ref());
    let Some(dir) = args.model.as_ref().or(args.probe.as_ref()) else {
        let what = "the disk: give --model DIR, or --probe DIR for a disk that has no weights yet";
        report.unknown.push(what.to_owned());
        return Ok(());
    };
    let space = doctor::disk_space(dir)?;
    let probe = match tensors {
        Some(_) => None,
        None => Some(write_probe(dir, &space)?),
    };
    let probed: Vec<WeightFile> = probe.iter().map(ProbeFile::as_weight_file).collect();
    let files = tensors.map_or(&probed, |t| &t.files);
    let preset = Preset::load("auto", &[]).map_err(Failure::run)?.reader;
    let reader = ReaderPlan { engine: preset.engine, direct: preset.direct, depth: preset.depth };
    let limits = (args.disk_test_bytes, DISK_TEST_TIME);
    let bar = Bar::bytes("measuring the disk");
    let mut progress = |bytes| bar.show(bytes, args.disk_test_bytes);
    let extent_bytes = subject.map_or(RELEASED_EXPERT_BYTES, |s| s.shape.expert_bytes);
    let mut disk =
        doctor::measure_disks(files, &reader, extent_bytes, limits, &mut progress).map_err(Failure::run)?;
    if probe.is_some() {
        disk.disks.iter_mut().for_each(|d| d.directory.clone_from(dir));
    }
    if disk.is_buffered() {
        report.unknown.push(
            "the disk's own speed: some files cannot be read with O_DIRECT, so the page cache may have answered"
                .to_owned(),
        );
    }
    report.space = Some(space);
    report.disk = Some(disk);
    Ok(())
}

fn write_probe(dir: &Path, space: &DiskSpace) -> Result<ProbeFile, Failure> {
    let bytes = PROBE_BYTES_MAX.min(space.free_bytes / PROBE_SHARE);
    let bar = Bar::bytes("writing");
    let mut progress = |done| bar.show(done, bytes);
    ProbeFile::write(dir, bytes, &mut progress).map_err(|error| {
        let what = format!("cannot write a file to read in {}", dir.display());
        Failure::run(anyhow::Error::new(error).context(what))
    })
}

/// Every preset on this machine, and the one to take.
fn examine_presets(args: &Args, subject: &Subject, machine: &Machine, report: &mut Report) -> Outcome {
    let Subject { config, shape, tensors } = subject;
    let rates = report.disk.as_ref().map(|disk| Rates {
        disk: doctor::rate(disk.bytes_per_second),
        memory: Some(doctor::rate(report.memory_speed.product_bytes_per_second)),
    });
    report.presets = doctor::candidates(config, shape, machine, rates)?;
    let packable: u64 = shape.matrices.iter().map(|m| m.stored_bytes()).sum();
    let room_for_pack = tensors.is_some() && report.space.as_ref().is_some_and(|s| packable < s.free_bytes);
    report.advice = doctor::advised(&report.presets).map(|(best, outlook)| match &args.model {
        Some(dir) => advice(args, dir, best.preset, outlook, room_for_pack),
        None => {
            let file = args.config.as_deref().unwrap_or(Path::new("config.json"));
            before_the_weights(file, best.preset, outlook, rates)
        }
    });
    Ok(())
}

fn without_model(machine: &Machine, report: &mut Report) -> Outcome {
    let what = "seconds per token: they follow from the model; give --model DIR, or --config FILE with the \
                release's config.json or the source's golden/k3-dimensions.json";
    report.unknown.push(what.to_owned());
    report.advice = doctor::rung_by_memory(machine)?.map(|preset| Advice {
        preset,
        seconds_per_token: None,
        commands: vec![
            format!("k3 plan --preset {preset} --config FILE"),
            "k3 doctor --model DIR".to_owned(),
        ],
        pack_commands: Vec::new(),
    });
    Ok(())
}

/// What to type while there is a configuration and nothing else.
fn before_the_weights(file: &Path, preset: &'static str, outlook: &Outlook, rates: Option<Rates>) -> Advice {
    let file = quoted(&file.to_string_lossy());
    let speeds = rates.map_or(String::new(), |rates| {
        let memory = rates.memory.map_or(String::new(), |m| format!(" --memory-rate {}B/s", m.0.0));
        format!(" --disk {}B/s{memory}", rates.disk.0.0)
    });
    Advice {
        preset,
        seconds_per_token: outlook.prediction.map(|p| p.seconds_per_token),
        commands: vec![
            format!("k3 plan --preset {preset} --config {file}{speeds}"),
            "k3 doctor --model DIR".to_owned(),
        ],
        pack_commands: Vec::new(),
    }
}

fn advice(args: &Args, dir: &Path, preset: &'static str, outlook: &Outlook, room_for_pack: bool) -> Advice {
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
        seconds_per_token: outlook.prediction.map(|p| p.seconds_per_token),
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
