//! MXFP4 products, "Q23": integers within a group of 32 columns, so that their order cannot matter.
//!
//! The input vector is quantised once. For each group of 32 values with the largest magnitude m:
//! `e = floor(log2 m) - 21` (at least -148, which is what zero and subnormal m get), `q = rne(x * 2^-e)`,
//! |q| <= 2^22, in three balanced digits of base 256. For each row: `d = sum (2 * E2M1) * q` in i32, exact;
//! `t = f32(d) * 2^(e-1)`; `acc = fma(t, 2^(E8M0-127), acc)`, groups ascending from +0.
//!
//! * A group of zeros adds nothing, whatever its scale byte short of 255.
//! * Where m is below 2^-126, x is rounded to a multiple of 2^-148 instead of m's own grid.
//! * An infinite or NaN input makes every result NaN; so does a scale byte 255 those of its row.
//! * A result that is not a number has the bits of `f32::NAN`.
//!
//! Relative L2 error against f64: 3.1e-7 for normally distributed inputs, 7e-7 with outliers of fifty times
//! the size.

use core::array;
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

/// Groups whose scale bytes are fetched together.
const BLOCK_GROUPS: usize = 8;

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
/// each group 12 * sum q (i32), then for each group 2^(e-1) (f32). The same bytes on every instruction set.
#[derive(Clone, Copy)]
pub struct Q23<'a> {
    cols: usize,
    digits: &'a [[u8; PAIR_DIGITS]],
    surplus: &'a [[u8; 4]],
    scales: &'a [[u8; 4]],
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
        let (words, _) = rest.as_chunks();
        let (surplus, scales) = words.split_at(pairs * 2);
        Ok(Self { cols, digits: digits.as_chunks().0, surplus, scales })
    }

    /// Values of the vector.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }
}

/// What an instruction set adds to [`Lanes`] for MXFP4: sums over two groups of two rows at a time, and
/// then 8 rows to 8 lanes.
pub trait CodeLanes: TileLanes {
    /// The weights of two groups of two rows.
    type Codes: Copy;
    /// What [`CodeLanes::dots`] leaves of them.
    type Dots: Copy;

    /// Unpacks the codes of two rows.
    fn codes(self, a: &[u8; PAIR_CODES], b: &[u8; PAIR_CODES]) -> Self::Codes;
    /// Multiplies with the digits of a vector and adds up, as far as it goes within the two rows.
    fn dots(self, codes: Self::Codes, digits: &[u8; PAIR_DIGITS]) -> Self::Dots;
    /// `sum (2 * E2M1) * q` of both groups for the 8 rows, from those of the rows 0-1, 2-3, 4-5, 6-7.
    /// `surplus`: 12 * sum q of both groups.
    fn gather(self, dots: [Self::Dots; 4], surplus: [i32; 2]) -> [Self::I; 2];
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
        let x: [L::F; 4] = array::from_fn(|i| l.load(&x[i * LANES..]));
        // 2^-e = 2^(148 - exponent), where an exponent field of 0 is that of the subnormals; in two
        // factors, for it can be 2^148. Only values that round to zero can be inexact after the first.
        let largest = largest_magnitude(l, x);
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
            let scaled = l.mul(l.mul(x[i], first), second);
            q[i] = l.sub_i(l.bits(l.add(scaled, l.splat(ROUND))), l.splat_i(ROUND.to_bits() as i32));
            sum = l.add_i(sum, q[i]);
        }
        surplus[g] = (12 * lane_bits(l, sum).into_iter().fold(0, i32::wrapping_add)).to_le_bytes();
        scales[g] = power_of_two(exponent - 149).to_le_bytes();
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

