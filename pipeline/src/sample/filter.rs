//! Temperature and filters: from logits to what may be drawn.

use k3_kernel::Kernels;

use super::params::SamplingParams;
use crate::units::TokenId;

/// A token that may be drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The token.
    pub id: TokenId,
    /// e^((logit - highest)/temperature): in proportion to its probability.
    pub weight: f32,
}

/// The tokens that may be drawn, the most probable first, the lower id first among equals.
#[derive(Clone, Copy, Debug)]
pub struct Distribution<'a> {
    candidates: &'a [Candidate],
    /// The sum of the weights, in their order.
    total: f64,
}

impl<'a> Distribution<'a> {
    /// A distribution over `candidates`, at least one of them with a weight above 0.
    #[must_use]
    pub fn new(candidates: &'a [Candidate]) -> Self {
        Self { candidates, total: candidates.iter().map(|c| f64::from(c.weight)).sum() }
    }

    /// The tokens with their weights.
    #[must_use]
    pub fn candidates(&self) -> &'a [Candidate] {
        self.candidates
    }

    /// The sum of the weights.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.total
    }

    /// The probability of a token: 0 for one that was filtered out. Linear in the candidates.
    #[must_use]
    pub fn probability(&self, id: TokenId) -> f64 {
        let weight = self.candidates.iter().find(|c| c.id == id).map_or(0.0, |c| c.weight);
        f64::from(weight) / self.total
    }

    /// The token at `at` in [0, 1) of the cumulative distribution.
    #[must_use]
    pub fn pick(&self, at: f64) -> TokenId {
        let mut rest = at * self.total;
        let mut last = TokenId(0);
        for candidate in self.candidates.iter().filter(|c| c.weight > 0.0) {
            last = candidate.id;
            rest -= f64::from(candidate.weight);
            if rest < 0.0 {
                break;
            }
        }
        last
    }
}

/// Scratch of the filters.
#[derive(Debug)]
pub(super) struct Filter {
    kernels: Kernels,
    weights: Vec<f32>,
    /// Sort keys: the logit's order above, the id below.
    keys: Vec<u64>,
    candidates: Vec<Candidate>,
}

impl Filter {
    /// Scratch for rows of `vocabulary` logits; 0 where only [`certain`](Self::certain) is used.
    pub(super) fn new(vocabulary: usize, kernels: Kernels) -> Self {
        Self {
            kernels,
            weights: Vec::with_capacity(vocabulary),
            keys: Vec::with_capacity(vocabulary),
            candidates: Vec::with_capacity(vocabulary.max(1)),
        }
    }

    /// Room of the scratch.
    #[cfg(test)]
    pub(super) fn capacities(&self) -> [usize; 3] {
        [self.weights.capacity(), self.keys.capacity(), self.candidates.capacity()]
    }

    /// The distribution that is certain of `id`.
    pub(super) fn certain(&mut self, id: TokenId) -> Distribution<'_> {
        self.candidates.clear();
        self.candidates.push(Candidate { id, weight: 1.0 });
        Distribution::new(&self.candidates)
    }

    /// Temperature, min-p, top-k, top-p. All `logits` are finite, the temperature is above 0.
    pub(super) fn run(&mut self, logits: &[f32], params: &SamplingParams) -> Distribution<'_> {
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        self.weights.clear();
        self.weights.extend(logits.iter().map(|x| (x - highest) / params.temperature));
        self.kernels.exp(&mut self.weights);
        self.keys.clear();
        let kept = self.weights.iter().zip(logits).zip(0_u32..);
        self.keys.extend(
            kept.filter(|((weight, _), _)| **weight >= params.min_p)
                .map(|((_, logit), id)| u64::from(descending(*logit)) << 32 | u64::from(id)),
        );
        if params.top_k > 0 && params.top_k < self.keys.len() {
            self.keys.select_nth_unstable(params.top_k - 1);
            self.keys.truncate(params.top_k);
        }
        self.keys.sort_unstable();
        self.candidates.clear();
        self.candidates.extend(self.keys.iter().map(|key| {
            let id = *key as u32;
            Candidate { id: TokenId(id), weight: self.weights[id as usize] }
        }));
        if params.top_p < 1.0 {
            let enough = f64::from(params.top_p) * Distribution::new(&self.candidates).total;
            let mut sum = 0.0;
            let reached = self.candidates.iter().position(|c| {
                sum += f64::from(c.weight);
                sum >= enough
            });
            self.candidates.truncate(reached.map_or(usize::MAX, |at| at + 1));
        }
        Distribution::new(&self.candidates)
    }
}

/// A number that is the lower the higher the logit is; the two zeros are equal.
fn descending(logit: f32) -> u32 {
    let bits = (logit + 0.0).to_bits();
    let ascending = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    !ascending
}
