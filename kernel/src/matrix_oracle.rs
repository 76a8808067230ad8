//! Matrix products as the formulas say them, one output at a time, and in f64.

use crate::isa::scalar;

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
