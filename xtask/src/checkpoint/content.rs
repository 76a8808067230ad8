//! Which rows of a synthetic checkpoint hold values, and writing them. Of the full-scale one: whatever
//! steers the computation whole, and a few rows of everything else, in every part of every matrix, so that
//! the logits depend on all of them.

// Runs of rows come in lists, also where there is one.
#![allow(clippy::single_range_in_vec_init)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use k3_pipeline::model::layout::{EMBED_NAME, HEAD_NAME};
use k3_pipeline::model::synth::{Fill, SynthTensor, SynthType};

use super::weights;

/// Counts as part of the content: other weights need another number.
pub const CONTENT_VERSION: u32 = 1;
/// Seed of all values.
pub const SEED: u64 = 3;
/// Rows of embedding and head that are there from the first token id on.
const FIRST_TOKENS: usize = 1024;
/// What the file system hands out at least.
const DISK_BLOCK: u64 = 4096;

/// Real rows in every `stride` rows.
const REAL_ROWS: usize = 16;
/// One expert in this many has content, others in every layer.
const EXPERT_STRIDE: usize = 4;
/// Real rows of each of an expert's tensors.
const EXPERT_ROWS: usize = 4;

/// Bytes that are made and written at once.
const CHUNK_BYTES: u64 = 8 << 20;

/// Says which rows of a tensor hold values; the rest are holes.
pub type Rows = fn(&SynthTensor) -> Vec<Range<usize>>;

/// Every row of `tensor`.
#[must_use]
pub fn all_rows(tensor: &SynthTensor) -> Vec<Range<usize>> {
    vec![0..weights::rows_of(tensor).0]
}

/// A few rows of `tensor`, all of those that steer.
#[must_use]
pub fn few_rows(tensor: &SynthTensor) -> Vec<Range<usize>> {
    let (rows, _) = weights::rows_of(tensor);
    let name = tensor.name.as_str();
    match tensor.dtype {
        SynthType::F32 => vec![0..rows],
        SynthType::U8 => match expert_of(name) {
            Some((layer, expert)) if expert % EXPERT_STRIDE == layer % EXPERT_STRIDE => {
                vec![0..rows.min(EXPERT_ROWS)]
            }
            _ => Vec::new(),
        },
        SynthType::Bf16 if rows == 1 || name.ends_with("block_sparse_moe.gate.weight") => vec![0..rows],
        SynthType::Bf16 if name == EMBED_NAME || name == HEAD_NAME => {
            let first = FIRST_TOKENS.min(rows);
            std::iter::once(0..first).chain(every(1024, first, rows)).collect()
        }
        SynthType::Bf16 => {
            // Heads of an MLA layer have parts that mean different things, some as short as 64 rows.
            let short = ["q_b_proj.weight", "kv_a_proj_with_mqa.weight", "kv_b_proj.weight"];
            let stride = if short.iter().any(|s| name.ends_with(s)) { 64 } else { 2048 };
            every(stride, 0, rows).collect()
        }
    }
}

fn every(stride: usize, from: usize, rows: usize) -> impl Iterator<Item = Range<usize>> {
    (from..rows).step_by(stride).map(move |first| first..(first + REAL_ROWS).min(rows))
}

/// Layer and number of the expert that a tensor belongs to.
fn expert_of(name: &str) -> Option<(usize, usize)> {
    let (_, rest) = name.split_once(".layers.")?;
    let (layer, rest) = rest.split_once('.')?;
    let (_, rest) = rest.split_once(".experts.")?;
    let (expert, _) = rest.split_once('.')?;
    Some((layer.parse().ok()?, expert.parse().ok()?))
}

/// Disk space that `rows` of `tensor` take, at most.
#[must_use]
pub fn disk_bytes(tensor: &SynthTensor, real: Rows) -> u64 {
    let row_bytes = row_bytes(tensor);
    real(tensor).iter().map(|r| (r.len() as u64 * row_bytes).next_multiple_of(DISK_BLOCK) + DISK_BLOCK).sum()
}

/// Bytes of `rows` of `tensor`.
#[must_use]
pub fn value_bytes(tensor: &SynthTensor, real: Rows) -> u64 {
    real(tensor).iter().map(|r| r.len() as u64 * row_bytes(tensor)).sum()
}

fn row_bytes(tensor: &SynthTensor) -> u64 {
    let (rows, _) = weights::rows_of(tensor);
    tensor.bytes() / rows.max(1) as u64
}

/// Writes the values, and tells how far it is.
pub struct Content<'p> {
    rows: Rows,
    done: u64,
    buffer: Vec<u8>,
    progress: &'p mut dyn FnMut(u64) -> io::Result<()>,
}

impl<'p> Content<'p> {
    /// `progress` is told what [`value_bytes`] adds up to so far; its error ends the writing.
    pub fn new(rows: Rows, progress: &'p mut dyn FnMut(u64) -> io::Result<()>) -> Self {
        Self { rows, done: 0, buffer: Vec::new(), progress }
    }
}

impl Fill for Content<'_> {
    fn fill(&mut self, tensor: &SynthTensor, file: &File, offset: u64) -> io::Result<()> {
        let row_bytes = row_bytes(tensor);
        let chunk = usize::try_from(CHUNK_BYTES / row_bytes.max(1)).unwrap_or(usize::MAX).max(1);
        for run in (self.rows)(tensor) {
            for first in run.clone().step_by(chunk) {
                let rows = first..(first + chunk).min(run.end);
                self.buffer.clear();
                weights::append_rows(SEED, tensor, rows.clone(), &mut self.buffer);
                file.write_all_at(&self.buffer, offset + first as u64 * row_bytes)?;
                self.done += rows.len() as u64 * row_bytes;
                (self.progress)(self.done)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, dtype: SynthType, shape: &[usize]) -> SynthTensor {
        SynthTensor { name: name.to_owned(), dtype, shape: shape.to_vec() }
    }

    #[test]
    fn what_steers_is_whole_and_the_rest_has_rows_in_every_part() {
        let layer = "language_model.model.layers.5.";
        let rows =
            |name: &str, dtype, shape: &[usize]| few_rows(&tensor(&format!("{layer}{name}"), dtype, shape));
        assert_eq!(rows("block_sparse_moe.gate.weight", SynthType::Bf16, &[896, 7168]), [0..896]);
        assert_eq!(rows("mlp_res_proj.weight", SynthType::Bf16, &[1, 7168]), [0..1]);
        assert_eq!(rows("self_attn.q_conv1d.weight", SynthType::F32, &[12288, 1, 4]), [0..12288]);
        assert_eq!(
            rows("self_attn.q_proj.weight", SynthType::Bf16, &[4100, 8]),
            [0..16, 2048..2064, 4096..4100]
        );
        assert_eq!(rows("self_attn.kv_b_proj.weight", SynthType::Bf16, &[128, 8]), [0..16, 64..80]);
        let w1 = "w1.weight_packed";
        assert_eq!(rows(&format!("block_sparse_moe.experts.9.{w1}"), SynthType::U8, &[64, 8]), [0..4]);
        assert!(rows(&format!("block_sparse_moe.experts.8.{w1}"), SynthType::U8, &[64, 8]).is_empty());
        let head = few_rows(&tensor(HEAD_NAME, SynthType::Bf16, &[3000, 8]));
        assert_eq!(head, [0..1024, 1024..1040, 2048..2064]);
    }
}
