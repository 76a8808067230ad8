//! Kimi Delta Attention: the decay gate and the recurrence over the state.

use crate::dispatch::{Kernels, dispatch};
use crate::lanes::{LANES, Lanes};
use crate::math::{exp_lanes, sigmoid_lanes, softplus_lanes};
use crate::out::{Columns, Out};

/// Value columns of a full block of the state: 32 columns of 128 keys are 16 KiB, half a first-level cache.
pub const KDA_BLOCK: usize = 32;

/// Values of the state of one head: `key_width` rows of `value_width` columns, rounded up to whole vectors.
///
/// The layout is the same on every instruction set: blocks of [`KDA_BLOCK`] value columns (the last one
/// narrower, but whole vectors of [`LANES`]), each `[key_width, columns of the block]`. The padding columns
/// start as zero and stay zero.
#[must_use]
pub const fn kda_state_len(key_width: usize, value_width: usize) -> usize {
    key_width * value_width.next_multiple_of(LANES)
}

/// Where the state of key `i` and value column `j` lies.
#[must_use]
pub const fn kda_state_index(key_width: usize, value_width: usize, i: usize, j: usize) -> usize {
    let start = j - j % KDA_BLOCK;
    let rest = value_width.next_multiple_of(LANES) - start;
    let columns = if rest < KDA_BLOCK { rest } else { KDA_BLOCK };
    start * key_width + i * columns + j % KDA_BLOCK
}

/// The inputs of [`kda_run`](Kernels::kda_run): tokens of one head, oldest first.
#[derive(Clone, Copy, Debug)]
pub struct KdaTokens<'a> {
    /// Queries, `[T, key width]`: normalised and scaled.
    pub q: Columns<'a>,
    /// Keys, `[T, key width]`: normalised.
    pub k: Columns<'a>,
    /// Values, `[T, value width]`.
    pub v: Columns<'a>,
    /// Decay factors, `[T, key width]` ([`kda_decay`](Kernels::kda_decay)).
    pub alpha: Columns<'a>,
    /// Write strengths after the sigmoid, `[T, 1]`.
    pub beta: Columns<'a>,
}

impl Kernels {
    /// The decay factors of one head and token. With `a` = e^A_log of the head:
    /// alpha = e^(lower_bound * sigmoid(a * (z + dt_bias))), or, without a lower bound,
    /// alpha = e^(-a * softplus(z + dt_bias)). `z`, `dt_bias`, `alpha`: `[key width]`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn kda_decay(self, z: &[f32], dt_bias: &[f32], a: f32, lower_bound: Option<f32>, alpha: &mut [f32]) {
        assert!(
            z.len() == dt_bias.len() && z.len() == alpha.len(),
            "kda_decay: z, dt_bias and alpha must have one length"
        );
        dispatch!(
            self,
            kda_decay,
            (z: &[f32], dt_bias: &[f32], a: f32, lower_bound: Option<f32>, alpha: &mut [f32])
        );
    }

    /// T >= 0 tokens of one head, one after the other, on the state in place. For each token and value column
    /// j, with keys i ascending: s = alpha_i * S_ij, u = fma(k_i, s, u); then d = beta * (v_j - u), S_ij =
    /// fma(k_i, d, s), o_j = fma(q_i, S_ij, o_j). Sums start at +0; o reads the updated state.
    ///
    /// `state`: [`kda_state_len`] values in the layout described there; `key_width` and `value_width` in
    /// values; `out`: `[T, value width]`. Columns are independent, so the state is walked block by block with
    /// all tokens inside: many tokens get the bits of one at a time.
    ///
    /// # Panics
    /// When the lengths do not match or `key_width` is 0.
    pub fn kda_run(
        self,
        state: &mut [f32],
        key_width: usize,
        value_width: usize,
        tokens: &KdaTokens<'_>,
        out: Out<'_>,
    ) {
        let KdaTokens { q, k, v, alpha, beta } = tokens;
        assert!(
            key_width > 0 && state.len() == kda_state_len(key_width, value_width),
            "kda_run: the state holds kda_state_len values"
        );
        assert!(
            [q.len, k.len, alpha.len] == [key_width; 3] && v.len == value_width && beta.len == 1,
            "kda_run: q, k, alpha [T, key width], v [T, value width], beta [T, 1]"
        );
        assert!(
            [q.count, k.count, v.count, alpha.count, beta.count] == [out.count(); 5]
                && out.rows() == value_width,
            "kda_run: all inputs and out have T columns, out [T, value width]"
        );
        dispatch!(self, kda_run, (state: &mut [f32], key_width: usize, tokens: &KdaTokens<'_>, out: Out<'_>));
    }
}

