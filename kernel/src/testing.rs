//! Slow, readable references in `f64`, and what tests need to compare instruction sets.
//!
//! The references follow the model's formulas and nothing else: no blocks, no lanes, no fused steps. Inputs
//! are `f32`, as the kernels see them; results are `f64`.

use std::vec;
use std::vec::Vec;

use crate::moe::RouterParams;
use crate::{Isa, Kernels};

/// Runs a block once for every instruction set that this processor has: `each_isa!(|kernels| { .. })`.
#[macro_export]
macro_rules! each_isa {
    (|$kernels:ident| $body:block) => {
        for isa in $crate::Isa::ALL {
            if let Some($kernels) = $crate::Kernels::new(isa) {
                $body
            }
        }
    };
}

/// Cases of a property test: `PROPTEST_CASES`, or `usual` where that is not set.
#[must_use]
pub fn cases(usual: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(usual)
}

/// Runs `compute` on every instruction set and returns the scalar result.
///
/// # Panics
/// When one of them differs from the scalar result in a bit. Any not-a-number equals any other.
#[track_caller]
pub fn same_on_each_isa(what: &str, mut compute: impl FnMut(Kernels) -> Vec<f32>) -> Vec<f32> {
    let expected = compute(Kernels::scalar());
    for isa in Isa::ALL {
        if let Some(kernels) = Kernels::new(isa) {
            assert_same_bits(&std::format!("{what} on {isa}"), &compute(kernels), &expected);
        }
    }
    expected
}

/// Compares bit for bit.
///
/// # Panics
/// At the first difference. Any not-a-number equals any other.
#[track_caller]
pub fn assert_same_bits(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}: lengths");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        let same = f.to_bits() == e.to_bits() || (f.is_nan() && e.is_nan());
        assert!(
            same,
            "{what}: element {i} is {f:e} ({:08x}), expected {e:e} ({:08x})",
            f.to_bits(),
            e.to_bits()
        );
    }
}

/// The largest error, as a share of the largest absolute value expected (0 where both are zero).
#[must_use]
pub fn worst_error(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len(), "lengths");
    let largest = expected.iter().fold(0.0f64, |m, e| m.max(e.abs()));
    let worst = found.iter().zip(expected).fold(0.0f64, |m, (f, e)| {
        let error = (f64::from(*f) - e).abs();
        if error.is_nan() { f64::INFINITY } else { m.max(error) }
    });
    if worst == 0.0 { 0.0 } else { worst / largest }
}

/// The error of `found` in units of the last place of `exact` (of the smallest normal number where it
/// is subnormal). Infinity and not-a-number are right where `exact` rounds to them, else infinitely wrong.
#[must_use]
pub fn ulps(found: f32, exact: f64) -> f64 {
    let rounded = exact as f32;
    if !rounded.is_finite() || !found.is_finite() {
        let right = found == rounded || (found.is_nan() && rounded.is_nan());
        return if right { 0.0 } else { f64::INFINITY };
    }
    let power = exact.abs().max(f64::from(f32::MIN_POSITIVE)).to_bits() >> 52;
    (f64::from(found) - exact).abs() / f64::from_bits((power - 23) << 52)
}

/// Seeded pseudo-random numbers (splitmix64): the same on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A sequence of its own for every seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xd134_2543_de82_ef95))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A value in -1..1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 * (2.0 / 16_777_216.0) - 1.0
    }

    /// `n` values in -scale..scale.
    pub fn vec(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.unit() * scale).collect()
    }

    /// `n` values of every finite kind: zeros of both signs, subnormals, ordinary and large ones.
    pub fn rough(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.rough_value()).collect()
    }

    fn rough_value(&mut self) -> f32 {
        let bits = self.bits();
        let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
        let value = match (bits >> 1) % 8 {
            0 => 0.0,
            1 => f32::from_bits((bits >> 41) as u32), // subnormal
            2 => self.unit() * 1e4,
            3 => self.unit() * 1e-4,
            _ => self.unit() * 3.0,
        };
        value * sign
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// 1 / (1 + e^-x).
#[must_use]
pub fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 { 1.0 / (1.0 + (-x).exp()) } else { x.exp() / (1.0 + x.exp()) }
}

