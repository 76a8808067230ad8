//! Which guesses stand.

use crate::sample::Distribution;
use crate::units::TokenId;

/// How many of the `draft` tokens greedy decoding would have chosen: `chosen[i]` is its choice at
/// the place of `draft[i]`, given the guesses before it.
#[must_use]
pub fn accept_greedy(draft: &[TokenId], chosen: &[TokenId]) -> usize {
    draft.iter().zip(chosen).take_while(|(guess, choice)| guess == choice).count()
}

/// What becomes of a guess.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It stands.
    Accepted,
    /// It falls, and everything guessed after it; this token takes its place.
    Replaced(TokenId),
}

/// The rejection rule: a guess `token` that was drawn from the distribution `guess` becomes a draw
/// from `target`.
///
/// It is accepted with probability min(1, target/guess); else the replacement is drawn in
/// proportion to max(0, target - guess). `accept_at` and `replace_at` are independent and uniform
/// in [0, 1). A token that `guess` gives no probability is accepted where `target` gives it some.
#[must_use]
pub fn accept_or_replace(
    target: Distribution<'_>,
    guess: impl Fn(TokenId) -> f64,
    token: TokenId,
    accept_at: f64,
    replace_at: f64,
) -> Verdict {
    if accept_at * guess(token) < target.probability(token) {
        return Verdict::Accepted;
    }
    let rest = |weight: f32, id: TokenId| (f64::from(weight) / target.total() - guess(id)).max(0.0);
    let total: f64 = target.candidates().iter().map(|c| rest(c.weight, c.id)).sum();
    let mut left = replace_at * total;
    let mut last = None;
    for candidate in target.candidates() {
        let weight = rest(candidate.weight, candidate.id);
        if weight > 0.0 {
            last = Some(candidate.id);
            left -= weight;
            if left < 0.0 {
                break;
            }
        }
    }
    // Nothing is left only where the distributions are equal up to rounding.
    Verdict::Replaced(last.unwrap_or_else(|| target.pick(replace_at)))
}

#[cfg(test)]
mod tests {
    use k3_kernel::Kernels;
    use proptest::prelude::*;

    use super::*;
    use crate::sample::{Candidate, Sampler, SamplingParams};

    fn candidates(weights: &[f32]) -> Vec<Candidate> {
        weights.iter().zip(0..).map(|(weight, id)| Candidate { id: TokenId(id), weight: *weight }).collect()
    }

    #[test]
    fn greedy_keeps_the_common_beginning() {
        let ids = |numbers: &[u32]| numbers.iter().copied().map(TokenId).collect::<Vec<_>>();
        assert_eq!(accept_greedy(&ids(&[1, 2, 3]), &ids(&[1, 2, 3, 4])), 3);
        assert_eq!(accept_greedy(&ids(&[1, 2, 3]), &ids(&[1, 9, 3, 4])), 1);
        assert_eq!(accept_greedy(&[], &ids(&[1])), 0);
    }

    /// Two tokens, probabilities in 64ths: the outputs are counted exactly, and are the target's.
    #[test]
    fn two_tokens_exactly() {
        let grid = 64_u32;
        for target_0 in 0..=grid {
            let weights = candidates(&[target_0 as f32, (grid - target_0) as f32]);
            let target = Distribution::new(&weights);
            for guess_0 in 1..grid {
                let guess = [f64::from(guess_0) / 64.0, f64::from(grid - guess_0) / 64.0];
                // A guess has as many points, all equally likely, as its probability has 64ths: the
                // middles of the steps of `accept_at`, each of which lies on one side of the limit.
                let mut zero = 0_u64;
                for (token, share) in [(0_u32, guess_0), (1, grid - guess_0)] {
                    for point in 0..share {
                        let at = (f64::from(point) + 0.5) / f64::from(share);
                        let verdict =
                            accept_or_replace(target, |id| guess[id.0 as usize], TokenId(token), at, 0.5);
                        let out = match verdict {
                            Verdict::Accepted => token,
                            Verdict::Replaced(id) => id.0,
                        };
                        zero += u64::from(out == 0);
                    }
                }
                assert_eq!(zero, u64::from(target_0), "target {target_0}/64, guess {guess_0}/64");
            }
        }
    }

