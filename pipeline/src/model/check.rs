//! Reading the weights themselves for values no product may use: NaN and infinity in dense tensors,
//! and MXFP4 scale bytes of 255, which the format defines as NaN.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use serde::Serialize;
use thiserror::Error;

use super::config::ModelConfig;
use super::layout::{self, MXFP4_GROUP};
use super::tensors::{DType, Extent, FileId, MatrixKind, MatrixRef, ModelTensors, VectorKind, VectorRef};
use crate::units::{ExpertId, LayerIndex};

/// Bytes read at once.
const CHUNK_BYTES: usize = 4 << 20;

/// Faults listed one by one.
pub const FAULTS_MAX: usize = 50;

/// A scale byte that means NaN.
pub const SCALE_NAN: u8 = 255;

/// A weight that no product may use.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize)]
#[serde(tag = "fault", rename_all = "snake_case")]
pub enum WeightFault {
    /// NaN or infinity.
    #[error("{tensor}: row {row}, column {col} is {value}")]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// Row, from 0; 0 in a vector.
        row: u64,
        /// Column, from 0.
        col: u64,
        /// "NaN", "infinity" or "-infinity".
        value: &'static str,
    },
    /// A scale byte of 255.
    #[error("{tensor}: row {row}, group {group} has the scale byte 255, which means NaN")]
    Scale {
        /// The tensor.
        tensor: String,
        /// Row, from 0.
        row: u64,
        /// Group of 32 columns, from 0.
        group: u64,
    },
}

/// Why a check did not come to its end.
#[derive(Debug, Error)]
#[error("{}: reading {bytes} bytes at {offset} failed: {source}", path.display())]
pub struct CheckError {
    path: PathBuf,
    offset: u64,
    bytes: usize,
    source: std::io::Error,
}

/// What a check found.
#[derive(Debug, Default, Serialize)]
pub struct CheckReport {
    /// Bytes looked at.
    pub bytes: u64,
    /// The first [`FAULTS_MAX`] faults, in order of the layers.
    pub faults: Vec<WeightFault>,
    /// All faults; of each tensor every faulty value counts.
    pub fault_count: u64,
}

/// Looks through every dense tensor and every scale byte of the text model. `progress` is called with
/// the bytes done so far.
///
/// # Errors
/// A file that can no longer be read as its header promised.
pub fn check_values(
    config: &ModelConfig,
    tensors: &ModelTensors,
    progress: &mut dyn FnMut(u64),
) -> Result<CheckReport, CheckError> {
    let mut checker = Checker {
        tensors,
        open: None,
        buffer: vec![0; CHUNK_BYTES],
        report: CheckReport::default(),
        progress,
    };
    each_task(config, tensors, &mut |task| checker.check(&task))?;
    Ok(checker.report)
}

/// Bytes that [`check_values`] reads.
#[must_use]
pub fn check_bytes(config: &ModelConfig, tensors: &ModelTensors) -> u64 {
    let mut total = 0;
    let mut add = |task: Task| {
        total += task.extent.bytes;
        Ok(())
    };
    // The closure cannot fail.
    let _ = each_task(config, tensors, &mut add);
    total
}

/// One tensor to look through.
struct Task {
    name: TaskName,
    kind: TaskKind,
    extent: Extent,
    /// Values of a row.
    cols: u64,
}

/// A name that is spelled out only for an error.
enum TaskName {
    Embed,
    Matrix(Option<LayerIndex>, MatrixKind),
    Vector(Option<LayerIndex>, VectorKind),
    Scale(LayerIndex, ExpertId, usize),
}

impl TaskName {
    fn text(&self) -> String {
        match *self {
            Self::Embed => layout::EMBED_NAME.to_owned(),
            Self::Matrix(layer, kind) => layout::matrix_name(layer, kind),
            Self::Vector(layer, kind) => layout::vector_name(layer, kind),
            Self::Scale(layer, expert, slot) => layout::expert_name(layer, expert, slot),
        }
    }
}

#[derive(Clone, Copy)]
enum TaskKind {
    Dense(DType),
    Scales,
}

fn matrix_task(m: &MatrixRef) -> Task {
    let (kind, cols) = (TaskKind::Dense(m.dtype), m.cols as u64);
    Task { name: TaskName::Matrix(m.layer, m.kind), kind, extent: m.extent, cols }
}

/// A vector is one row; of a padded `A_log` only the values that count.
fn vector_task(config: &ModelConfig, v: &VectorRef) -> Task {
    let used = if v.kind == VectorKind::ALog { config.kda.heads } else { v.len };
    let extent = Extent { bytes: (used * v.dtype.bytes()) as u64, ..v.extent };
    Task {
        name: TaskName::Vector(v.layer, v.kind),
        kind: TaskKind::Dense(v.dtype),
        extent,
        cols: used as u64,
    }
}

