//! The order in which a pass needs its weights, cut into blocks: pure data, computed from shapes alone.
//!
//! A *block* is a contiguous run of rows of one matrix, the unit of streaming, pinning and packing. The
//! same partition is used by the plan (sizes), the readers (what to fetch next), the pack (what lies
//! where) and the executor (which rows arrive); it lives here so that they cannot disagree.

use std::ops::Range;

use crate::model::config::ModelConfig;
use crate::model::tensors::{DType, MatrixKind, MatrixRef, ModelTensors};
use crate::units::LayerIndex;

/// Rows of a kernel tile: blocks start at a multiple of it, so that a block can be tiled by itself.
pub const TILE_ROWS: usize = 16;

/// A contiguous run of rows of one matrix: the unit of streaming.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockId {
    /// The matrix.
    pub kind: MatrixKind,
    /// Its layer; `None` for the head.
    pub layer: Option<LayerIndex>,
    /// Rows of the matrix that the block holds.
    pub rows: Range<usize>,
}

/// Shape of one matrix of a pass, wherever it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassMatrix {
    /// Its part.
    pub kind: MatrixKind,
    /// Its layer; `None` for the head.
    pub layer: Option<LayerIndex>,
    /// Output width.
    pub rows: usize,
    /// Input width.
    pub cols: usize,
    /// Number type as stored.
    pub dtype: DType,
}

impl PassMatrix {
    /// Bytes of one row as stored.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        self.cols as u64 * self.dtype.bytes() as u64
    }

    /// Bytes of the whole matrix as stored.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        self.rows as u64 * self.row_bytes()
    }

    /// Whether a resident copy is kept in tiles. `kv_b` is read by whole heads in both directions and
    /// f32 matrices have no tiled form: both stay row-major.
    #[must_use]
    pub fn is_tiled(&self) -> bool {
        self.dtype == DType::Bf16 && self.kind != MatrixKind::MlaKvB
    }
}

impl From<&MatrixRef> for PassMatrix {
    fn from(m: &MatrixRef) -> Self {
        Self { kind: m.kind, layer: m.layer, rows: m.rows, cols: m.cols, dtype: m.dtype }
    }
}

/// One block of the walk, with its sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockShape {
    /// Which rows of which matrix.
    pub id: BlockId,
    /// Input width of the matrix.
    pub cols: usize,
    /// Number type as stored.
    pub dtype: DType,
    /// Bytes of the rows as stored: row-major, contiguous in the tensor from `id.rows.start` on.
    pub stored_bytes: u64,
    /// Bytes of the rows as kept when pinned: tiles of [`TILE_ROWS`] rows, the last one padded, or
    /// `stored_bytes` where the matrix is not tiled.
    pub resident_bytes: u64,
}

impl BlockShape {
    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.id.rows.len()
    }

    /// Offset of the block's first byte within its tensor.
    #[must_use]
    pub fn tensor_offset(&self) -> u64 {
        self.id.rows.start as u64 * self.cols as u64 * self.dtype.bytes() as u64
    }
}

/// How matrices are cut into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Largest block wanted, in bytes as stored. A block is never less than one indivisible run of
    /// rows, so a block may be larger where rows are very long.
    pub block_bytes: u64,
    /// Rows of `kv_b` that belong to one head; its blocks hold whole heads.
    pub kv_head_rows: usize,
}

impl Partition {
    /// The partition of one model at one block size.
    #[must_use]
    pub fn new(config: &ModelConfig, block_bytes: u64) -> Self {
        Self { block_bytes, kv_head_rows: config.mla.nope_dim + config.mla.v_dim }
    }

    /// Blocks of one matrix, rows ascending. A matrix that is no larger than a block is one block;
    /// others are cut into the fewest blocks that fit, of sizes as equal as whole tiles allow.
    pub fn matrix_blocks(&self, m: PassMatrix) -> impl Iterator<Item = BlockShape> + use<> {
        let quantum = if m.kind == MatrixKind::MlaKvB { self.kv_head_rows } else { TILE_ROWS }.max(1);
        let rows_per_block = if m.stored_bytes() <= self.block_bytes {
            m.rows.max(1)
        } else {
            let fitting = usize::try_from(self.block_bytes / m.row_bytes().max(1)).unwrap_or(usize::MAX);
            let most = (fitting / quantum).max(1) * quantum;
            let count = m.rows.div_ceil(most);
            m.rows.div_ceil(count).next_multiple_of(quantum)
        };
        (0..m.rows).step_by(rows_per_block).map(move |start| {
            let rows = start..(start + rows_per_block).min(m.rows);
            let stored_bytes = rows.len() as u64 * m.row_bytes();
            let resident_bytes = if m.is_tiled() {
                rows.len().next_multiple_of(TILE_ROWS) as u64 * m.row_bytes()
            } else {
                stored_bytes
            };
            let id = BlockId { kind: m.kind, layer: m.layer, rows };
            BlockShape { id, cols: m.cols, dtype: m.dtype, stored_bytes, resident_bytes }
        })
    }

