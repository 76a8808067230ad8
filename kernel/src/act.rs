//! Element-wise operations.

use crate::dispatch::{Kernels, dispatch};
use crate::lanes::{LANES, Lanes};
use crate::math::{sigmoid_lanes, tanh_lanes};

/// Widens little-endian bf16 to `f32`, exactly. `bytes`: [n * 2], `out`: `[n]`.
///
/// # Panics
/// When the lengths do not match.
pub fn bf16_to_f32(bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * 2, "bf16_to_f32: two bytes a value");
    for (pair, out) in bytes.as_chunks::<2>().0.iter().zip(out) {
        *out = f32::from_bits(u32::from(u16::from_le_bytes(*pair)) << 16);
    }
}

impl Kernels {
    /// y += x, element by element. `x`, `y`: `[n]`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add(self, x: &[f32], y: &mut [f32]) {
        assert_eq!(x.len(), y.len(), "add: x and y must have one length");
        dispatch!(self, add, (x: &[f32], y: &mut [f32]));
    }

    /// x = x * sigmoid(gate), in place. `x`, `gate`: `[n]`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn sigmoid_mul(self, x: &mut [f32], gate: &[f32]) {
        assert_eq!(x.len(), gate.len(), "sigmoid_mul: x and gate must have one length");
        dispatch!(self, sigmoid_mul, (x: &mut [f32], gate: &[f32]));
    }

    /// SiTU: y = (beta tanh(gate / beta) sigmoid(gate)) * (linear_beta tanh(up / linear_beta)), evaluated
    /// in this order. `gate`, `up`, `y`: `[n]`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn situ(self, gate: &[f32], up: &[f32], beta: f32, linear_beta: f32, y: &mut [f32]) {
        assert!(gate.len() == up.len() && gate.len() == y.len(), "situ: gate, up and y must have one length");
        dispatch!(self, situ, (gate: &[f32], up: &[f32], beta: f32, linear_beta: f32, y: &mut [f32]));
    }
}

#[inline(always)]
fn add<L: Lanes>(l: L, x: &[f32], y: &mut [f32]) {
    for (x, y) in x.chunks(LANES).zip(y.chunks_mut(LANES)) {
        l.store_some(l.add(l.load_some(y), l.load_some(x)), y);
    }
}

#[inline(always)]
fn sigmoid_mul<L: Lanes>(l: L, x: &mut [f32], gate: &[f32]) {
    for (x, gate) in x.chunks_mut(LANES).zip(gate.chunks(LANES)) {
        l.store_some(l.mul(l.load_some(x), sigmoid_lanes(l, l.load_some(gate))), x);
    }
}

#[inline(always)]
fn situ<L: Lanes>(l: L, gate: &[f32], up: &[f32], beta: f32, linear_beta: f32, y: &mut [f32]) {
    let (beta, linear_beta) = (l.splat(beta), l.splat(linear_beta));
    for ((gate, up), y) in gate.chunks(LANES).zip(up.chunks(LANES)).zip(y.chunks_mut(LANES)) {
        let (gate, up) = (l.load_some(gate), l.load_some(up));
        let capped = l.mul(beta, tanh_lanes(l, l.div(gate, beta)));
        let gated = l.mul(capped, sigmoid_lanes(l, gate));
        let linear = l.mul(linear_beta, tanh_lanes(l, l.div(up, linear_beta)));
        l.store_some(l.mul(gated, linear), y);
    }
}