/// The 8 rows from some row on; the last one stands in for those that are not there.
struct Rows<'a> {
    packed: [&'a [u8]; LANES],
    scales: [&'a [u8]; LANES],
}

impl<'a> Rows<'a> {
    #[inline(always)]
    fn new(w: &Mxfp4<'a>, first: usize, end: usize) -> Self {
        let row = |r: usize| (first + r).min(end - 1);
        Self {
            packed: array::from_fn(|r| w.packed_row(row(r))),
            scales: array::from_fn(|r| w.scale_row(row(r))),
        }
    }

    /// The codes of the groups `2 pair` and `2 pair + 1` (zeros past the end) of one row.
    #[inline(always)]
    fn pair(&self, row: usize, pair: usize) -> [u8; PAIR_CODES] {
        let (pairs, rest) = self.packed[row].as_chunks();
        pairs.get(pair).copied().unwrap_or_else(|| padded(rest))
    }

    /// The scale bytes of the groups `8 block .. 8 block + 8` (zeros past the end), [group][row].
    #[inline(always)]
    fn scale_block<L: CodeLanes>(&self, l: L, block: usize) -> [[u8; LANES]; BLOCK_GROUPS] {
        let at = block * BLOCK_GROUPS;
        let whole = at + BLOCK_GROUPS <= self.scales[0].len();
        let bytes: [[u8; BLOCK_GROUPS]; LANES] = array::from_fn(|r| {
            let rest = &self.scales[r][at..];
            if whole { rest.as_chunks().0[0] } else { padded(rest) }
        });
        l.transpose_bytes(array::from_fn(|r| &bytes[r]))
    }
}

#[inline(always)]
fn padded<const N: usize>(rest: &[u8]) -> [u8; N] {
    let mut block = [0; N];
    block[..rest.len()].copy_from_slice(rest);
    block
}

/// One more pair of groups of 8 rows: `acc = fma(f32(d) * 2^(e-1), 2^(E8M0-127), acc)`, the first group, then
/// the second if there is one.
#[inline(always)]
fn add_pair<L: CodeLanes>(
    l: L,
    acc: L::F,
    dots: [L::Dots; 4],
    (x, pair): (&Q23<'_>, usize),
    scales: &[[u8; LANES]; BLOCK_GROUPS],
) -> L::F {
    let group = 2 * pair;
    let surplus = [0, 1].map(|i| i32::from_le_bytes(x.surplus[group + i]));
    let [d0, d1] = l.gather(dots, surplus);
    let t = l.mul(l.int_to_f32(d0), l.splat(f32::from_le_bytes(x.scales[group])));
    let acc = l.fma(t, l.e8m0(&scales[group % BLOCK_GROUPS]), acc);
    if group + 1 == x.cols / GROUP_COLS {
        return acc;
    }
    let t = l.mul(l.int_to_f32(d1), l.splat(f32::from_le_bytes(x.scales[group + 1])));
    l.fma(t, l.e8m0(&scales[(group + 1) % BLOCK_GROUPS]), acc)
}

/// Writes as many of the 8 rows as there are.
#[inline(always)]
fn put_rows<L: CodeLanes>(l: L, acc: L::F, y: &mut [f32]) {
    for (y, acc) in y.iter_mut().zip(l.to_array(acc)) {
        *y = if acc.is_nan() { f32::NAN } else { acc };
    }
}

#[inline(always)]
fn one<L: CodeLanes>(l: L, w: Mxfp4<'_>, rows: Range<usize>, x: Q23<'_>, mut out: Out<'_>) {
    for first in rows.clone().step_by(LANES) {
        let block = Rows::new(&w, first, rows.end);
        let mut acc = l.splat(0.0);
        let mut scales = [[0; LANES]; BLOCK_GROUPS];
        for (pair, digits) in x.digits.iter().enumerate() {
            if pair % (BLOCK_GROUPS / 2) == 0 {
                scales = block.scale_block(l, pair / (BLOCK_GROUPS / 2));
            }
            let dots = array::from_fn(|i| {
                l.dots(l.codes(&block.pair(2 * i, pair), &block.pair(2 * i + 1, pair)), digits)
            });
            acc = add_pair(l, acc, dots, (&x, pair), &scales);
        }
        put_rows(l, acc, &mut out.column(0)[first - rows.start..]);
    }
}

#[inline(always)]
fn many<L: CodeLanes>(l: L, w: Mxfp4<'_>, rows: Range<usize>, xs: &[Q23<'_>], mut out: Out<'_>) {
    for first in rows.clone().step_by(LANES) {
        let block = Rows::new(&w, first, rows.end);
        let mut acc = [l.splat(0.0); Q23_BATCH_MAX];
        let mut scales = [[0; LANES]; BLOCK_GROUPS];
        for pair in 0..w.groups().div_ceil(2) {
            if pair % (BLOCK_GROUPS / 2) == 0 {
                scales = block.scale_block(l, pair / (BLOCK_GROUPS / 2));
            }
            let codes: [L::Codes; 4] =
                array::from_fn(|i| l.codes(&block.pair(2 * i, pair), &block.pair(2 * i + 1, pair)));
            for (acc, x) in acc.iter_mut().zip(xs) {
                let dots = array::from_fn(|i| l.dots(codes[i], &x.digits[pair]));
                *acc = add_pair(l, *acc, dots, (x, pair), &scales);
            }
        }
        for (t, acc) in acc[..xs.len()].iter().enumerate() {
            put_rows(l, *acc, &mut out.column(t)[first - rows.start..]);
        }
    }
}

#[cfg(test)]
mod tests;