    #[test]
    fn what_the_target_never_says_is_never_accepted() {
        let weights = candidates(&[1.0, 0.0]);
        let target = Distribution::new(&weights);
        for accept_at in [0.0, 0.5] {
            let verdict = accept_or_replace(target, |_| 0.5, TokenId(1), accept_at, 0.0);
            assert_eq!(verdict, Verdict::Replaced(TokenId(0)));
        }
        // Nor is a guess of no probability refused where the target has some.
        assert_eq!(accept_or_replace(target, |_| 0.0, TokenId(0), 0.9, 0.0), Verdict::Accepted);
    }

    #[test]
    fn five_tokens_statistically() {
        let weights = candidates(&[0.35, 0.3, 0.2, 0.15, 0.0]);
        let guess = [0.1, 0.5, 0.05, 0.05, 0.3];
        let target = Distribution::new(&weights);
        let guesses = candidates(&guess.map(|p| p as f32));
        let mut state = 1_u64;
        let mut unit = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1_u64 << 53) as f64
        };
        let n = 300_000;
        let mut counts = [0_u32; 5];
        for _ in 0..n {
            let token = Distribution::new(&guesses).pick(unit());
            let out = match accept_or_replace(target, |id| guess[id.0 as usize], token, unit(), unit()) {
                Verdict::Accepted => token,
                Verdict::Replaced(id) => id,
            };
            counts[out.0 as usize] += 1;
        }
        assert_eq!(counts[4], 0);
        for (count, candidate) in counts.iter().zip(&weights[..4]) {
            let p = f64::from(candidate.weight);
            let deviation = (f64::from(*count) - f64::from(n) * p) / (f64::from(n) * p * (1.0 - p)).sqrt();
            assert!(deviation.abs() < 4.0, "{counts:?}");
        }
    }

    proptest! {
        /// A certain guess: accepted with its target probability, else anything but it.
        #[test]
        fn a_certain_guess(weights in prop::collection::vec(0.01_f32..1.0, 2..6), u in 0.0..1.0, v in 0.0..1.0) {
            let weights = candidates(&weights);
            let target = Distribution::new(&weights);
            let guess = |id: TokenId| f64::from(u8::from(id == TokenId(0)));
            match accept_or_replace(target, guess, TokenId(0), u, v) {
                Verdict::Accepted => prop_assert!(u < target.probability(TokenId(0))),
                Verdict::Replaced(id) => {
                    prop_assert!(id != TokenId(0));
                    prop_assert!(u >= target.probability(TokenId(0)));
                }
            }
        }

        /// Drafts, right or wrong, do not change what a sampler says.
        #[test]
        fn sampled_text_does_not_depend_on_drafts(
            seed in any::<u64>(), drafts in prop::collection::vec(prop::collection::vec(0_u32..5, 0..4), 40),
        ) {
            let params = SamplingParams { temperature: 1.2, presence_penalty: 0.5, seed, ..SamplingParams::default() };
            // A model whose row depends on the last token alone.
            let row = |last: TokenId| -> Vec<f32> { (0..5).map(|i| ((last.0 * 3 + i * 7) % 5) as f32).collect() };
            let new = || Sampler::new(params.clone(), 5, Kernels::detect()).unwrap();
            let (mut plain, mut last) = (new(), TokenId(0));
            let expected: Vec<TokenId> = (0..30).map(|_| {
                last = plain.sample(&row(last)).unwrap();
                last
            }).collect();
            let (mut sampler, mut found) = (new(), Vec::new());
            for draft in &drafts {
                let mut before = found.last().copied().unwrap_or(TokenId(0));
                for place in 0..=draft.len() {
                    let id = sampler.sample(&row(before)).unwrap();
                    found.push(id);
                    if draft.get(place).map(|d| TokenId(*d)) != Some(id) {
                        break;
                    }
                    before = id;
                }
            }
            prop_assert_eq!(&found[..30], &expected[..]);
        }
    }
}
