//! Attention residuals: a softmax-weighted mix of earlier block outputs and the running sum.

use crate::dispatch::{Kernels, dispatch};
use crate::lanes::{LANES, Lanes};
use crate::math::exp_lanes;
use crate::norm::{dot, inverse_rms};

/// The most sources that [`residual_mix`](Kernels::residual_mix) takes.
pub const RESIDUAL_SOURCES_MAX: usize = 256;

impl Kernels {
    /// y = sum over i of p_i v_i, where p = softmax(s) and s_i = (v_i . key) / sqrt(mean(v_i^2) + eps): the
    /// scores see normalised sources, the sum takes the raw ones.
    ///
    /// `sources`: 1 to [`RESIDUAL_SOURCES_MAX`] vectors `[n]`, in the order blocks, then the running sum;
    /// `key`: `[n]`, the element-wise product of the norm's and the projection's weights, in `f32`; `y`:
    /// `[n]`.
    ///
    /// Sums over n run as in [`rmsnorm`](Self::rmsnorm); the mix is one [`fma`](Lanes::fma) chain from +0 per
    /// element, sources ascending.
    ///
    /// # Panics
    /// When the lengths differ or the number of sources is out of range.
    pub fn residual_mix(self, sources: &[&[f32]], key: &[f32], eps: f32, y: &mut [f32]) {
        let counted = (1..=RESIDUAL_SOURCES_MAX).contains(&sources.len());
        assert!(counted, "residual_mix: 1 to {RESIDUAL_SOURCES_MAX} sources");
        assert!(
            sources.iter().all(|v| v.len() == key.len()) && y.len() == key.len(),
            "residual_mix: sources, key and y must have one length"
        );
        dispatch!(self, residual_mix, (sources: &[&[f32]], key: &[f32], eps: f32, y: &mut [f32]));
    }

    /// x = softmax(x), in place. `x`: `[n]`, n > 0: e^(x_i - max x), each divided by their sum.
    ///
    /// The sum has 8 lanes, element i in lane i mod 8, ascending, then [`Lanes::sum`].
    pub fn softmax(self, x: &mut [f32]) {
        dispatch!(self, softmax, (x: &mut [f32]));
    }
}

#[inline(always)]
fn residual_mix<L: Lanes>(l: L, sources: &[&[f32]], key: &[f32], eps: f32, y: &mut [f32]) {
    let mut weights = [0.0; RESIDUAL_SOURCES_MAX];
    let weights = &mut weights[..sources.len()];
    for (weight, v) in weights.iter_mut().zip(sources) {
        *weight = dot(l, v, key) * inverse_rms(l, v, eps);
    }
    softmax(l, weights);
    for (c, y) in y.chunks_mut(LANES).enumerate() {
        let start = c * LANES;
        let mut sum = l.splat(0.0);
        for (weight, v) in weights.iter().zip(sources) {
            sum = l.fma(l.splat(*weight), l.load_some(&v[start..start + y.len()]), sum);
        }
        l.store_some(sum, y);
    }
}

#[inline(always)]
fn softmax<L: Lanes>(l: L, x: &mut [f32]) {
    let mut most = f32::NEG_INFINITY;
    for &x in x.iter() {
        most = if x > most { x } else { most };
    }
    let most = l.splat(most);
    let mut sum = l.splat(0.0);
    for x in x.chunks_mut(LANES) {
        l.store_some(exp_lanes(l, l.sub(l.load_some(x), most)), x);
        sum = l.add(sum, l.load_some(x));
    }
    let sum = l.splat(l.sum(sum));
    for x in x.chunks_mut(LANES) {
        l.store_some(l.div(l.load_some(x), sum), x);
    }
}