    /// Blocks of many matrices, in the order given.
    pub fn blocks(&self, matrices: impl IntoIterator<Item = PassMatrix>) -> Vec<BlockShape> {
        matrices.into_iter().flat_map(|m| self.matrix_blocks(m)).collect()
    }
}

/// The matrices of a whole pass in order of execution: every layer's, then the head.
pub fn pass_matrices(tensors: &ModelTensors) -> impl Iterator<Item = PassMatrix> + '_ {
    tensors
        .layers
        .iter()
        .flat_map(|l| &l.matrices)
        .chain(std::iter::once(&tensors.head))
        .map(PassMatrix::from)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shape(kind: MatrixKind, rows: usize, cols: usize, dtype: DType) -> PassMatrix {
        PassMatrix { kind, layer: Some(LayerIndex(0)), rows, cols, dtype }
    }

    #[test]
    fn k3_query_projection_in_16_mib_blocks() {
        let p = Partition { block_bytes: 16 << 20, kv_head_rows: 256 };
        let blocks = p.blocks([shape(MatrixKind::KdaQ, 12288, 7168, DType::Bf16)]);
        assert_eq!(blocks.len(), 11);
        assert_eq!(blocks[0].id.rows, 0..1120);
        assert_eq!(blocks[10].id.rows, 11200..12288);
        assert!(blocks.iter().all(|b| b.stored_bytes <= 16 << 20));
    }

    #[test]
    fn kv_b_is_cut_between_heads_and_never_tiled() {
        let p = Partition { block_bytes: 1 << 20, kv_head_rows: 24 };
        let blocks = p.blocks([shape(MatrixKind::MlaKvB, 24 * 7, 100_000, DType::Bf16)]);
        assert_eq!(blocks.len(), 7, "a head larger than a block is a block");
        for b in &blocks {
            assert_eq!((b.id.rows.start % 24, b.rows()), (0, 24));
            assert_eq!(b.resident_bytes, b.stored_bytes);
        }
    }

    #[test]
    fn small_matrices_are_one_block_whatever_their_height() {
        let p = Partition { block_bytes: 1 << 20, kv_head_rows: 32 };
        let blocks = p.blocks([
            shape(MatrixKind::KdaBeta, 6, 100, DType::Bf16),
            shape(MatrixKind::Router, 9, 100, DType::F32),
        ]);
        assert_eq!(blocks[0].id.rows, 0..6);
        assert_eq!((blocks[0].stored_bytes, blocks[0].resident_bytes), (1200, 3200));
        assert_eq!((blocks[1].stored_bytes, blocks[1].resident_bytes), (3600, 3600));
    }

    proptest! {
        #[test]
        fn blocks_cover_every_row_once(
            rows in 1usize..5000, cols in 1usize..3000, block_bytes in 1u64..1_000_000,
            head_rows in 1usize..300, kv_b: bool, f32_stored: bool,
        ) {
            let kind = if kv_b { MatrixKind::MlaKvB } else { MatrixKind::KdaQ };
            let dtype = if f32_stored { DType::F32 } else { DType::Bf16 };
            let p = Partition { block_bytes, kv_head_rows: head_rows };
            let m = shape(kind, rows, cols, dtype);
            let quantum = if kv_b { head_rows } else { TILE_ROWS };
            let mut next = 0;
            for b in p.matrix_blocks(m) {
                prop_assert_eq!(b.id.rows.start, next);
                prop_assert!(b.rows() > 0 && b.id.rows.start % quantum == 0);
                prop_assert!(b.stored_bytes <= block_bytes || b.rows() <= quantum);
                prop_assert_eq!(b.tensor_offset(), next as u64 * m.row_bytes());
                next = b.id.rows.end;
            }
            prop_assert_eq!(next, rows);
        }
    }
}
