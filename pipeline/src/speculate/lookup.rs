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

/// Credit at the start and after the gate reopens: so many wrong guesses close it.
const CREDIT_START: usize = 8;
/// Most credit that right guesses can earn.
const CREDIT_MAX: usize = 16;
/// Right guesses in a row that reopen a closed gate.
const REOPEN_STREAK: usize = 4;

/// Guesses by looking up the last tokens in the text so far.
///
/// A gate keeps useless guesses from costing passes: every wrong guess costs one credit, every
/// right one earns two, and without credit nothing is drafted. Always-wrong drafts end after eight
/// guesses. While the gate is closed the drafter still guesses one token in silence, and four right
/// ones in a row open it again.
#[derive(Clone, Debug)]
pub struct PromptLookup {
    params: LookupParams,
    credit: usize,
    /// Where the gate is closed: the next token as guessed, and where it would stand.
    silent: Option<(usize, TokenId)>,
    streak: usize,
}

impl PromptLookup {
    /// A drafter that has not seen anything.
    #[must_use]
    pub fn new(params: LookupParams) -> Self {
        Self { params, credit: CREDIT_START, silent: None, streak: 0 }
    }

    /// Whether it drafts at present.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.credit > 0
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

    /// Compares the last silent guess with what was said, and guesses again.
    fn watch(&mut self, tokens: &[TokenId]) {
        if let Some((place, guess)) = self.silent.take() {
            self.streak = if tokens.get(place) == Some(&guess) { self.streak + 1 } else { 0 };
        }
        if self.streak >= REOPEN_STREAK {
            self.streak = 0;
            self.credit = CREDIT_START;
            return;
        }
        self.silent = self.find(tokens).first().map(|guess| (tokens.len(), *guess));
    }
}

impl Drafter for PromptLookup {
    fn draft(&mut self, tokens: &[TokenId], max: usize, out: &mut Vec<TokenId>) {
        if !self.is_open() {
            self.watch(tokens);
        }
        if self.is_open() {
            let follow = self.find(tokens);
            out.extend_from_slice(&follow[..follow.len().min(max).min(self.credit)]);
        }
    }

    fn accepted(&mut self, drafted: usize, accepted: usize) {
        let wrong = drafted.saturating_sub(accepted);
        self.credit = (self.credit + 2 * accepted).min(CREDIT_MAX).saturating_sub(wrong);
    }
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

    #[test]
    fn always_wrong_drafts_end_within_16_tokens() {
        for max in 1..=16 {
            let mut lookup = PromptLookup::new(LookupParams::default());
            let mut tokens = ids(&[1, 2, 3, 4, 5, 6, 7, 8].repeat(4));
            let (mut drafted, mut passes_with_drafts) = (0, 0);
            for pass in 0..200 {
                let out = draft(&mut lookup, &tokens, max);
                drafted += out.len();
                if !out.is_empty() {
                    assert!(pass < 16);
                    passes_with_drafts += 1;
                }
                lookup.accepted(out.len(), 0);
                // What comes is never what came: a new token, then an old pair that baits the lookup.
                tokens.push(TokenId(1000 + pass));
                tokens.extend(ids(&[1, 2]));
            }
            assert!((1..=16).contains(&drafted) && passes_with_drafts <= 8, "{max}: {drafted}");
            assert!(!lookup.is_open());
        }
    }

    #[test]
    fn a_closed_gate_opens_again_when_the_text_repeats() {
        let mut lookup = PromptLookup::new(LookupParams::default());
        lookup.accepted(8, 0);
        assert!(!lookup.is_open());
        let text = ids(&[5, 6, 7, 8, 9, 10, 11, 12].repeat(3));
        let opened = (8..text.len()).find(|n| !draft(&mut lookup, &text[..*n], 4).is_empty());
        // Two tokens are matched at 10; four silent guesses are right by 14.
        assert_eq!(opened, Some(14));
    }

    #[test]
    fn right_drafts_keep_it_open() {
        let mut lookup = PromptLookup::new(LookupParams::default());
        for _ in 0..100 {
            assert_eq!(draft(&mut lookup, &ids(&[1, 2, 3, 4, 5, 6, 1, 2]), 4).len(), 4);
            lookup.accepted(4, 4);
        }
        lookup.accepted(4, 2);
        assert!(lookup.is_open());
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
