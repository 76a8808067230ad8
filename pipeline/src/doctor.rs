//! What this machine can do for a model, measured: the disk as the engine reads it, memory as the kernels
//! read it; and the preset that follows from it.

mod probe;

use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use k3_kernel::weights::tiled_bytes;
use k3_kernel::{Bf16Tiled, Columns, Kernels, Matrix, Out, ShapeError, TILE_ROWS};
use serde::Serialize;

use crate::machine::Machine;
use crate::memory::arena::{Arena, SlotBuf};
use crate::model::config::ModelConfig;
use crate::model::tensors::{Extent, FileId, WeightFile};
use crate::plan::{ModelShape, Prediction, Rates, ReaderPlan, machine_budget_bytes, plan, read_slot_bytes};
use crate::preset::{LADDER, MemoryBudget, Preset, PresetError};
use crate::store::StoreError;
use crate::store::disks::{Client, DiskOptions, DiskReport, Disks};
use crate::store::request::{Class, Pieces, Request};
use crate::team::{Team, TeamError};
use crate::units::{Bytes, Rate};

pub use probe::ProbeFile;

/// Memory that the buffers of the disk test take at most.
const DISK_BUFFERS_MAX: u64 = 256 << 20;
/// Memory of the memory test: beyond the caches of most machines.
const MEMORY_TEST_BYTES: u64 = 256 << 20;
/// Rounds of the memory test, of which the best counts.
const MEMORY_ROUNDS: u32 = 5;
/// Of the memory that is left, the tests take one part in so many.
const MEMORY_SHARE: u64 = 8;
/// Length of the memory test's vector: the hidden width of the release.
const COLS: usize = 7168;
/// A preset that is faster by less than this is not worth more memory.
const WORTH_MORE_MEMORY: f64 = 0.97;

