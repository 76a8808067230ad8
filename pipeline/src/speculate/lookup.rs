//! Prompt lookup: what followed the last tokens the last time they were said.

use super::Drafter;
use crate::units::TokenId;

/// How prompt lookup guesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookupParams {
    /// Shortest run of last tokens that must have been said before.
    pub match_min: usize,
    /// Longest run that is looked for; a longer common run is preferred up to it.
    pub match_max: usize,
}

impl Default for LookupParams {
    fn default() -> Self {
        Self { match_min: 2, match_max: 8 }
    }
}

/// Guesses by looking up the last tokens in the text so far. It guesses whenever there is something to
/// look up: a [`Gated`](super::Gated) one stops where that does not help.
#[derive(Clone, Debug)]
pub struct PromptLookup {
    params: LookupParams,
}

impl PromptLookup {
    /// A drafter that has not seen anything.
    #[must_use]
    pub fn new(params: LookupParams) -> Self {
        Self { params }
    }

    /// The tokens that followed the best earlier occurrence of the last ones: the longest match, the
    /// most recent of equals.
    fn find<'a>(&self, tokens: &'a [TokenId]) -> &'a [TokenId] {
        let Some((last, earlier)) = tokens.split_last() else { return &[] };
        let (mut best, mut after) = (self.params.match_min.max(1) - 1, tokens.len());
        for end in (1..=earlier.len()).rev().filter(|end| earlier[end - 1] == *last) {
            let backwards = tokens[..end].iter().rev().zip(tokens.iter().rev());
            let matched = backwards.take(self.params.match_max).take_while(|(a, b)| a == b).count();
            if matched > best {
                (best, after) = (matched, end);
                if matched >= self.params.match_max {
                    break;
                }
            }
        }
        &tokens[after..]
    }
}

impl Drafter for PromptLookup {
    fn draft(&mut self, tokens: &[TokenId], max: usize, out: &mut Vec<TokenId>) {
        let follow = self.find(tokens);
        out.extend_from_slice(&follow[..follow.len().min(max)]);
    }

    fn accepted(&mut self, _: usize, _: usize) {}
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ids(numbers: &[u32]) -> Vec<TokenId> {
        numbers.iter().copied().map(TokenId).collect()
    }

    fn draft(lookup: &mut PromptLookup, tokens: &[TokenId], max: usize) -> Vec<TokenId> {
        let mut out = Vec::new();
        lookup.draft(tokens, max, &mut out);
        out
    }

    #[test]
    fn the_longest_and_then_the_latest_match_is_followed() {
        let mut lookup = PromptLookup::new(LookupParams::default());
        assert_eq!(draft(&mut lookup, &ids(&[1, 2, 3, 4, 9, 2, 3]), 3), ids(&[4, 9, 2]));
        assert_eq!(draft(&mut lookup, &ids(&[1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]), 1), ids(&[4]));
        assert_eq!(draft(&mut lookup, &ids(&[8, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]), 1), ids(&[5]));
        // One token is no evidence; a text that repeats itself may overlap its own end.
        assert_eq!(draft(&mut lookup, &ids(&[3, 4, 3]), 3), []);
        assert_eq!(draft(&mut lookup, &ids(&[7, 7, 7]), 3), ids(&[7]));
        assert_eq!(draft(&mut lookup, &[], 3), []);
    }

    proptest! {
        #[test]
        fn a_draft_is_what_followed_an_earlier_occurrence(
            numbers in prop::collection::vec(0_u32..3, 0..40), max in 0_usize..6,
        ) {
            let (mut lookup, tokens) = (PromptLookup::new(LookupParams::default()), ids(&numbers));
            let out = draft(&mut lookup, &tokens, max);
            prop_assert!(out.len() <= max);
            let n = tokens.len();
            let matched = |end: usize| (1..=8.min(end)).take_while(|k| tokens[end - k] == tokens[n - k]).count();
            let best = (1..n).map(|end| (matched(end), end)).filter(|(m, _)| *m >= 2).max();
            let expected = best.map_or(&[][..], |(_, end)| &tokens[end..(end + max).min(n)]);
            prop_assert_eq!(&out[..], expected);
        }
    }
}