/// All tensors, layer by layer.
fn each_task(
    config: &ModelConfig,
    tensors: &ModelTensors,
    each: &mut dyn FnMut(Task) -> Result<(), CheckError>,
) -> Result<(), CheckError> {
    let scale_cols = layout::expert(config).map(|s| (s.cols / MXFP4_GROUP) as u64);
    let embed = &tensors.embed;
    let (kind, cols) = (TaskKind::Dense(embed.dtype), embed.cols as u64);
    each(Task { name: TaskName::Embed, kind, extent: embed.extent, cols })?;
    for (number, layer) in (0u16..).map(LayerIndex).zip(&tensors.layers) {
        layer.matrices.iter().try_for_each(|m| each(matrix_task(m)))?;
        layer.vectors.iter().try_for_each(|v| each(vector_task(config, v)))?;
        let Some(experts) = &layer.experts else { continue };
        for expert in (0u16..).map(ExpertId) {
            let Some(extents) = experts.extents(expert) else { break };
            for (part, &cols) in scale_cols.iter().enumerate() {
                let slot = 2 * part + 1;
                let name = TaskName::Scale(number, expert, slot);
                each(Task { name, kind: TaskKind::Scales, extent: extents.0[slot], cols })?;
            }
        }
    }
    tensors.vectors.iter().try_for_each(|v| each(vector_task(config, v)))?;
    each(matrix_task(&tensors.head))
}

struct Checker<'a> {
    tensors: &'a ModelTensors,
    /// The file read last.
    open: Option<(FileId, File)>,
    buffer: Vec<u8>,
    report: CheckReport,
    progress: &'a mut dyn FnMut(u64),
}

impl Checker<'_> {
    fn check(&mut self, task: &Task) -> Result<(), CheckError> {
        let id = task.extent.file;
        let path = self.tensors.files.get(usize::from(id.0)).map(|f| f.path.clone()).unwrap_or_default();
        let fail = |offset, bytes, source| CheckError { path: path.clone(), offset, bytes, source };
        let file = match self.open.take() {
            Some((current, file)) if current == id => file,
            _ => File::open(&path).map_err(|source| fail(0, 0, source))?,
        };
        let mut done = 0;
        while done < task.extent.bytes {
            let bytes = usize::try_from(task.extent.bytes - done).map_or(CHUNK_BYTES, |n| n.min(CHUNK_BYTES));
            let offset = task.extent.offset + done;
            file.read_exact_at(&mut self.buffer[..bytes], offset).map_err(|e| fail(offset, bytes, e))?;
            scan(task, &self.buffer[..bytes], done, &mut self.report);
            done += bytes as u64;
            self.report.bytes += bytes as u64;
            (self.progress)(self.report.bytes);
        }
        self.open = Some((id, file));
        Ok(())
    }
}

/// Notes the faults in a part of a tensor that begins `done` bytes into it.
fn scan(task: &Task, part: &[u8], done: u64, report: &mut CheckReport) {
    let mut note = |index: usize, width: usize, value: &'static str| {
        report.fault_count += 1;
        if report.faults.len() < FAULTS_MAX {
            let at = done / width as u64 + index as u64;
            let (row, col, tensor) = (at / task.cols, at % task.cols, task.name.text());
            report.faults.push(match task.kind {
                TaskKind::Dense(_) => WeightFault::NotFinite { tensor, row, col, value },
                TaskKind::Scales => WeightFault::Scale { tensor, row, group: col },
            });
        }
    };
    match task.kind {
        TaskKind::Scales => {
            for (i, _) in part.iter().enumerate().filter(|(_, b)| **b == SCALE_NAN) {
                note(i, 1, "NaN");
            }
        }
        TaskKind::Dense(dtype) => {
            for (i, bits) in words(part, dtype).enumerate().filter(|(_, bits)| not_finite(*bits)) {
                note(i, dtype.bytes(), describe(bits));
            }
        }
    }
}

/// The values as the bits of f32.
fn words(bytes: &[u8], dtype: DType) -> impl Iterator<Item = u32> {
    let width = dtype.bytes();
    bytes.chunks_exact(width).map(move |c| match *c {
        [a, b] => u32::from(u16::from_le_bytes([a, b])) << 16,
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
        _ => 0,
    })
}

fn not_finite(bits: u32) -> bool {
    bits & 0x7f80_0000 == 0x7f80_0000
}

fn describe(bits: u32) -> &'static str {
    match bits {
        0x7f80_0000 => "infinity",
        0xff80_0000 => "-infinity",
        _ => "NaN",
    }
}
