//! Dense products, "C256": `total = +0`; for each chunk of 256 columns, `a = +0`, `a = fma(w, x, a)` over its
//! columns ascending, `total += a`. Lanes are rows, or chunks of a row, so the order of a sum is the same on
//! every instruction set. A result that is not a number has the bits of `f32::NAN`.
//!
//! bf16 and f32 weights widen to f32 exactly. Against f64, the relative L2 error of a product with
//! inputs of one magnitude is about 2e-7.

use core::ops::Range;

use source::{Bf16Any, Source, tile_chunk};
use transposed::transposed;

use crate::dispatch::{Kernels, dispatch};
use crate::hn::{HnTiled, QUAD_COLS};
use crate::out::{Columns, Out};
use crate::tile::{COLUMN_BYTES, TileLanes};
use crate::weights::{Bf16Rows, Bf16Tiled, Matrix, TILE_ROWS, tiled_bytes};

mod row_major;
mod source;
#[cfg(test)]
mod tests;
mod transposed;

/// Columns of a chunk.
const CHUNK: usize = 256;

/// Most columns of a batch that share one pass over a chunk: their sums fill the registers of AVX2.
const GROUP_MAX: usize = 6;

/// Columns between two requests for what comes next.
const AHEAD_COLS: usize = 4;

/// Most columns of a batch whose values stay in L2 from one tile to the next.
const COLUMNS_NEAR: usize = 64;

/// Tiles that a product with more columns takes at a time: their chunks fit L2 beside a group of columns.
const TILES: usize = 8;

/// Tiles that are read at once by a product with one vector: memory likes several distant streams.
const STREAMS: usize = 4;

