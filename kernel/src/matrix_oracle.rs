//! Matrix products as the formulas say them, one output at a time, and in f64.

use core::ops::Range;

use crate::dispatch::{Kernels, dispatch};
use crate::isa::scalar;
use crate::weights::{Bf16Rows, Mxfp4};

/// The product of one row, "C256": see [`crate::bf16`].
#[must_use]
pub fn c256(w: &[f32], x: &[f32]) -> f32 {
    let mut total = 0.0;
    for (w, x) in w.chunks(256).zip(x.chunks(256)) {
        let mut sum = 0.0;
        for (w, x) in w.iter().zip(x) {
            sum = scalar::fma(*w, *x, sum);
        }
        total += sum;
    }
    total
}

/// The product of one row in f64.
#[must_use]
pub fn dot_f64(w: &[f32], x: &[f32]) -> f64 {
    w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum()
}

/// A bf16 weight, widened.
#[must_use]
pub fn widen(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// The value of each E2M1 code.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The value of a scale byte.
#[must_use]
pub fn e8m0(byte: u8) -> f64 {
    match byte {
        255 => f64::NAN,
        s => f64::from_bits((u64::from(s) + 1023 - 127) << 52),
    }
}

/// The code of column c of a row.
#[must_use]
pub fn code(packed: &[u8], c: usize) -> u8 {
    packed[c / 2] >> (c % 2 * 4) & 15
}

/// The product of one MXFP4 row in f64.
#[must_use]
pub fn mxfp4_f64(packed: &[u8], scales: &[u8], x: &[f32]) -> f64 {
    let weight = |c: usize| f64::from(E2M1[usize::from(code(packed, c))]) * e8m0(scales[c / 32]);
    x.iter().enumerate().map(|(c, x)| weight(c) * f64::from(*x)).sum()
}

/// The product of one MXFP4 row, "Q23": see [`crate::mxfp4`].
#[must_use]
pub fn q23(packed: &[u8], scales: &[u8], x: &[f32]) -> f32 {
    let mut acc = 0.0;
    for (g, x) in x.chunks_exact(32).enumerate() {
        let exponent = x.iter().map(|x| x.to_bits() << 1 >> 24).max().unwrap_or(0) as i32;
        let grid = if exponent == 255 { f64::NAN } else { power(exponent - 148) };
        let mut d = 0;
        for (c, x) in x.iter().enumerate() {
            let twice = 2.0 * E2M1[usize::from(code(packed, g * 32 + c))];
            d += twice as i64 * round_ties_even(f64::from(*x) / grid);
        }
        let t = d as f32 * (grid / 2.0) as f32;
        acc = scalar::fma(t, e8m0(scales[g]) as f32, acc);
    }
    acc
}

fn power(n: i32) -> f64 {
    f64::from_bits(((n + 1023) as u64) << 52)
}

/// The nearest integer of a value below 2^51, ties to even; 0 for NaN.
fn round_ties_even(x: f64) -> i64 {
    const SHIFT: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    ((x + SHIFT) - SHIFT) as i64
}

/// Products of a row with f64 lanes, as engines work that widen every weight: benchmarks compare with them.
pub trait F64Lanes: Copy {
    /// A row of bf16 weights, 16 at a time.
    fn bf16_dot(self, w: &[[u8; 32]], x: &[[f32; 16]]) -> f64;
    /// A row of MXFP4 weights.
    fn mxfp4_dot(self, codes: &[[u8; 16]], scales: &[u8], x: &[[f32; 32]]) -> f64;
}

impl F64Lanes for scalar::Scalar {
    #[inline(always)]
    fn bf16_dot(self, w: &[[u8; 32]], x: &[[f32; 16]]) -> f64 {
        let w = w.as_flattened().as_chunks().0;
        w.iter().zip(x.as_flattened()).map(|(w, x)| f64::from(widen(*w)) * f64::from(*x)).sum()
    }

    #[inline(always)]
    fn mxfp4_dot(self, codes: &[[u8; 16]], scales: &[u8], x: &[[f32; 32]]) -> f64 {
        mxfp4_f64(codes.as_flattened(), scales, x.as_flattened())
    }
}

#[cfg(all(feature = "neon", target_arch = "aarch64"))]
impl F64Lanes for crate::isa::neon::Neon {
    #[inline(always)]
    fn bf16_dot(self, w: &[[u8; 32]], x: &[[f32; 16]]) -> f64 {
        scalar::Scalar.bf16_dot(w, x)
    }

    #[inline(always)]
    fn mxfp4_dot(self, codes: &[[u8; 16]], scales: &[u8], x: &[[f32; 32]]) -> f64 {
        scalar::Scalar.mxfp4_dot(codes, scales, x)
    }
}

impl Kernels {
    /// `y = W[rows] x` with f64 lanes; whole groups of 16 columns only.
    pub fn bf16_f64_lanes(self, w: Bf16Rows<'_>, rows: Range<usize>, x: &[f32], y: &mut [f32]) {
        dispatch!(self, bf16_rows, (w: Bf16Rows<'_>, rows: Range<usize>, x: &[f32], y: &mut [f32]));
    }

    /// `y = W[rows] x` with f64 lanes.
    pub fn mxfp4_f64_lanes(self, w: Mxfp4<'_>, rows: Range<usize>, x: &[f32], y: &mut [f32]) {
        dispatch!(self, mxfp4_rows, (w: Mxfp4<'_>, rows: Range<usize>, x: &[f32], y: &mut [f32]));
    }
}

#[inline(always)]
fn bf16_rows<L: F64Lanes>(l: L, w: Bf16Rows<'_>, rows: Range<usize>, x: &[f32], y: &mut [f32]) {
    for (row, y) in rows.zip(y) {
        *y = l.bf16_dot(w.row(row).as_chunks().0, x.as_chunks().0) as f32;
    }
}

#[inline(always)]
fn mxfp4_rows<L: F64Lanes>(l: L, w: Mxfp4<'_>, rows: Range<usize>, x: &[f32], y: &mut [f32]) {
    for (row, y) in rows.zip(y) {
        *y = l.mxfp4_dot(w.packed_row(row).as_chunks().0, w.scale_row(row), x.as_chunks().0) as f32;
    }
}
