//! MXFP4 products, "Q23": integers within a group of 32 columns, so that their order cannot matter.
//!
//! The input vector is quantised once. For each group of 32 values with the largest magnitude m:
//! `e = floor(log2 m) - 21` (at least -148, which is what subnormal m gets), `q = rne(x * 2^-e)`,
//! |q| <= 2^22, in three balanced digits of base 256. For each row: `d = sum (2 * E2M1) * q` in i32, exact;
//! `t = f32(d) * 2^(e-1)`; `acc = fma(t, 2^(E8M0-127), acc)`, groups ascending from +0.
//!
//! * A group of zeros adds nothing, whatever its scale byte short of 255, on any grid: its 2^(e-1) is 1.
//! * Where m is below 2^-126, x is rounded to a multiple of 2^-148 instead of m's own grid.
//! * An infinite or NaN input makes every result NaN; so does a scale byte 255 those of its row.
//! * A result that is not a number has the bits of `f32::NAN`.
//!
//! Relative L2 error against f64: 3.1e-7 for normally distributed inputs, 7e-7 with outliers of fifty times
//! the size.

use core::ops::Range;

use crate::dispatch::{Kernels, dispatch};
use crate::lanes::{LANES, Lanes};
use crate::out::Out;
use crate::tile::TileLanes;
use crate::weights::{GROUP_COLS, Mxfp4, ShapeError};

/// Most vectors of one product.
pub const Q23_BATCH_MAX: usize = 16;

/// Digits of base 256 of a quantised value.
pub(crate) const DIGITS: usize = 3;

/// Bytes of the digits of two groups: `[digit][column parity][group][16 columns]`.
pub(crate) const PAIR_DIGITS: usize = DIGITS * 2 * GROUP_COLS;

/// Bytes of the codes of two groups of a row.
pub(crate) const PAIR_CODES: usize = GROUP_COLS;

/// Pairs of groups that are multiplied without a look at lengths in between.
const BLOCK_PAIRS: usize = 4;

/// Their groups: as many scale bytes of a row are fetched together.
const BLOCK_GROUPS: usize = 2 * BLOCK_PAIRS;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Bytes of a quantised vector, of two groups.
const PAIR_BYTES: usize = PAIR_DIGITS + 4 * size_of::<f32>();

/// Adding it to a value of at most 2^22 rounds that to an integer, ties to even, in the low bits.
const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23

/// Bytes of a quantised vector of `cols` values.
#[must_use]
pub const fn q23_bytes(cols: usize) -> usize {
    cols.div_ceil(2 * GROUP_COLS) * PAIR_BYTES
}

/// A quantised vector, as [`Kernels::q23_quantize`] wrote it: for each two groups their digits, then for
/// each group 12 * sum q (i32), then for each group 2^(e-1) (f32; 1 where all are zeros). The same bytes on every
/// instruction set.
#[derive(Clone, Copy)]
pub struct Q23<'a> {
    cols: usize,
    digits: &'a [[u8; PAIR_DIGITS]],
    surplus: &'a [[[u8; 4]; 2]],
    scales: &'a [[[u8; 4]; 2]],
}

impl<'a> Q23<'a> {
    /// A view of [`q23_bytes`] bytes.
    ///
    /// # Errors
    /// When `cols` is not a multiple of 32 or the number of bytes is another.
    pub fn new(bytes: &'a [u8], cols: usize) -> Result<Self, ShapeError> {
        if !cols.is_multiple_of(GROUP_COLS) {
            return Err(ShapeError::Group { cols });
        }
        let pairs = cols.div_ceil(2 * GROUP_COLS);
        if bytes.len() != pairs * PAIR_BYTES {
            let (what, expected) = ("a quantised vector", pairs * PAIR_BYTES);
            return Err(ShapeError::Length { what, rows: 1, cols, expected, found: bytes.len() });
        }
        let (digits, rest) = bytes.split_at(pairs * PAIR_DIGITS);
        let (surplus, scales) = rest.as_chunks().0.as_chunks().0.split_at(pairs);
        Ok(Self { cols, digits: digits.as_chunks().0, surplus, scales })
    }

    /// Values of the vector.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }
}

/// The codes of two groups of 8 rows.
pub type PairRows<'a> = [&'a [u8; PAIR_CODES]; LANES];