impl Kernels {
    /// `y[t] = W[rows] x[t]` for every column t, "C256" (see the [module](crate::bf16)).
    ///
    /// `x`: `count` columns of `w.cols()` values; `out`: as many columns of `rows.len()`. A column has the
    /// bits it would have alone, and a row those it would have in any other range. All bf16 forms of a
    /// matrix give the same bits. An infinite or NaN input makes every result of its column infinite or
    /// NaN, for a sum that has met one never becomes finite again.
    ///
    /// # Panics
    /// When lengths differ, `rows` is not within the matrix, or does not begin at a tile (16 rows).
    pub fn matmul(self, w: Matrix<'_>, rows: Range<usize>, x: Columns<'_>, out: Out<'_>) {
        assert!(rows.start <= rows.end && rows.end <= w.rows(), "rows {rows:?} of {}", w.rows());
        assert_eq!(x.len, w.cols(), "values of an input column");
        assert_eq!((out.rows(), out.count()), (rows.len(), x.count), "rows and columns of the output");
        let tiled = matches!(w, Matrix::Bf16Tiled(_) | Matrix::Hn(_));
        assert!(!tiled || rows.start.is_multiple_of(TILE_ROWS), "row {} does not begin a tile", rows.start);
        let w = match w {
            Matrix::Bf16Tiled(w) if x.count == 1 => {
                dispatch!(self, one, (w: Bf16Tiled<'_>, rows: Range<usize>, x: Columns<'_>, out: Out<'_>));
                return;
            }
            Matrix::Hn(w) if x.count == 1 => {
                dispatch!(self, one, (w: HnTiled<'_>, rows: Range<usize>, x: Columns<'_>, out: Out<'_>));
                return;
            }
            Matrix::Bf16Rows(w) if x.count == 1 => {
                dispatch!(
                    self,
                    row_major::one,
                    (w: Bf16Rows<'_>, rows: Range<usize>, x: Columns<'_>, out: Out<'_>)
                );
                return;
            }
            Matrix::F32Rows(w) => {
                dispatch!(
                    self,
                    many,
                    (w: crate::weights::F32Rows<'_>, rows: Range<usize>, x: Columns<'_>, out: Out<'_>)
                );
                return;
            }
            Matrix::Bf16Rows(w) => Bf16Any::Rows(w),
            Matrix::Bf16Tiled(w) => Bf16Any::Tiled(w),
            Matrix::Hn(w) => Bf16Any::Hn(w),
        };
        dispatch!(self, many, (w: Bf16Any<'_>, rows: Range<usize>, x: Columns<'_>, out: Out<'_>));
    }

    /// `y = W[rows]^T x`: "C256" with rows in the place of columns, so the sum of each column of W runs over
    /// the rows ascending, in chunks of 256. `x`: [rows.len()]; `y`: [w.cols()].
    ///
    /// # Panics
    /// When lengths differ, `rows` is not within the matrix, or the matrix is not row-major.
    pub fn matmul_t(self, w: Matrix<'_>, rows: Range<usize>, x: &[f32], y: &mut [f32]) {
        assert!(rows.start <= rows.end && rows.end <= w.rows(), "rows {rows:?} of {}", w.rows());
        assert_eq!((x.len(), y.len()), (rows.len(), w.cols()), "values of input and output");
        let row_major = matches!(w, Matrix::Bf16Rows(_) | Matrix::F32Rows(_));
        assert!(row_major, "the transposed product takes a row-major matrix");
        match w {
            Matrix::Bf16Rows(w) => {
                dispatch!(self, transposed, (w: Bf16Rows<'_>, rows: Range<usize>, x: &[f32], y: &mut [f32]));
            }
            Matrix::F32Rows(w) => {
                dispatch!(
                    self,
                    transposed,
                    (w: crate::weights::F32Rows<'_>, rows: Range<usize>, x: &[f32], y: &mut [f32])
                );
            }
            Matrix::Bf16Tiled(_) | Matrix::Hn(_) => {}
        }
    }

    /// Tiles a matrix: `[tile][column][16 rows]`, the missing rows of the last tile +0.
    ///
    /// # Panics
    /// When `dst` is not [`tiled_bytes`] long.
    pub fn tile_rows(self, src: Bf16Rows<'_>, dst: &mut [u8]) {
        assert_eq!(Ok(dst.len()), tiled_bytes(src.rows(), src.cols()), "bytes of the tiled form");
        dispatch!(self, tile_all, (src: Bf16Rows<'_>, dst: &mut [u8]));
    }
}

/// Undoes [`Kernels::tile_rows`].
///
/// # Panics
/// When `dst` is not `rows * cols * 2` bytes long.
pub fn untile_rows(src: Bf16Tiled<'_>, dst: &mut [u8]) {
    assert_eq!(dst.len(), src.rows() * src.cols() * 2, "bytes of the row-major form");
    for (index, row) in dst.chunks_exact_mut((src.cols() * 2).max(1)).enumerate() {
        let at = index % TILE_ROWS * 2;
        for (to, column) in row.as_chunks_mut::<2>().0.iter_mut().zip(src.tile(index / TILE_ROWS)) {
            to.copy_from_slice(&column[at..at + 2]);
        }
    }
}

#[inline(always)]
fn tile_all<L: TileLanes>(l: L, src: Bf16Rows<'_>, dst: &mut [u8]) {
    for (index, tile) in dst.as_chunks_mut().0.chunks_exact_mut(src.cols().max(1)).enumerate() {
        let row = index * TILE_ROWS;
        tile_chunk(l, &src, row, 0..src.cols(), tile);
        let rows = src.rows() - row;
        if rows < TILE_ROWS {
            for column in tile {
                column[rows * 2..].fill(0);
            }
        }
    }
}

/// Any number of columns. Those of many tokens fit no cache near the core: then several tiles take what has been
/// fetched of them.
#[inline(always)]
fn many<L: TileLanes, S: Source>(l: L, w: S, rows: Range<usize>, x: Columns<'_>, out: Out<'_>) {
    if x.count > COLUMNS_NEAR {
        blocks::<L, S, TILES>(l, w, rows, x, out);
    } else {
        blocks::<L, S, 1>(l, w, rows, x, out);
    }
}

/// `N` tiles at a time and chunk by chunk: a chunk of the matrix is read once for all columns, one of a column
/// once for all these tiles.
#[inline(always)]
fn blocks<L: TileLanes, S: Source, const N: usize>(
    l: L,
    w: S,
    rows: Range<usize>,
    x: Columns<'_>,
    mut out: Out<'_>,
) {
    let mut buffers = [[S::ZEROS; CHUNK]; N];
    for row in rows.clone().step_by(TILE_ROWS * N) {
        let part = row - rows.start..(row + TILE_ROWS * N).min(rows.end) - rows.start;
        let tiles = part.len().div_ceil(TILE_ROWS);
        for first in (0..w.cols().max(1)).step_by(CHUNK) {
            let cols = first..(first + CHUNK).min(w.cols());
            let mut chunks: [&[S::Column]; N] = [&[]; N];
            for (i, (chunk, buffer)) in chunks.iter_mut().zip(&mut buffers).take(tiles).enumerate() {
                *chunk = w.chunk(l, row + i * TILE_ROWS, cols.clone(), buffer);
            }
            let mut t = 0;
            while t < x.count {
                // As even groups as can be, none larger than GROUP_MAX.
                let left = x.count - t;
                let size = left.div_ceil(left.div_ceil(GROUP_MAX));
                for (i, chunk) in chunks.into_iter().take(tiles).enumerate() {
                    let share = size_of_val(chunk) * t / x.count..size_of_val(chunk) * (t + size) / x.count;
                    let top = part.start + i * TILE_ROWS;
                    let place = (t, top..(top + TILE_ROWS).min(part.end), cols.clone(), share);
                    match size {
                        1 => group::<L, S, 1>(l, chunk, &x, &mut out, place),
                        2 => group::<L, S, 2>(l, chunk, &x, &mut out, place),
                        3 => group::<L, S, 3>(l, chunk, &x, &mut out, place),
                        4 => group::<L, S, 4>(l, chunk, &x, &mut out, place),
                        5 => group::<L, S, 5>(l, chunk, &x, &mut out, place),
                        _ => group::<L, S, 6>(l, chunk, &x, &mut out, place),
                    }
                }
                t += size;
            }
        }
        for t in 0..x.count {
            settle(&mut out.column(t)[part.clone()]);
        }
    }
}

/// Adds one chunk to the results of the columns `t..t + T`. `place`: t, rows of the output, columns of the
/// chunk, share of the next chunk to ask for.
#[inline(always)]
fn group<L: TileLanes, S: Source, const T: usize>(
    l: L,
    chunk: &[S::Column],
    x: &Columns<'_>,
    out: &mut Out<'_>,
    (t, rows, cols, share): (usize, Range<usize>, Range<usize>, Range<usize>),
) {
    let xs: [&[f32]; T] = core::array::from_fn(|i| &x.column(t + i)[cols.clone()]);
    let sums = chunk_sums::<L, S, T>(l, chunk, xs, share);
    for (i, sum) in sums.into_iter().enumerate() {
        let sum = l.rows(sum);
        let y = &mut out.column(t + i)[rows.clone()];
        if cols.start == 0 {
            y.fill(0.0);
        }
        for (y, sum) in y.iter_mut().zip(sum) {
            *y += sum;
        }
    }
}

/// `a = +0; a = fma(w, x, a)` over the columns of one chunk. Meanwhile the bytes `share` of what follows the
/// chunk are asked for: in a tiled matrix that is the next one.
#[inline(always)]
fn chunk_sums<L: TileLanes, S: Source, const T: usize>(
    l: L,
    chunk: &[S::Column],
    x: [&[f32]; T],
    share: Range<usize>,
) -> [[L::F; 2]; T] {
    // Lengths that the compiler knows spare a check for every column.
    if let (Some(chunk), true) = (chunk.first_chunk::<CHUNK>(), x.iter().all(|x| x.len() == CHUNK)) {
        let mut whole = [&[0.0; CHUNK]; T];
        for (whole, x) in whole.iter_mut().zip(x) {
            *whole = x.first_chunk().unwrap_or(whole);
        }
        let mut sums = [[l.splat(0.0); 2]; T];
        let (blocks, _) = chunk.as_chunks::<AHEAD_COLS>();
        let step = share.len() * AHEAD_COLS / CHUNK;
        for (b, block) in blocks.iter().enumerate() {
            let ahead = size_of_val(chunk) + share.start + b * step;
            l.prefetch(S::bytes(&chunk[0]), ahead);
            l.prefetch(S::bytes(&chunk[0]), ahead + step / 2);
            for (c, column) in block.iter().enumerate() {
                let w = S::widen(l, column);
                for i in 0..T {
                    let x = l.splat(whole[i][b * AHEAD_COLS + c]);
                    sums[i] = [l.fma(w[0], x, sums[i][0]), l.fma(w[1], x, sums[i][1])];
                }
            }
        }
        return sums;
    }
    let mut sums = [[l.splat(0.0); 2]; T];
    for (c, column) in chunk.iter().enumerate() {
        let w = S::widen(l, column);
        for i in 0..T {
            let x = l.splat(x[i][c]);
            sums[i] = [l.fma(w[0], x, sums[i][0]), l.fma(w[1], x, sums[i][1])];
        }
    }
    sums
}

/// A matrix whose product with one vector is taken from several tiles at once.
trait Streamed: Copy {
    /// The products of `N` tiles with `x`.
    fn stream<L: TileLanes, const N: usize>(
        &self,
        l: L,
        tiles: [usize; N],
        x: &[f32],
    ) -> [[f32; TILE_ROWS]; N];
}

impl Streamed for Bf16Tiled<'_> {
    #[inline(always)]
    fn stream<L: TileLanes, const N: usize>(
        &self,
        l: L,
        tiles: [usize; N],
        x: &[f32],
    ) -> [[f32; TILE_ROWS]; N] {
        let mut totals = [[l.splat(0.0); 2]; N];
        for (chunk, x) in x.chunks(CHUNK).enumerate() {
            let columns: [&[[u8; COLUMN_BYTES]]; N] =
                core::array::from_fn(|i| &self.tile(tiles[i])[chunk * CHUNK..][..x.len()]);
            let mut sums = [[l.splat(0.0); 2]; N];
            for c in 0..x.len() {
                let x = l.splat(x[c]);
                for i in 0..N {
                    let w = l.bf16_column(&columns[i][c]);
                    sums[i] = [l.fma(w[0], x, sums[i][0]), l.fma(w[1], x, sums[i][1])];
                }
            }
            add_sums(l, &mut totals, sums);
        }
        ordered(l, totals)
    }
}

impl Streamed for HnTiled<'_> {
    #[inline(always)]
    fn stream<L: TileLanes, const N: usize>(
        &self,
        l: L,
        tiles: [usize; N],
        x: &[f32],
    ) -> [[f32; TILE_ROWS]; N] {
        let table = l.hn_table(self.table());
        let mut totals = [[l.splat(0.0); 2]; N];
        let mut escapes: [_; N] = core::array::from_fn(|i| self.escapes(tiles[i], 0..self.cols()).peekable());
        for (chunk, x) in x.chunks(CHUNK).enumerate() {
            let first = chunk * CHUNK;
            let quads: [_; N] = core::array::from_fn(|i| &self.tile(tiles[i])[first / QUAD_COLS..]);
            let mut sums = [[l.splat(0.0); 2]; N];
            let mut c = 0;
            while c < x.len() {
                // Whole quads without escapes, then one quad, patched.
                let next = escapes.iter_mut().filter_map(|e| e.peek()).map(|e| e.col - first).min();
                let end = next.map_or(x.len(), |col| col.min(x.len())) / QUAD_COLS * QUAD_COLS;
                while c < end {
                    for i in 0..N {
                        let columns = l.hn_columns(&quads[i][c / QUAD_COLS], table);
                        for k in 0..QUAD_COLS {
                            let x = l.splat(x[c + k]);
                            let w = columns[k];
                            sums[i] = [l.fma(w[0], x, sums[i][0]), l.fma(w[1], x, sums[i][1])];
                        }
                    }
                    c += QUAD_COLS;
                }
                if c == x.len() {
                    break;
                }
                let x = &x[c..x.len().min(c + QUAD_COLS)];
                for i in 0..N {
                    let mut columns = [[0; COLUMN_BYTES]; QUAD_COLS];
                    l.hn_decode(&quads[i][c / QUAD_COLS], table, &mut columns);
                    while let Some(e) = escapes[i].next_if(|e| e.col < first + c + QUAD_COLS) {
                        columns[e.col - first - c][e.row * 2 + 1] = e.high;
                    }
                    for (column, &x) in columns.iter().zip(x) {
                        let (w, x) = (l.bf16_column(column), l.splat(x));
                        sums[i] = [l.fma(w[0], x, sums[i][0]), l.fma(w[1], x, sums[i][1])];
                    }
                }
                c += QUAD_COLS;
            }
            add_sums(l, &mut totals, sums);
        }
        ordered(l, totals)
    }
}

/// The rows of each tile in their order. (A loop: a closure is compiled without the instruction set.)
#[inline(always)]
fn ordered<L: TileLanes, const N: usize>(l: L, totals: [[L::F; 2]; N]) -> [[f32; TILE_ROWS]; N] {
    let mut rows = [[0.0; TILE_ROWS]; N];
    for (rows, total) in rows.iter_mut().zip(totals) {
        *rows = l.rows(total);
    }
    rows
}

#[inline(always)]
fn add_sums<L: TileLanes, const N: usize>(l: L, totals: &mut [[L::F; 2]; N], sums: [[L::F; 2]; N]) {
    for i in 0..N {
        totals[i] = [l.add(totals[i][0], sums[i][0]), l.add(totals[i][1], sums[i][1])];
    }
}

/// One column: [`STREAMS`] tiles at a time, as far from each other as the rows allow.
#[inline(always)]
fn one<L: TileLanes, S: Streamed>(l: L, w: S, rows: Range<usize>, x: Columns<'_>, mut out: Out<'_>) {
    let (x, y) = (x.column(0), out.column(0));
    let first = rows.start / TILE_ROWS;
    let tiles = rows.len().div_ceil(TILE_ROWS);
    let apart = tiles / STREAMS;
    for tile in 0..apart {
        let at: [usize; STREAMS] = core::array::from_fn(|i| tile + i * apart);
        for (i, values) in w.stream(l, at.map(|tile| first + tile), x).into_iter().enumerate() {
            put_tile(y, at[i], values);
        }
    }
    for tile in apart * STREAMS..tiles {
        let [values] = w.stream(l, [first + tile], x);
        put_tile(y, tile, values);
    }
}

/// Writes the rows of one tile, as many as there are.
#[inline(always)]
fn put_tile(y: &mut [f32], tile: usize, values: [f32; TILE_ROWS]) {
    let y = &mut y[tile * TILE_ROWS..];
    let rows = y.len().min(TILE_ROWS);
    y[..rows].copy_from_slice(&values[..rows]);
    settle(&mut y[..rows]);
}

/// Gives every not-a-number the same bits.
#[inline(always)]
fn settle(y: &mut [f32]) {
    for y in y {
        *y = if y.is_nan() { f32::NAN } else { *y };
    }
}
