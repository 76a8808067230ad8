//! Where the chunks of a tile come from, for each stored form of a matrix.

use core::array;
use core::ops::Range;

use super::CHUNK;
use crate::hn::{HnTiled, QUAD_COLS};
use crate::lanes::LANES;
use crate::tile::{COLUMN_BYTES, TileLanes};
use crate::weights::{Bf16Rows, Bf16Tiled, F32Rows, TILE_ROWS};

/// A matrix of which any chunk of a tile can be had as columns of 16 weights.
pub(super) trait Source: Copy {
    /// The 16 weights.
    type Column: Copy;
    /// 16 zeros.
    const ZEROS: Self::Column;

    fn cols(&self) -> usize;
    fn widen<L: TileLanes>(l: L, column: &Self::Column) -> [L::F; 2];
    fn bytes(column: &Self::Column) -> &[u8];
    /// The columns `cols` (at most a chunk) of the 16 rows from `row` on; rows past the end of the matrix
    /// may hold anything. `buffer` is for a source that must make them.
    fn chunk<'c, L: TileLanes>(
        &'c self,
        l: L,
        row: usize,
        cols: Range<usize>,
        buffer: &'c mut [Self::Column; CHUNK],
    ) -> &'c [Self::Column];
}

/// The forms of bf16 share one body: what differs is how a chunk is come by.
#[derive(Clone, Copy)]
pub(super) enum Bf16Any<'a> {
    Rows(Bf16Rows<'a>),
    Tiled(Bf16Tiled<'a>),
    Hn(HnTiled<'a>),
}

impl Source for Bf16Any<'_> {
    type Column = [u8; COLUMN_BYTES];
    const ZEROS: Self::Column = [0; COLUMN_BYTES];

    #[inline(always)]
    fn cols(&self) -> usize {
        match self {
            Self::Rows(w) => w.cols(),
            Self::Tiled(w) => w.cols(),
            Self::Hn(w) => w.cols(),
        }
    }

    #[inline(always)]
    fn widen<L: TileLanes>(l: L, column: &Self::Column) -> [L::F; 2] {
        l.bf16_column(column)
    }

    #[inline(always)]
    fn bytes(column: &Self::Column) -> &[u8] {
        column
    }

    #[inline(always)]
    fn chunk<'c, L: TileLanes>(
        &'c self,
        l: L,
        row: usize,
        cols: Range<usize>,
        buffer: &'c mut [Self::Column; CHUNK],
    ) -> &'c [Self::Column] {
        match self {
            Self::Rows(w) => tile_chunk(l, w, row, cols.clone(), &mut buffer[..cols.len()]),
            Self::Tiled(w) => return &w.tile(row / TILE_ROWS)[cols],
            Self::Hn(w) => decode_chunk(l, w, row / TILE_ROWS, cols.clone(), buffer),
        }
        &buffer[..cols.len()]
    }
}

/// The columns `cols` of a tile.
#[inline(always)]
fn decode_chunk<L: TileLanes>(
    l: L,
    w: &HnTiled<'_>,
    tile: usize,
    cols: Range<usize>,
    buffer: &mut [[u8; COLUMN_BYTES]; CHUNK],
) {
    let quads = &w.tile(tile)[cols.start / QUAD_COLS..cols.end.div_ceil(QUAD_COLS)];
    let table = l.hn_table(w.table());
    for (quad, columns) in quads.iter().zip(buffer.as_chunks_mut::<QUAD_COLS>().0) {
        l.hn_decode(quad, table, columns);
    }
    for escape in w.escapes(tile, cols.clone()) {
        buffer[escape.col - cols.start][escape.row * 2 + 1] = escape.high;
    }
}

impl Source for F32Rows<'_> {
    type Column = [u8; TILE_ROWS * 4];
    const ZEROS: Self::Column = [0; TILE_ROWS * 4];

    #[inline(always)]
    fn cols(&self) -> usize {
        self.cols()
    }

    #[inline(always)]
    fn widen<L: TileLanes>(l: L, column: &Self::Column) -> [L::F; 2] {
        l.f32_column(column)
    }

    #[inline(always)]
    fn bytes(column: &Self::Column) -> &[u8] {
        column
    }

    #[inline(always)]
    fn chunk<'c, L: TileLanes>(
        &'c self,
        _: L,
        row: usize,
        cols: Range<usize>,
        buffer: &'c mut [Self::Column; CHUNK],
    ) -> &'c [Self::Column] {
        for r in 0..TILE_ROWS.min(self.rows() - row) {
            let weights = &self.row(row + r).as_chunks::<4>().0[cols.clone()];
            for (column, weight) in buffer.iter_mut().zip(weights) {
                column[r * 4..r * 4 + 4].copy_from_slice(weight);
            }
        }
        &buffer[..cols.len()]
    }
}

/// The columns `cols` of the 16 rows from `row` on, as a tile; rows past the end of the matrix repeat the
/// last one.
#[inline(always)]
pub(super) fn tile_chunk<L: TileLanes>(
    l: L,
    src: &Bf16Rows<'_>,
    row: usize,
    cols: Range<usize>,
    to: &mut [[u8; COLUMN_BYTES]],
) {
    let last = src.rows() - 1;
    let rows: [&[[u8; 2]]; TILE_ROWS] =
        array::from_fn(|r| &src.row(last.min(row + r)).as_chunks().0[cols.clone()]);
    let (blocks, rest) = to.as_chunks_mut::<LANES>();
    for (b, block) in blocks.iter_mut().enumerate() {
        let from: [&[u8; 16]; TILE_ROWS] = array::from_fn(|r| block_of(rows[r], b));
        l.transpose(&from, block);
    }
    let done = blocks.len() * LANES;
    for (c, column) in rest.iter_mut().enumerate() {
        for (weight, row) in column.as_chunks_mut::<2>().0.iter_mut().zip(&rows) {
            *weight = row[done + c];
        }
    }
}

/// The bytes of the weights `8 b .. 8 b + 8`.
#[inline(always)]
fn block_of(row: &[[u8; 2]], b: usize) -> &[u8; 16] {
    &row.as_flattened().as_chunks().0[b]
}