/// What an instruction set adds to `TileLanes` for MXFP4: sums over two groups of 8 rows at a time.
pub trait CodeLanes: TileLanes {
    /// The weights of two groups of 8 rows.
    type Codes: Copy;

    /// Unpacks the codes of two groups.
    fn codes(self, rows: PairRows<'_>) -> Self::Codes;
    /// `sum (2 * E2M1) * q` of both groups for the 8 rows. `surplus`: 12 * sum q of both groups.
    fn dots(self, codes: &Self::Codes, digits: &[u8; PAIR_DIGITS], surplus: [i32; 2]) -> [Self::I; 2];
    /// [`CodeLanes::codes`] and [`CodeLanes::dots`] in one, for a single vector.
    fn dots_of(self, rows: PairRows<'_>, digits: &[u8; PAIR_DIGITS], surplus: [i32; 2]) -> [Self::I; 2];
    /// `f32(i)` of each lane, rounded to nearest even.
    fn int_to_f32(self, v: Self::I) -> Self::F;
    /// `to[g][r] = from[r][g]`.
    fn transpose_bytes(self, from: [&[u8; 8]; LANES]) -> [[u8; LANES]; 8];
    /// `2^(s-127)` for each byte s; NaN for 255.
    fn e8m0(self, bytes: &[u8; LANES]) -> Self::F;
    /// The low byte of each of 32 values: those with an even index, those with an odd one.
    fn low_bytes(self, v: [Self::I; 4]) -> [[u8; 16]; 2];
}

impl Kernels {
    /// Quantises a vector for [`Kernels::mxfp4_matmul`].
    ///
    /// # Panics
    /// When the length of `x` is not a multiple of 32 or `dst` is not [`q23_bytes`] long.
    pub fn q23_quantize(self, x: &[f32], dst: &mut [u8]) {
        assert!(x.len().is_multiple_of(GROUP_COLS), "{} values are not groups of 32", x.len());
        assert_eq!(dst.len(), q23_bytes(x.len()), "bytes of the quantised vector");
        dispatch!(self, quantize, (x: &[f32], dst: &mut [u8]));
    }

    /// `y[t] = W[rows] x[t]` for 1 to [`Q23_BATCH_MAX`] quantised vectors (see the [module](crate::mxfp4)).
    /// A vector has the bits it would have alone, and a row those it would have in any other range.
    ///
    /// # Panics
    /// When lengths differ, `rows` is not within the matrix, or there are no or too many vectors.
    pub fn mxfp4_matmul(self, w: Mxfp4<'_>, rows: Range<usize>, xs: &[Q23<'_>], out: Out<'_>) {
        assert!(rows.start <= rows.end && rows.end <= w.rows(), "rows {rows:?} of {}", w.rows());
        assert!((1..=Q23_BATCH_MAX).contains(&xs.len()), "{} vectors, 1 to {Q23_BATCH_MAX}", xs.len());
        assert!(xs.iter().all(|x| x.cols == w.cols()), "values of the input vectors");
        assert_eq!((out.rows(), out.count()), (rows.len(), xs.len()), "rows and columns of the output");
        match xs {
            [x] => {
                let x = *x;
                dispatch!(self, one, (w: Mxfp4<'_>, rows: Range<usize>, x: Q23<'_>, out: Out<'_>));
            }
            _ => dispatch!(self, many, (w: Mxfp4<'_>, rows: Range<usize>, xs: &[Q23<'_>], out: Out<'_>)),
        }
    }
}

#[inline(always)]
fn quantize<L: CodeLanes>(l: L, x: &[f32], dst: &mut [u8]) {
    dst.fill(0);
    let groups = x.len() / GROUP_COLS;
    let pairs = groups.div_ceil(2);
    let (digits, words) = dst.split_at_mut(pairs * PAIR_DIGITS);
    let (surplus, scales) = words.as_chunks_mut::<4>().0.split_at_mut(pairs * 2);
    for (g, x) in x.as_chunks::<GROUP_COLS>().0.iter().enumerate() {
        // Loops and no closures: a closure is compiled without the instruction set.
        let mut values = [l.splat(0.0); 4];
        for (value, x) in values.iter_mut().zip(x.as_chunks::<LANES>().0) {
            *value = l.load(x);
        }
        // 2^-e = 2^(148 - exponent), where an exponent field of 0 is that of the subnormals; in two
        // factors, for it can be 2^148. Only values that round to zero can be inexact after the first.
        let largest = largest_magnitude(l, values);
        let exponent = (largest >> 23) as i32;
        if exponent == 255 {
            scales[g] = f32::NAN.to_le_bytes();
            continue;
        }
        let half = (148 - exponent) >> 1;
        let (first, second) = (l.splat(power_of_two(half)), l.splat(power_of_two(148 - exponent - half)));
        let mut q = [l.splat_i(0); 4];
        let mut sum = l.splat_i(0);
        for i in 0..4 {
            let scaled = l.mul(l.mul(values[i], first), second);
            q[i] = l.sub_i(l.bits(l.add(scaled, l.splat(ROUND))), l.splat_i(ROUND.to_bits() as i32));
            sum = l.add_i(sum, q[i]);
        }
        surplus[g] = (12 * lane_bits(l, sum).into_iter().fold(0, i32::wrapping_add)).to_le_bytes();
        // Zeros sum to zero on any grid, and processors take twice the time for a subnormal one.
        let grid = if largest == 0 { 1.0 } else { power_of_two(exponent - 149) };
        scales[g] = grid.to_le_bytes();
        let pair = &mut digits[g / 2 * PAIR_DIGITS..][..PAIR_DIGITS];
        for digit in pair.as_chunks_mut::<{ 2 * GROUP_COLS }>().0 {
            let bytes = l.low_bytes(q);
            for (parity, bytes) in digit.as_chunks_mut::<GROUP_COLS>().0.iter_mut().zip(bytes) {
                parity.as_chunks_mut::<16>().0[g % 2] = bytes;
            }
            for q in &mut q {
                *q = l.sra_i::<8>(l.add_i(*q, l.splat_i(128)));
            }
        }
    }
}

/// The bits of the largest |x|; those of infinity or more when a value is not finite.
#[inline(always)]
fn largest_magnitude<L: Lanes>(l: L, x: [L::F; 4]) -> u32 {
    let sign = l.splat_i(i32::MAX);
    let mut largest = l.splat_i(0);
    for x in x {
        // The bits of magnitudes are ordered as the magnitudes are, and their differences do not overflow.
        let less = l.sub_i(largest, l.and_i(l.bits(x), sign));
        largest = l.sub_i(largest, l.and_i(less, l.sra_i::<31>(less)));
    }
    lane_bits(l, largest).into_iter().fold(0, i32::max) as u32
}

#[inline(always)]
fn lane_bits<L: Lanes>(l: L, v: L::I) -> [i32; LANES] {
    l.to_array(l.from_bits(v)).map(|x| x.to_bits() as i32)
}

/// 2^n for -149 <= n <= 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(if n < -126 { 1 << (n + 149) } else { ((n + 127) as u32) << 23 })
}

/// Up to 8 rows of a matrix.
struct Rows<'a> {
    codes: [&'a [u8]; LANES],
    scales: [&'a [u8]; LANES],
    groups: usize,
    /// The lanes whose rows are wanted.
    lanes: Range<usize>,
    /// Codes and scale bytes of the whole matrix from the first of the rows on.
    ahead: (&'a [u8], &'a [u8]),
}

impl<'a> Rows<'a> {
    /// The rows from `first` on, before `end`. Where the matrix has no 8 rows from there, the last 8 that it
    /// has; where it has fewer altogether, one row eight times.
    #[inline(always)]
    fn new(w: &Mxfp4<'a>, first: usize, end: usize) -> Self {
        let (start, step, lanes) = match w.rows().checked_sub(LANES) {
            Some(last) => {
                let start = first.min(last);
                (start, 1, first - start..LANES.min(end - start))
            }
            None => (first, 0, 0..1),
        };
        let (packed, scales) = w.parts();
        let (row, groups) = (w.cols() / 2, w.groups());
        let ahead = (&packed[start * row..], &scales[start * groups..]);
        let mut rows = Self { codes: [&[]; LANES], scales: [&[]; LANES], groups, lanes, ahead };
        for r in 0..LANES {
            rows.codes[r] = &ahead.0[step * r * row..][..row];
            rows.scales[r] = &ahead.1[step * r * groups..][..groups];
        }
        rows
    }

    /// Groups `8 block .. 8 block + 8`, as far as there are any. `buffer` holds the last ones, with zeros
    /// after them.
    #[inline(always)]
    fn block<'b>(&'b self, block: usize, buffer: &'b mut Buffer) -> Block<'b> {
        let at = block * BLOCK_GROUPS;
        let groups = (self.groups - at).min(BLOCK_GROUPS);
        if groups < BLOCK_GROUPS {
            for r in 0..LANES {
                let codes = &self.codes[r][at * GROUP_COLS / 2..];
                buffer.codes[r].as_flattened_mut()[..codes.len()].copy_from_slice(codes);
                buffer.scales[r][..groups].copy_from_slice(&self.scales[r][at..]);
            }
            return Block { codes: buffer.codes.each_ref(), scales: buffer.scales.each_ref(), groups };
        }
        let mut whole = Block { codes: buffer.codes.each_ref(), scales: buffer.scales.each_ref(), groups };
        for r in 0..LANES {
            whole.codes[r] = &self.codes[r].as_chunks().0.as_chunks().0[block];
            whole.scales[r] = &self.scales[r].as_chunks().0[block];
        }
        whole
    }

    /// Asks for the scale bytes of a block of the next 8 rows, as those of these are used up.
    #[inline(always)]
    fn prefetch_scales<L: CodeLanes>(&self, l: L, block: usize) {
        l.prefetch(self.ahead.1, LANES * self.groups + block * LANES * BLOCK_GROUPS);
    }

    /// Asks for the codes of the next 8 rows, from their beginning on, as those of these are used up.
    #[inline(always)]
    fn prefetch_codes<L: CodeLanes>(&self, l: L, pair: usize) {
        for line in 0..LANES * PAIR_CODES / LINE {
            let at = LANES * self.codes[0].len() + pair * LANES * PAIR_CODES + line * LINE;
            l.prefetch(self.ahead.0, at);
        }
    }
}

/// Room for the last groups of 8 rows, where they are no whole block.
#[derive(Default)]
struct Buffer {
    codes: [[[u8; PAIR_CODES]; BLOCK_PAIRS]; LANES],
    scales: [[u8; BLOCK_GROUPS]; LANES],
}

/// Up to 8 groups of 8 rows.
struct Block<'a> {
    codes: [&'a [[u8; PAIR_CODES]; BLOCK_PAIRS]; LANES],
    scales: [&'a [u8; BLOCK_GROUPS]; LANES],
    groups: usize,
}

impl Block<'_> {
    #[inline(always)]
    fn pairs(&self) -> usize {
        self.groups.div_ceil(2)
    }

    #[inline(always)]
    fn pair(&self, pair: usize) -> PairRows<'_> {
        let mut rows = [&self.codes[0][pair]; LANES];
        for (row, codes) in rows.iter_mut().zip(self.codes) {
            *row = &codes[pair];
        }
        rows
    }

    /// 2^(E8M0-127) of each group and row.
    #[inline(always)]
    fn factors<L: CodeLanes>(&self, l: L) -> [[L::F; 2]; BLOCK_PAIRS] {
        let mut factors = [[l.splat(0.0); 2]; BLOCK_PAIRS];
        let bytes = l.transpose_bytes(self.scales);
        for (factor, bytes) in factors.as_flattened_mut().iter_mut().zip(&bytes) {
            *factor = l.e8m0(bytes);
        }
        factors
    }
}

/// The part of a quantised vector that belongs to a [`Block`].
#[derive(Clone, Copy)]
struct Part<'a> {
    digits: &'a [[u8; PAIR_DIGITS]],
    surplus: &'a [[[u8; 4]; 2]],
    scales: &'a [[[u8; 4]; 2]],
}

impl<'a> Part<'a> {
    #[inline(always)]
    fn new(x: &Q23<'a>, block: usize, pairs: usize) -> Self {
        let at = block * BLOCK_PAIRS;
        Self {
            digits: &x.digits[at..][..pairs],
            surplus: &x.surplus[at..][..pairs],
            scales: &x.scales[at..][..pairs],
        }
    }

    /// The digits of each pair, 12 * sum q of its groups, and their 2^(e-1).
    #[inline(always)]
    fn pairs(self) -> impl Iterator<Item = (&'a [u8; PAIR_DIGITS], [i32; 2], [f32; 2])> {
        self.digits.iter().zip(self.surplus).zip(self.scales).map(|((digits, surplus), scales)| {
            (digits, surplus.map(i32::from_le_bytes), scales.map(f32::from_le_bytes))
        })
    }
}

/// One more pair of groups of 8 rows: `acc = fma(f32(d) * 2^(e-1), 2^(E8M0-127), acc)`, the first group, then
/// the second if there is one. `grid`: 2^(e-1) of both groups.
#[inline(always)]
fn add_pair<L: CodeLanes>(
    l: L,
    acc: L::F,
    dots: [L::I; 2],
    grid: [f32; 2],
    (factors, second): (&[L::F; 2], bool),
) -> L::F {
    let t = l.mul(l.int_to_f32(dots[0]), l.splat(grid[0]));
    let acc = l.fma(t, factors[0], acc);
    if second {
        let t = l.mul(l.int_to_f32(dots[1]), l.splat(grid[1]));
        l.fma(t, factors[1], acc)
    } else {
        acc
    }
}

/// Writes the wanted rows.
#[inline(always)]
fn put_rows<L: CodeLanes>(l: L, acc: L::F, lanes: Range<usize>, y: &mut [f32]) {
    let values = l.to_array(acc);
    for (y, value) in y.iter_mut().zip(&values[lanes]) {
        *y = if value.is_nan() { f32::NAN } else { *value };
    }
}

#[inline(always)]
fn one<L: CodeLanes>(l: L, w: Mxfp4<'_>, rows: Range<usize>, x: Q23<'_>, mut out: Out<'_>) {
    let y = out.column(0);
    let mut buffer = Buffer::default();
    let mut first = rows.start;
    while first < rows.end {
        let eight = Rows::new(&w, first, rows.end);
        let mut acc = l.splat(0.0);
        for b in 0..eight.groups.div_ceil(BLOCK_GROUPS) {
            eight.prefetch_scales(l, b);
            let block = eight.block(b, &mut buffer);
            let factors = block.factors(l);
            for (pair, (digits, surplus, grid)) in Part::new(&x, b, block.pairs()).pairs().enumerate() {
                eight.prefetch_codes(l, b * BLOCK_PAIRS + pair);
                let dots = l.dots_of(block.pair(pair), digits, surplus);
                acc = add_pair(l, acc, dots, grid, (&factors[pair], 2 * pair + 1 < block.groups));
            }
        }
        let at = first - rows.start;
        first += eight.lanes.len();
        put_rows(l, acc, eight.lanes, &mut y[at..]);
    }
}

#[inline(always)]
fn many<L: CodeLanes>(l: L, w: Mxfp4<'_>, rows: Range<usize>, xs: &[Q23<'_>], mut out: Out<'_>) {
    let mut buffer = Buffer::default();
    let mut first = rows.start;
    while first < rows.end {
        let eight = Rows::new(&w, first, rows.end);
        let mut acc = [l.splat(0.0); Q23_BATCH_MAX];
        for b in 0..eight.groups.div_ceil(BLOCK_GROUPS) {
            eight.prefetch_scales(l, b);
            let block = eight.block(b, &mut buffer);
            let factors = block.factors(l);
            for (pair, factors) in factors[..block.pairs()].iter().enumerate() {
                let at = b * BLOCK_PAIRS + pair;
                eight.prefetch_codes(l, at);
                let codes = l.codes(block.pair(pair));
                for (acc, x) in acc.iter_mut().zip(xs) {
                    let dots = l.dots(&codes, &x.digits[at], x.surplus[at].map(i32::from_le_bytes));
                    let grid = x.scales[at].map(f32::from_le_bytes);
                    *acc = add_pair(l, *acc, dots, grid, (factors, 2 * pair + 1 < block.groups));
                }
            }
        }
        for (t, acc) in acc[..xs.len()].iter().enumerate() {
            put_rows(l, *acc, eight.lanes.clone(), &mut out.column(t)[first - rows.start..]);
        }
        first += eight.lanes.len();
    }
}

#[cfg(test)]
mod tests;