/// ln(1 + e^x).
#[must_use]
pub fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// w * x / sqrt(mean(x^2) + eps).
#[must_use]
pub fn rmsnorm(x: &[f32], w: &[f32], eps: f32) -> Vec<f64> {
    let (x, w) = (wide(x), wide(w));
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(&w).map(|(x, w)| w * x / (mean + f64::from(eps)).sqrt()).collect()
}

/// x * scale / sqrt(sum(x^2) + eps).
#[must_use]
pub fn l2norm(x: &[f32], eps: f32, scale: f32) -> Vec<f64> {
    let x = wide(x);
    let sum = x.iter().map(|x| x * x).sum::<f64>();
    x.iter().map(|x| x * f64::from(scale) / (sum + f64::from(eps)).sqrt()).collect()
}

/// [beta tanh(g / beta) sigmoid(g)] * [linear_beta tanh(u / linear_beta)].
#[must_use]
pub fn situ(gate: &[f32], up: &[f32], beta: f32, linear_beta: f32) -> Vec<f64> {
    let (beta, linear_beta) = (f64::from(beta), f64::from(linear_beta));
    let one =
        |g: f64, u: f64| beta * (g / beta).tanh() * sigmoid(g) * (linear_beta * (u / linear_beta).tanh());
    gate.iter().zip(up).map(|(g, u)| one(f64::from(*g), f64::from(*u))).collect()
}

/// Tokens of the causal convolution with SiLU. `w`: `[channels, width]` as released; `inputs`: `[T,
/// channels]`, preceded by zeros.
#[must_use]
pub fn conv_silu(w: &[f32], width: usize, inputs: &[f32]) -> Vec<f64> {
    let channels = w.len() / width;
    let mut y = Vec::new();
    for t in 0..inputs.len() / channels {
        for c in 0..channels {
            let taps = (0..width).filter(|k| t + k + 1 >= width);
            let input = |k: usize| f64::from(inputs[(t + k + 1 - width) * channels + c]);
            let sum: f64 = taps.map(|k| f64::from(w[c * width + k]) * input(k)).sum();
            y.push(sum * sigmoid(sum));
        }
    }
    y
}

/// e^(lower_bound sigmoid(a (z + dt_bias))), or e^(-a softplus(z + dt_bias)).
#[must_use]
pub fn kda_decay(z: &[f32], dt_bias: &[f32], a: f32, lower_bound: Option<f32>) -> Vec<f64> {
    let one = |z: f64| match lower_bound {
        Some(bound) => (f64::from(bound) * sigmoid(f64::from(a) * z)).exp(),
        None => (-f64::from(a) * softplus(z)).exp(),
    };
    z.iter().zip(dt_bias).map(|(z, bias)| one(f64::from(*z) + f64::from(*bias))).collect()
}

/// One head's inputs to [`kda`], each `[T, width]` without gaps, `beta` `[T]`.
#[derive(Clone, Copy, Debug)]
pub struct KdaInputs<'a> {
    /// Queries.
    pub q: &'a [f32],
    /// Keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
    /// Decay factors.
    pub alpha: &'a [f32],
    /// Write strengths.
    pub beta: &'a [f32],
}

/// S = diag(alpha) S; u = S^T k; S = S + beta k (v - u)^T; o = S^T q, for each token. `state`: `[key width,
/// value width]`, updated; returns o: `[T, value width]`.
pub fn kda(state: &mut [f64], inputs: KdaInputs<'_>) -> Vec<f64> {
    let tokens = inputs.beta.len();
    let (dk, dv) = (inputs.k.len() / tokens, inputs.v.len() / tokens);
    let mut out = Vec::new();
    for t in 0..tokens {
        let row = |x: &[f32], width: usize| wide(&x[t * width..(t + 1) * width]);
        let (q, k, v) = (row(inputs.q, dk), row(inputs.k, dk), row(inputs.v, dv));
        let (alpha, beta) = (row(inputs.alpha, dk), f64::from(inputs.beta[t]));
        for i in 0..dk {
            for j in 0..dv {
                state[i * dv + j] *= alpha[i];
            }
        }
        let u: Vec<f64> = (0..dv).map(|j| (0..dk).map(|i| state[i * dv + j] * k[i]).sum()).collect();
        for i in 0..dk {
            for j in 0..dv {
                state[i * dv + j] += beta * k[i] * (v[j] - u[j]);
            }
        }
        out.extend((0..dv).map(|j| (0..dk).map(|i| state[i * dv + j] * q[i]).sum::<f64>()));
    }
    out
}

