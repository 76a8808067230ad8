//! Log-probabilities of the model's own distribution: before bias, penalties and filters.

use k3_kernel::Kernels;

use crate::units::TokenId;

/// Natural logarithms of probabilities at one token.
#[derive(Debug)]
pub struct Logprobs {
    /// How many alternatives; nothing at all where `None`.
    count: Option<usize>,
    kernels: Kernels,
    scratch: Vec<f32>,
    chosen: Option<f64>,
    top: Vec<(TokenId, f64)>,
}

impl Logprobs {
    pub(super) fn new(count: Option<usize>, vocabulary: usize, kernels: Kernels) -> Self {
        let room = if count.is_some() { vocabulary } else { 0 };
        Self {
            count,
            kernels,
            scratch: Vec::with_capacity(room),
            chosen: None,
            top: Vec::with_capacity(count.map_or(0, |n| n + 1)),
        }
    }

    /// That of the token chosen.
    #[must_use]
    pub fn chosen(&self) -> Option<f64> {
        self.chosen
    }

    /// The most probable tokens, the most probable first, the lower id first among equals.
    #[must_use]
    pub fn top(&self) -> &[(TokenId, f64)] {
        &self.top
    }

    pub(super) fn fill(&mut self, logits: &[f32], id: TokenId) {
        let Some(count) = self.count else { return };
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        self.scratch.clear();
        self.scratch.extend(logits.iter().map(|x| x - highest));
        self.kernels.exp(&mut self.scratch);
        let sum: f64 = self.scratch.iter().map(|x| f64::from(*x)).sum();
        let base = f64::from(highest) + ln(sum);
        self.chosen = logits.get(id.0 as usize).map(|x| f64::from(*x) - base);
        self.top.clear();
        for (logit, id) in logits.iter().zip(0..) {
            let logprob = f64::from(*logit) - base;
            // Equal ones keep the order of their ids.
            let at = self.top.partition_point(|(_, other)| *other >= logprob);
            if at < count {
                self.top.insert(at, (TokenId(id), logprob));
                self.top.truncate(count);
            }
        }
    }
}

/// The natural logarithm of a normal number >= 1, within 1e-15 of its value, from additions,
/// multiplications and divisions alone, so that every machine prints the same digits.
///
/// x = m 2^e with m in [sqrt(1/2), sqrt 2); ln m = 2 artanh((m-1)/(m+1)) by its series, where the
/// argument is at most 0.172 and the terms after the 23rd power vanish.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = f64::from((bits >> 52) as u32) - 1023.0;
    let mut m = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    if m >= std::f64::consts::SQRT_2 {
        m *= 0.5;
        exponent += 1.0;
    }
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let series = (0..12).rev().fold(0.0, |sum, k| sum * square + 1.0 / f64::from(2 * k + 1));
    exponent * std::f64::consts::LN_2 + 2.0 * s * series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logarithm_is_right_to_the_last_digits() {
        for i in 0..200_000_u32 {
            let x = 1.0 + f64::from(i) * f64::from(i) * 4.2e-6;
            let (own, libm) = (ln(x), x.ln());
            assert!((own - libm).abs() <= 1e-15 * libm.abs().max(1.0), "{x}: {own} {libm}");
        }
        assert_eq!(ln(1.0), 0.0);
    }
}
