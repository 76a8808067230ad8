//! The transposed product of a row-major matrix.

use core::ops::Range;

use super::{CHUNK, add_sums, put_tile};
use crate::tile::TileLanes;
use crate::weights::{Bf16Rows, F32Rows, TILE_ROWS};

/// A row-major matrix, 16 columns of a row at a time.
pub(super) trait RowMajor: Copy {
    /// The columns `16 b .. 16 b + 16` of a row, zeros past its end.
    fn block<L: TileLanes>(&self, l: L, row: usize, b: usize) -> [L::F; 2];
}

impl RowMajor for Bf16Rows<'_> {
    #[inline(always)]
    fn block<L: TileLanes>(&self, l: L, row: usize, b: usize) -> [L::F; 2] {
        let (blocks, rest) = self.row(row).as_chunks();
        match blocks.get(b) {
            Some(block) => l.bf16_column(block),
            None => l.bf16_column(&padded(rest)),
        }
    }
}

impl RowMajor for F32Rows<'_> {
    #[inline(always)]
    fn block<L: TileLanes>(&self, l: L, row: usize, b: usize) -> [L::F; 2] {
        let (blocks, rest) = self.row(row).as_chunks();
        match blocks.get(b) {
            Some(block) => l.f32_column(block),
            None => l.f32_column(&padded(rest)),
        }
    }
}

#[inline(always)]
fn padded<const N: usize>(rest: &[u8]) -> [u8; N] {
    let mut block = [0; N];
    block[..rest.len()].copy_from_slice(rest);
    block
}

/// Blocks of 16 columns whose sums are held at once.
const BLOCKS: usize = 4;

#[inline(always)]
pub(super) fn transposed<L: TileLanes, S: RowMajor>(
    l: L,
    w: S,
    rows: Range<usize>,
    x: &[f32],
    y: &mut [f32],
) {
    let mut b = 0;
    for y in y.chunks_mut(TILE_ROWS * BLOCKS) {
        if y.len() == TILE_ROWS * BLOCKS {
            column_sums::<L, S, BLOCKS>(l, w, rows.start, x, (b, y));
        } else {
            for (i, y) in y.chunks_mut(TILE_ROWS).enumerate() {
                column_sums::<L, S, 1>(l, w, rows.start, x, (b + i, y));
            }
        }
        b += BLOCKS;
    }
}

/// The sums of the blocks of columns `b..b + N`, over the rows from `row` on.
#[inline(always)]
fn column_sums<L: TileLanes, S: RowMajor, const N: usize>(
    l: L,
    w: S,
    mut row: usize,
    x: &[f32],
    (b, y): (usize, &mut [f32]),
) {
    let mut totals = [[l.splat(0.0); 2]; N];
    for x in x.chunks(CHUNK) {
        let mut sums = [[l.splat(0.0); 2]; N];
        for &x in x {
            let x = l.splat(x);
            for (i, sum) in sums.iter_mut().enumerate() {
                let w = w.block(l, row, b + i);
                *sum = [l.fma(w[0], x, sum[0]), l.fma(w[1], x, sum[1])];
            }
            row += 1;
        }
        add_sums(l, &mut totals, sums);
    }
    for (i, y) in y.chunks_mut(TILE_ROWS).enumerate() {
        put_tile(y, 0, l.rows(totals[i]));
    }
}
