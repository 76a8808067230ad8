//! The short causal convolution over time of KDA's queries, keys and values.

use crate::dispatch::{Kernels, dispatch};
use crate::lanes::{LANES, Lanes};
use crate::math::sigmoid_lanes;

/// Transposes convolution weights from the released order to the order that
/// [`conv_silu`](Kernels::conv_silu) reads. `w`: `[channels, width]`, `taps`: `[width, channels]`.
///
/// # Panics
/// When `width` is 0 or does not divide the length, or the lengths differ.
pub fn conv_taps(w: &[f32], width: usize, taps: &mut [f32]) {
    assert!(
        width > 0 && w.len().is_multiple_of(width) && w.len() == taps.len(),
        "conv_taps: w and taps hold width x C"
    );
    let channels = w.len() / width;
    for (c, w) in w.chunks_exact(width).enumerate() {
        for (k, w) in w.iter().enumerate() {
            taps[k * channels + c] = *w;
        }
    }
}

impl Kernels {
    /// One token of a depthwise causal convolution, then SiLU:
    /// s_c = sum over k of `taps[k, c]` * `input[k, c]`, y_c = s_c * sigmoid(s_c), where input is the history
    /// (oldest first) and then `x`: the last tap multiplies the current token. There is no bias.
    ///
    /// `taps`: `[K, C]` ([`conv_taps`]); `hist`: `[K - 1, C]`, oldest first, advanced by the call (zero
    /// before the first token); `x`, `y`: `[C]`. Channels do not touch each other: C may be all channels or
    /// those of one head, with `taps` and `hist` kept head by head.
    ///
    /// The sum is one [`fma`](Lanes::fma) chain from +0, oldest tap first.
    ///
    /// # Panics
    /// When the lengths do not match (C > 0, K >= 1).
    pub fn conv_silu(self, taps: &[f32], hist: &mut [f32], x: &[f32], y: &mut [f32]) {
        let channels = x.len();
        assert!(
            channels > 0
                && y.len() == channels
                && taps.len() == hist.len() + channels
                && taps.len().is_multiple_of(channels),
            "conv_silu: taps [K, C], hist [K - 1, C], x [C], y [C]"
        );
        dispatch!(self, conv_silu, (taps: &[f32], hist: &mut [f32], x: &[f32], y: &mut [f32]));
    }
}

#[inline(always)]
fn conv_silu<L: Lanes>(l: L, taps: &[f32], hist: &mut [f32], x: &[f32], y: &mut [f32]) {
    let channels = x.len();
    let past = hist.len() / channels;
    for c in (0..channels).step_by(LANES) {
        let end = channels.min(c + LANES);
        let newest = l.load_some(&x[c..end]);
        let mut sum = l.splat(0.0);
        for k in 0..past {
            let row = k * channels;
            let value = l.load_some(&hist[row + c..row + end]);
            sum = l.fma(l.load_some(&taps[row + c..row + end]), value, sum);
            if k > 0 {
                l.store_some(value, &mut hist[row - channels + c..row - channels + end]);
            }
        }
        let row = past * channels;
        sum = l.fma(l.load_some(&taps[row + c..row + end]), newest, sum);
        if past > 0 {
            l.store_some(newest, &mut hist[row - channels + c..row - channels + end]);
        }
        l.store_some(l.mul(sum, sigmoid_lanes(l, sum)), &mut y[c..end]);
    }
}
