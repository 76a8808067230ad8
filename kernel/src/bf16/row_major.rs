//! A row-major bf16 matrix times one vector: rows are turned into lanes in registers, without a tile in
//! between.

use core::array;
use core::ops::Range;

use super::{CHUNK, put_tile};
use crate::lanes::LANES;
use crate::out::{Columns, Out};
use crate::tile::TileLanes;
use crate::weights::{Bf16Rows, TILE_ROWS};

/// Columns that are taken from a row at a time.
const BLOCK_COLS: usize = 2 * LANES;
/// Bytes of a row that are asked for ahead of their use.
const AHEAD_BYTES: usize = 256;

/// 16 rows at a time.
#[inline(always)]
pub(super) fn one<L: TileLanes>(l: L, w: Bf16Rows<'_>, rows: Range<usize>, x: Columns<'_>, mut out: Out<'_>) {
    let (x, y) = (x.column(0), out.column(0));
    for tile in 0..rows.len().div_ceil(TILE_ROWS) {
        put_tile(y, tile, tile_product(l, &w, rows.start + tile * TILE_ROWS, x));
    }
}

/// The products of the 16 rows from `first` on; rows past the end of the matrix repeat the last one.
#[inline(always)]
fn tile_product<L: TileLanes>(l: L, w: &Bf16Rows<'_>, first: usize, x: &[f32]) -> [f32; TILE_ROWS] {
    let last = w.rows() - 1;
    let rows: [&[u8]; TILE_ROWS] = array::from_fn(|r| w.row(last.min(first + r)));
    let mut totals = [l.splat(0.0); 2];
    for (chunk, x) in x.chunks(CHUNK).enumerate() {
        let bytes: [&[u8]; TILE_ROWS] = array::from_fn(|r| &rows[r][chunk * CHUNK * 2..][..x.len() * 2]);
        let sums = match x.first_chunk() {
            Some(x) => whole_chunk(l, bytes, x),
            None => short_chunk(l, bytes, x),
        };
        for (total, sum) in totals.iter_mut().zip(sums) {
            *total = l.add(*total, sum);
        }
    }
    let mut products = [0.0; TILE_ROWS];
    l.store(totals[0], &mut products);
    l.store(totals[1], &mut products[LANES..]);
    products
}

/// The sums of a chunk whose length the compiler knows, which spares a check for every block.
#[inline(always)]
fn whole_chunk<L: TileLanes>(l: L, rows: [&[u8]; TILE_ROWS], x: &[f32; CHUNK]) -> [L::F; 2] {
    let mut blocks = [&[[[0; 2 * LANES]; 2]; CHUNK / BLOCK_COLS]; TILE_ROWS];
    for (blocks, row) in blocks.iter_mut().zip(rows) {
        *blocks = row.as_chunks().0.as_chunks().0.first_chunk().unwrap_or(blocks);
    }
    let mut sums = [l.splat(0.0); 2];
    for (b, x) in x.as_chunks::<BLOCK_COLS>().0.iter().enumerate() {
        // Two blocks are a cache line: half of the rows with each.
        for row in blocks.as_chunks::<LANES>().0[b % 2] {
            l.prefetch(row.as_flattened().as_flattened(), b * BLOCK_COLS * 2 + AHEAD_BYTES);
        }
        for (sum, rows) in sums.iter_mut().zip(blocks.as_chunks::<LANES>().0) {
            for (half, x) in x.as_chunks::<LANES>().0.iter().enumerate() {
                let columns = l.bf16_rows(array::from_fn(|r| &rows[r][b][half]));
                for c in 0..LANES {
                    *sum = l.fma(columns[c], l.splat(x[c]), *sum);
                }
            }
        }
    }
    sums
}

/// The sums of the last chunk of a matrix whose columns are no multiple of [`CHUNK`].
#[inline(always)]
fn short_chunk<L: TileLanes>(l: L, rows: [&[u8]; TILE_ROWS], x: &[f32]) -> [L::F; 2] {
    let mut sums = [l.splat(0.0); 2];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for (b, x) in blocks.iter().enumerate() {
        for (sum, rows) in sums.iter_mut().zip(rows.as_chunks::<LANES>().0) {
            let columns = l.bf16_rows(array::from_fn(|r| &rows[r].as_chunks().0[b]));
            for c in 0..LANES {
                *sum = l.fma(columns[c], l.splat(x[c]), *sum);
            }
        }
    }
    for (c, &x) in (blocks.len() * LANES..).zip(rest) {
        let weight =
            |r: usize| f32::from_bits(u32::from_le_bytes([0, 0, rows[r][2 * c], rows[r][2 * c + 1]]));
        let column: [f32; TILE_ROWS] = array::from_fn(weight);
        let x = l.splat(x);
        sums = [l.fma(l.load(&column), x, sums[0]), l.fma(l.load(&column[LANES..]), x, sums[1])];
    }
    sums
}
