//! A row-major bf16 matrix times one vector. The sums of chunks do not depend on each other: a lane is a chunk of
//! a row, so that memory is read along the rows, a few of them at a time.

use core::array;
use core::ops::Range;

use super::{CHUNK, settle};
use crate::lanes::LANES;
use crate::out::{Columns, Out};
use crate::tile::TileLanes;
use crate::weights::{Bf16Rows, TILE_ROWS};

/// Vectors of sums that are added to in turn, so that none waits for its last addition.
const VECTORS: usize = 4;
/// Bytes that a vector of sums takes from a chunk at a time.
const PIECE: usize = 2 * LANES;
/// Bytes of a cache line.
const LINE: usize = 64;

/// As many chunks of a row at a time as there are lanes, then half as many of twice the rows, and so on.
#[inline(always)]
pub(super) fn one<L: TileLanes>(l: L, w: Bf16Rows<'_>, rows: Range<usize>, x: Columns<'_>, mut out: Out<'_>) {
    let y = out.column(0);
    y.fill(0.0);
    let (chunks, rest) = x.column(0).as_chunks::<CHUNK>();
    let first = (rows.start, 0);
    let (chunks, first) = strips::<L, 8, 4>(l, &w, first, chunks, y);
    let (chunks, first) = strips::<L, 4, 8>(l, &w, first, chunks, y);
    let (chunks, first) = strips::<L, 2, 16>(l, &w, first, chunks, y);
    let (_, first) = strips::<L, 1, 32>(l, &w, first, chunks, y);
    if !rest.is_empty() {
        short(l, &w, first, rest, y);
    }
    settle(y);
}

/// Adds the sums of `G` chunks at a time of `R` rows, as long as there are so many chunks. `first`: a row, a chunk
/// of it. What is left: chunks, and where they begin.
#[inline(always)]
fn strips<'x, L: TileLanes, const G: usize, const R: usize>(
    l: L,
    w: &Bf16Rows<'_>,
    (row, chunk): (usize, usize),
    x: &'x [[f32; CHUNK]],
    y: &mut [f32],
) -> (&'x [[f32; CHUNK]], (usize, usize)) {
    const { assert!(G * R == VECTORS * LANES, "a lane for each chunk of a row") };
    let (strips, left) = x.as_chunks::<G>();
    for (i, x) in strips.iter().enumerate() {
        // Lane by lane, as the weights will be.
        let mut lanes = [[0.0; LANES]; CHUNK];
        for (c, lanes) in lanes.iter_mut().enumerate() {
            for (k, lane) in lanes.iter_mut().enumerate() {
                *lane = x[k % G][c];
            }
        }
        for (step, y) in y.chunks_mut(R).enumerate() {
            add_rows::<L, G, R>(l, w, (row + step * R, chunk + i * G), &lanes, y);
        }
    }
    (left, (row, chunk + strips.len() * G))
}

/// Adds the sums of `G` chunks of up to `R` rows.
#[inline(always)]
fn add_rows<L: TileLanes, const G: usize, const R: usize>(
    l: L,
    w: &Bf16Rows<'_>,
    (row, chunk): (usize, usize),
    x: &[[f32; LANES]; CHUNK],
    y: &mut [f32],
) {
    let last = w.rows() - 1;
    let mut rows = [&[[[0; PIECE]; CHUNK / LANES]; G]; R];
    for (r, to) in rows.iter_mut().enumerate() {
        let bytes = &w.row(last.min(row + r))[chunk * CHUNK * 2..];
        *to = bytes.as_chunks().0.as_chunks().0.first_chunk().unwrap_or(to);
    }
    // What is two steps below is asked for: a step takes about as long as memory takes to answer.
    let ahead = 2 * R * w.cols() * 2;
    let mut sums = [l.splat(0.0); VECTORS];
    for (b, x) in x.as_chunks::<LANES>().0.iter().enumerate() {
        for row in rows {
            for line in (0..G * PIECE).step_by(LINE) {
                l.prefetch_far(row.as_flattened().as_flattened(), ahead + b * G * PIECE + line);
            }
        }
        for (v, sum) in sums.iter_mut().enumerate() {
            let columns = l.bf16_rows(array::from_fn(|k| &rows[(v * LANES + k) / G][(v * LANES + k) % G][b]));
            for (column, x) in columns.into_iter().zip(x) {
                *sum = l.fma(column, l.load(x), *sum);
            }
        }
    }
    let mut values = [[0.0; LANES]; VECTORS];
    for (to, sum) in values.iter_mut().zip(sums) {
        l.store(sum, to);
    }
    for (y, sums) in y.iter_mut().zip(values.as_flattened().as_chunks::<G>().0) {
        for sum in sums {
            *y += sum;
        }
    }
}

/// Adds the sums of the last chunk of a matrix whose columns are no multiple of [`CHUNK`]: here lanes are rows.
#[inline(always)]
fn short<L: TileLanes>(l: L, w: &Bf16Rows<'_>, (row, chunk): (usize, usize), x: &[f32], y: &mut [f32]) {
    let last = w.rows() - 1;
    for (step, y) in y.chunks_mut(TILE_ROWS).enumerate() {
        let row = row + step * TILE_ROWS;
        let rows: [&[u8]; TILE_ROWS] = array::from_fn(|r| &w.row(last.min(row + r))[chunk * CHUNK * 2..]);
        let mut values = [0.0; TILE_ROWS];
        let sums = short_sums(l, rows, x);
        l.store(sums[0], &mut values);
        l.store(sums[1], &mut values[LANES..]);
        for (y, sum) in y.iter_mut().zip(values) {
            *y += sum;
        }
    }
}

#[inline(always)]
fn short_sums<L: TileLanes>(l: L, rows: [&[u8]; TILE_ROWS], x: &[f32]) -> [L::F; 2] {
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