/// softmax(x).
#[must_use]
pub fn softmax(x: &[f64]) -> Vec<f64> {
    let most = x.iter().fold(f64::NEG_INFINITY, |m, x| m.max(*x));
    let sum: f64 = x.iter().map(|x| (x - most).exp()).sum();
    x.iter().map(|x| (x - most).exp() / sum).collect()
}

/// For each head: softmax(scale q . latent) over the positions, times the latents' first `rank` columns.
/// `q`: `[heads, width]`, `latent`: `[positions, width]`; returns `[heads, rank]`.
#[must_use]
pub fn mla_attend(q: &[f32], latent: &[f32], width: usize, rank: usize, scale: f32) -> Vec<f64> {
    let mut ctx = Vec::new();
    for q in q.chunks(width) {
        let dot = |row: &[f32]| row.iter().zip(q).map(|(x, q)| f64::from(*x) * f64::from(*q)).sum::<f64>();
        let scores: Vec<f64> = latent.chunks(width).map(|row| f64::from(scale) * dot(row)).collect();
        let mut sum = vec![0.0; rank];
        for (p, row) in softmax(&scores).iter().zip(latent.chunks(width)) {
            for (sum, x) in sum.iter_mut().zip(row) {
                *sum += p * f64::from(*x);
            }
        }
        ctx.extend(sum);
    }
    ctx
}

/// Sum of softmax(s)_i v_i with s_i = v_i . key / sqrt(mean(v_i^2) + eps).
#[must_use]
pub fn residual_mix(sources: &[&[f32]], key: &[f64], eps: f64) -> Vec<f64> {
    let score = |v: &&[f32]| {
        let v = wide(v);
        let mean = v.iter().map(|v| v * v).sum::<f64>() / v.len() as f64;
        v.iter().zip(key).map(|(v, key)| v * key).sum::<f64>() / (mean + eps).sqrt()
    };
    let weights = softmax(&sources.iter().map(score).collect::<Vec<_>>());
    (0..key.len()).map(|c| weights.iter().zip(sources).map(|(p, v)| p * f64::from(v[c])).sum()).collect()
}

/// Expert numbers and weights of one token, best choice first, by sorting.
#[must_use]
pub fn router_choose(scores: &[f32], bias: &[f32], params: &RouterParams) -> (Vec<u16>, Vec<f64>) {
    let choice: Vec<f32> = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
    let size = scores.len() / params.groups;
    let best_first = |of: &[f32]| {
        let mut order: Vec<usize> = (0..of.len()).collect();
        order.sort_by(|a, b| of[*b].total_cmp(&of[*a]).then(a.cmp(b)));
        order
    };
    let group_score = |group: &[f32]| best_first(group).iter().take(2).map(|i| group[*i]).sum();
    let group_scores: Vec<f32> = choice.chunks(size).map(group_score).collect();
    let kept = &best_first(&group_scores)[..params.groups_kept.min(params.groups)];
    let allowed = best_first(&choice).into_iter().filter(|expert| kept.contains(&(expert / size)));
    let ids: Vec<u16> = allowed.take(params.top_k).map(|expert| expert as u16).collect();
    let mut weights: Vec<f64> = ids.iter().map(|id| f64::from(scores[usize::from(*id)])).collect();
    let sum: f64 = weights.iter().sum();
    for weight in &mut weights {
        let share = if params.top_k > 1 && params.renormalize { *weight / (sum + 1e-20) } else { *weight };
        *weight = share * f64::from(params.scaling);
    }
    (ids, weights)
}

/// Sum of weights_i ys_i. `ys`: `[k, n]`.
#[must_use]
pub fn moe_combine(ys: &[f32], weights: &[f32]) -> Vec<f64> {
    let n = ys.len() / weights.len();
    let term = |i: usize, c: usize| f64::from(weights[i]) * f64::from(ys[i * n + c]);
    (0..n).map(|c| (0..weights.len()).map(|i| term(i, c)).sum()).collect()
}