/// Why something could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum DoctorError {
    /// A weight file cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A compute thread cannot be started.
    #[error(transparent)]
    Team(#[from] TeamError),
    /// A built-in preset cannot be read.
    #[error(transparent)]
    Preset(#[from] PresetError),
    /// The matrix of the memory test is none.
    #[error("the memory test: {0}")]
    Shape(#[from] ShapeError),
    /// The disk does not tell its free space.
    #[error("cannot ask for the free space at {}: {source}", path.display())]
    Space {
        /// A directory on it.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// How the disks read.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiskFigure {
    /// Bytes per second of all disks together.
    pub bytes_per_second: f64,
    /// Bytes that were read.
    pub bytes: u64,
    /// How long that took.
    pub seconds: f64,
    /// Bytes of one random read: an expert.
    pub extent_bytes: u64,
    /// Extents that were asked for at once.
    pub extents_at_once: usize,
    /// Each disk, and how it was read.
    pub disks: Vec<DiskReport>,
}

impl DiskFigure {
    /// True when some reads went through the page cache, which may have answered in place of the disk.
    #[must_use]
    pub fn is_buffered(&self) -> bool {
        self.disks.iter().any(|disk| disk.direct_files < disk.files)
    }
}

/// Reads random extents of up to `extent_bytes` from `files`, the way `reader` says, until `bytes_max` or
/// `time_max` are reached. `progress` is told bytes read.
///
/// # Errors
/// Memory refused; a file that cannot be opened or read.
pub fn measure_disks(
    files: &[WeightFile],
    reader: &ReaderPlan,
    extent_bytes: u64,
    (bytes_max, time_max): (u64, Duration),
    progress: &mut dyn FnMut(u64),
) -> Result<DiskFigure, StoreError> {
    let slot_bytes = read_slot_bytes(extent_bytes);
    let at_once = reader.depth.clamp(1, usize::try_from(DISK_BUFFERS_MAX / slot_bytes).unwrap_or(1).max(1));
    let slot_len = usize::try_from(slot_bytes).unwrap_or(usize::MAX);
    let arena = Arena::new("disk test", at_once, slot_len)?;
    let regions: Vec<_> = arena.region().into_iter().collect();
    let mut free = arena.into_slots();
    let options = DiskOptions {
        plan: reader,
        requests_max: at_once,
        slot_bytes_max: slot_len,
        regions: &regions,
        reader: None,
    };
    let disks = Disks::open(files, &options)?;
    let mut client = Client::new(&disks, at_once);
    let mut draw = Draw::new(files, extent_bytes);
    let started = Instant::now();
    let (mut issued, mut bytes) = (0, 0);
    loop {
        while (issued == 0 || issued < bytes_max && started.elapsed() < time_max)
            && let Some(slot) = free.pop()
        {
            issued += submit(&mut client, draw.extent(), slot)?;
        }
        let Some(done) = client.wait() else { break };
        done.result?;
        bytes += done.tag;
        free.push(done.slot);
        progress(bytes);
    }
    let seconds = started.elapsed().as_secs_f64();
    Ok(DiskFigure {
        bytes_per_second: bytes as f64 / seconds,
        bytes,
        seconds,
        extent_bytes,
        extents_at_once: at_once,
        disks: disks.reports().cloned().collect(),
    })
}

/// Asks for an extent; its bytes are the request's tag.
fn submit(client: &mut Client, extent: Extent, slot: SlotBuf) -> Result<u64, StoreError> {
    let (pieces, tag) = (Pieces::one(extent), extent.bytes);
    let request = Request { class: Class::Demand, pieces, checksum: None, slot, tag };
    client.submit(request).map_err(|(_, error)| error)?;
    Ok(tag)
}

/// Random extents, every byte of the files as likely as any other.
struct Draw<'a> {
    files: &'a [WeightFile],
    total: u64,
    extent_bytes: u64,
    seed: RandomState,
    drawn: u64,
}

impl<'a> Draw<'a> {
    fn new(files: &'a [WeightFile], extent_bytes: u64) -> Self {
        let total = files.iter().map(|f| f.bytes).sum();
        Self { files, total, extent_bytes, seed: RandomState::new(), drawn: 0 }
    }

    fn extent(&mut self) -> Extent {
        self.drawn += 1;
        let mut at = self.seed.hash_one(self.drawn) % self.total.max(1);
        for (number, file) in self.files.iter().enumerate() {
            if at < file.bytes {
                let bytes = self.extent_bytes.min(file.bytes);
                let file_id = FileId(u16::try_from(number).unwrap_or(u16::MAX));
                return Extent { file: file_id, offset: at.min(file.bytes - bytes), bytes };
            }
            at -= file.bytes;
        }
        Extent { file: FileId(0), offset: 0, bytes: 0 }
    }
}

/// How the cores read memory, all together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MemoryFigure {
    /// Threads.
    pub threads: usize,
    /// Bytes per second that are merely added up.
    pub read_bytes_per_second: f64,
    /// Bytes of bf16 weights per second that the kernels multiply with one vector.
    pub product_bytes_per_second: f64,
}

/// One thread's part of the memory test.
struct Part {
    weights: Vec<u8>,
    y: Vec<f32>,
    rate: f64,
}

/// Measures memory for about `time` each way, on every core of `machine`.
///
/// # Errors
/// A thread that cannot be started.
pub fn measure_memory(
    machine: &Machine,
    kernels: Kernels,
    time: Duration,
) -> Result<MemoryFigure, DoctorError> {
    let threads = machine.cores.max(1);
    let bytes = MEMORY_TEST_BYTES.min(machine.memory_left_bytes() / MEMORY_SHARE) / threads as u64;
    let tile = (TILE_ROWS * COLS * 2) as u64;
    let rows = usize::try_from(bytes / tile).unwrap_or(1).clamp(1, 1 << 16) * TILE_ROWS;
    let len = tiled_bytes(rows, COLS)?;
    // Not zeros: pages of zeros may be one page.
    let part = || Mutex::new(Part { weights: vec![0x3c; len], y: vec![0.0; rows], rate: 0.0 });
    let parts: Vec<Mutex<Part>> = (0..threads).map(|_| part()).collect();
    let x = vec![1.0f32; COLS];
    let mut team = Team::new(threads, true)?;
    let read_bytes_per_second = throughput(&mut team, &parts, time, |part| {
        let words = part.weights.chunks_exact(8).filter_map(|w| w.try_into().ok()).map(u64::from_ne_bytes);
        std::hint::black_box(words.fold(0u64, u64::wrapping_add));
    })?;
    let product_bytes_per_second = throughput(&mut team, &parts, time, |part| {
        if let Ok(w) = Bf16Tiled::new(&part.weights, rows, COLS) {
            kernels.matmul(Matrix::Bf16Tiled(w), 0..rows, Columns::one(&x), Out::one(&mut part.y));
        }
    })?;
    // What is multiplied has been read.
    let read_bytes_per_second = read_bytes_per_second.max(product_bytes_per_second);
    Ok(MemoryFigure { threads, read_bytes_per_second, product_bytes_per_second })
}

/// Bytes per second of all threads together, each going over its weights again and again: the best of
/// several rounds within `time`, since other work on the machine can only slow one down.
fn throughput(
    team: &mut Team,
    parts: &[Mutex<Part>],
    time: Duration,
    work: impl Fn(&mut Part) + Sync,
) -> Result<f64, TeamError> {
    let mut best = 0.0f64;
    let begun = Instant::now();
    while best == 0.0 || begun.elapsed() < time {
        team.run(&|thread| {
            let mut part = parts[thread].lock().unwrap_or_else(PoisonError::into_inner);
            let started = Instant::now();
            let mut bytes = 0;
            while bytes == 0 || started.elapsed() < time / MEMORY_ROUNDS {
                work(&mut part);
                bytes += part.weights.len();
            }
            part.rate = bytes as f64 / started.elapsed().as_secs_f64();
        })?;
        best = best.max(parts.iter().map(|p| p.lock().unwrap_or_else(PoisonError::into_inner).rate).sum());
    }
    Ok(best)
}

/// Room on a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DiskSpace {
    /// A directory on it.
    pub path: PathBuf,
    /// Bytes that can be written.
    pub free_bytes: u64,
    /// Its size.
    pub total_bytes: u64,
}

