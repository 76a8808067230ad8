//! Normalisations of one vector.

use crate::dispatch::{Kernels, dispatch};
use crate::lanes::{LANES, Lanes};
use crate::math::sigmoid_lanes;

/// Vectors of partial sums that [`dot`] keeps, so that one addition need not wait for another.
const PARTIALS: usize = 4;
/// Elements after which [`dot`] starts its partial sums afresh: keeps rounding errors of long sums small.
const DOT_CHUNK: usize = 1024;

/// sum of x_i y_i. Element i of a chunk of 1,024 goes by [`fma`](Lanes::fma) to lane i mod 8 of partial
/// vector (i / 8) mod 4, ascending; at the chunk's end the total vector gains
/// (p0 + p1) + (p2 + p3); at the end the total's lanes are [summed](Lanes::sum).
#[inline(always)]
pub(crate) fn dot<L: Lanes>(l: L, x: &[f32], y: &[f32]) -> f32 {
    let mut total = l.splat(0.0);
    for (x, y) in x.chunks(DOT_CHUNK).zip(y.chunks(DOT_CHUNK)) {
        let mut p = [l.splat(0.0); PARTIALS];
        let (xs, x_rest) = x.as_chunks::<{ PARTIALS * LANES }>();
        let (ys, y_rest) = y.as_chunks::<{ PARTIALS * LANES }>();
        for (x, y) in xs.iter().zip(ys) {
            for (i, p) in p.iter_mut().enumerate() {
                *p = l.fma(l.load(&x[i * LANES..]), l.load(&y[i * LANES..]), *p);
            }
        }
        for ((x, y), p) in x_rest.chunks(LANES).zip(y_rest.chunks(LANES)).zip(&mut p) {
            *p = l.fma(l.load_some(x), l.load_some(y), *p);
        }
        total = l.add(total, l.add(l.add(p[0], p[1]), l.add(p[2], p[3])));
    }
    l.sum(total)
}

/// 1 / sqrt(x), two rounded operations.
#[inline(always)]
pub(crate) fn inverse_sqrt<L: Lanes>(l: L, x: f32) -> f32 {
    l.to_array(l.div(l.splat(1.0), l.sqrt(l.splat(x))))[0]
}

/// 1 / sqrt(mean(x^2) + eps).
#[inline(always)]
pub(crate) fn inverse_rms<L: Lanes>(l: L, x: &[f32], eps: f32) -> f32 {
    inverse_sqrt(l, dot(l, x, x) / x.len() as f32 + eps)
}

impl Kernels {
    /// y = w * x / sqrt(mean(x^2) + eps). `x`, `w`, `y`: `[n]`, n > 0.
    ///
    /// The sum of squares is an `f32` sum in the order of 8 lanes and 4 partial vectors, restarted every
    /// 1,024 elements; then y_i = (x_i * r) * w_i with r = 1 / sqrt(sum / n + eps).
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn rmsnorm(self, x: &[f32], w: &[f32], eps: f32, y: &mut [f32]) {
        assert!(x.len() == w.len() && x.len() == y.len(), "rmsnorm: x, w and y must have one length");
        dispatch!(self, rmsnorm, (x: &[f32], w: &[f32], eps: f32, y: &mut [f32]));
    }

    /// y = [`rmsnorm`](Self::rmsnorm)(x, w) * sigmoid(gate): the norm comes first. All: `[n]`, n > 0.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn rmsnorm_gated(self, x: &[f32], w: &[f32], eps: f32, gate: &[f32], y: &mut [f32]) {
        assert!(
            x.len() == w.len() && x.len() == gate.len() && x.len() == y.len(),
            "rmsnorm_gated: x, w, gate and y must have one length"
        );
        dispatch!(self, rmsnorm_gated, (x: &[f32], w: &[f32], eps: f32, gate: &[f32], y: &mut [f32]));
    }

    /// x = x * (scale / sqrt(sum(x^2) + eps)), in place: the sum, not the mean. `x`: `[n]`.
    /// The sum runs as in [`rmsnorm`](Self::rmsnorm); the two factors are multiplied first.
    pub fn l2norm(self, x: &mut [f32], eps: f32, scale: f32) {
        dispatch!(self, l2norm, (x: &mut [f32], eps: f32, scale: f32));
    }
}

#[inline(always)]
fn rmsnorm<L: Lanes>(l: L, x: &[f32], w: &[f32], eps: f32, y: &mut [f32]) {
    let r = l.splat(inverse_rms(l, x, eps));
    for ((x, w), y) in x.chunks(LANES).zip(w.chunks(LANES)).zip(y.chunks_mut(LANES)) {
        l.store_some(l.mul(l.mul(l.load_some(x), r), l.load_some(w)), y);
    }
}

#[inline(always)]
fn rmsnorm_gated<L: Lanes>(l: L, x: &[f32], w: &[f32], eps: f32, gate: &[f32], y: &mut [f32]) {
    let r = l.splat(inverse_rms(l, x, eps));
    let inputs = x.chunks(LANES).zip(w.chunks(LANES)).zip(gate.chunks(LANES));
    for (((x, w), gate), y) in inputs.zip(y.chunks_mut(LANES)) {
        let normed = l.mul(l.mul(l.load_some(x), r), l.load_some(w));
        l.store_some(l.mul(normed, sigmoid_lanes(l, l.load_some(gate))), y);
    }
}

#[inline(always)]
fn l2norm<L: Lanes>(l: L, x: &mut [f32], eps: f32, scale: f32) {
    let factor = l.splat(inverse_sqrt(l, dot(l, x, x) + eps) * scale);
    for x in x.chunks_mut(LANES) {
        l.store_some(l.mul(l.load_some(x), factor), x);
    }
}