#[inline(always)]
fn kda_decay<L: Lanes>(
    l: L,
    z: &[f32],
    dt_bias: &[f32],
    a: f32,
    lower_bound: Option<f32>,
    alpha: &mut [f32],
) {
    let gain = l.splat(a);
    for ((z, bias), alpha) in z.chunks(LANES).zip(dt_bias.chunks(LANES)).zip(alpha.chunks_mut(LANES)) {
        let z = l.add(l.load_some(z), l.load_some(bias));
        let exponent = match lower_bound {
            Some(bound) => l.mul(l.splat(bound), sigmoid_lanes(l, l.mul(gain, z))),
            None => l.neg(l.mul(gain, softplus_lanes(l, z))),
        };
        l.store_some(exp_lanes(l, exponent), alpha);
    }
}

#[inline(always)]
fn kda_run<L: Lanes>(l: L, state: &mut [f32], key_width: usize, tokens: &KdaTokens<'_>, out: Out<'_>) {
    let mut out = out;
    for (b, block) in state.chunks_mut(key_width * KDA_BLOCK).enumerate() {
        let start = b * KDA_BLOCK;
        match block.len() / (key_width * LANES) {
            4 => block_run::<L, 4>(l, block, start, tokens, &mut out),
            3 => block_run::<L, 3>(l, block, start, tokens, &mut out),
            2 => block_run::<L, 2>(l, block, start, tokens, &mut out),
            _ => block_run::<L, 1>(l, block, start, tokens, &mut out),
        }
    }
}

/// All tokens on one block of `N` vectors of value columns, from column `start` on.
#[inline(always)]
fn block_run<L: Lanes, const N: usize>(
    l: L,
    block: &mut [f32],
    start: usize,
    tokens: &KdaTokens<'_>,
    out: &mut Out<'_>,
) {
    let columns = start..(start + N * LANES).min(tokens.v.len);
    for t in 0..tokens.q.count {
        let (q, k) = (tokens.q.column(t), tokens.k.column(t));
        let (alpha, beta) = (tokens.alpha.column(t), l.splat(tokens.beta.column(t)[0]));
        let mut d = [l.splat(0.0); N];
        for ((row, &k), &alpha) in block.chunks_exact(N * LANES).zip(k).zip(alpha) {
            let (k, alpha) = (l.splat(k), l.splat(alpha));
            for (n, u) in d.iter_mut().enumerate() {
                *u = l.fma(k, l.mul(alpha, l.load(&row[n * LANES..])), *u);
            }
        }
        for (d, v) in d.iter_mut().zip(tokens.v.column(t)[columns.clone()].chunks(LANES)) {
            *d = l.mul(beta, l.sub(l.load_some(v), *d));
        }
        let mut o = [l.splat(0.0); N];
        for (((row, &k), &alpha), &q) in block.chunks_exact_mut(N * LANES).zip(k).zip(alpha).zip(q) {
            let (k, alpha, q) = (l.splat(k), l.splat(alpha), l.splat(q));
            for n in 0..N {
                let place = &mut row[n * LANES..];
                let s = l.fma(k, d[n], l.mul(alpha, l.load(place)));
                l.store(s, place);
                o[n] = l.fma(q, s, o[n]);
            }
        }
        for (o, y) in o.iter().zip(out.column(t)[columns.clone()].chunks_mut(LANES)) {
            l.store_some(*o, y);
        }
    }
}