/// Room on the disk that `path` lies on.
///
/// # Errors
/// The system's.
pub fn disk_space(path: &Path) -> Result<DiskSpace, DoctorError> {
    let disk = rustix::fs::statvfs(path)
        .map_err(|e| DoctorError::Space { path: path.to_owned(), source: e.into() })?;
    let bytes = |blocks: u64| blocks.saturating_mul(disk.f_frsize);
    Ok(DiskSpace {
        path: path.to_owned(),
        free_bytes: bytes(disk.f_bavail),
        total_bytes: bytes(disk.f_blocks),
    })
}

/// A preset on this machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// Its name.
    pub preset: &'static str,
    /// What it takes and how fast it is, where it fits.
    pub outlook: Option<Outlook>,
    /// Why it does not fit.
    pub refused: Option<String>,
}

/// What is to be expected of a preset.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Outlook {
    /// Memory of the whole process.
    pub planned_bytes: u64,
    /// Bytes read from disk per token without a cache hit.
    pub disk_bytes_per_token_max: u64,
    /// Time per token without a cache hit, where the disk's speed is known.
    pub prediction: Option<Prediction>,
}

/// Every built-in preset for real models, planned for this machine.
///
/// # Errors
/// A built-in preset that cannot be read.
pub fn candidates(
    config: &ModelConfig,
    shape: &ModelShape,
    machine: &Machine,
    rates: Option<Rates>,
) -> Result<Vec<Candidate>, DoctorError> {
    let names = LADDER.into_iter().chain(["auto"]);
    names
        .map(|name| Ok(candidate(name, &Preset::load(name, &[])?, (config, shape), machine, rates)))
        .collect()
}

fn candidate(
    name: &'static str,
    preset: &Preset,
    (config, shape): (&ModelConfig, &ModelShape),
    machine: &Machine,
    rates: Option<Rates>,
) -> Candidate {
    match plan(preset, config, shape, machine) {
        Err(error) => Candidate { preset: name, outlook: None, refused: Some(error.to_string()) },
        Ok(plan) => {
            let outlook = Outlook {
                planned_bytes: plan.ledger.total_bytes(),
                disk_bytes_per_token_max: plan.traffic.disk_bytes_max(),
                prediction: rates.map(|rates| Prediction::new(&plan.traffic, rates)),
            };
            Candidate { preset: name, outlook: Some(outlook), refused: None }
        }
    }
}

/// The fastest that fits; of those nearly as fast, the smallest. Where no speed is known, the one that
/// reads least.
#[must_use]
pub fn advised(candidates: &[Candidate]) -> Option<(&Candidate, &Outlook)> {
    let fitting = || candidates.iter().filter_map(|c| Some((c, c.outlook.as_ref()?)));
    let seconds =
        |o: &Outlook| o.prediction.map_or(o.disk_bytes_per_token_max as f64, |p| p.seconds_per_token);
    let least = fitting().map(|(_, o)| seconds(o)).min_by(f64::total_cmp)?;
    fitting()
        .filter(|(_, o)| seconds(o) * WORTH_MORE_MEMORY <= least)
        .min_by_key(|(_, outlook)| outlook.planned_bytes)
}

/// The largest rung of the ladder whose budget this machine has, whatever the model.
///
/// # Errors
/// A built-in preset that cannot be read.
pub fn rung_by_memory(machine: &Machine) -> Result<Option<&'static str>, DoctorError> {
    let allowed = machine_budget_bytes(machine);
    let mut largest = None;
    for name in LADDER {
        match Preset::load(name, &[])?.budget {
            MemoryBudget::Limit(budget) if budget.0 <= allowed => largest = Some(name),
            MemoryBudget::Limit(_) | MemoryBudget::Auto => {}
        }
    }
    Ok(largest)
}

/// A measured speed as plans take it; at least one byte per second.
#[must_use]
pub fn rate(bytes_per_second: f64) -> Rate {
    Rate(Bytes((bytes_per_second as u64).max(1)))
}
