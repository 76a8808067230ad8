//! Keeps useless guesses from costing passes.

use super::Drafter;
use crate::units::TokenId;

/// Credit at the start and after the gate reopens: so many wrong guesses close it.
const CREDIT_START: usize = 8;
/// Most credit that right guesses can earn.
const CREDIT_MAX: usize = 16;
/// Right guesses in a row that reopen a closed gate.
const REOPEN_STREAK: usize = 4;

/// A drafter that is listened to as long as it is worth it.
///
/// Every wrong guess costs one credit, every right one earns two, and without credit nothing is drafted:
/// always-wrong drafts end after eight guesses. While the gate is closed the drafter still guesses one
/// token in silence, and four right ones in a row open it again.
#[derive(Clone, Debug)]
pub struct Gated<D> {
    drafter: D,
    credit: usize,
    /// Where the gate is closed: the next token as guessed, and where it would stand.
    silent: Option<(usize, TokenId)>,
    streak: usize,
    /// Scratch of the silent guess.
    guess: Vec<TokenId>,
}

impl<D: Drafter> Gated<D> {
    /// The gate is open.
    #[must_use]
    pub fn new(drafter: D) -> Self {
        Self { drafter, credit: CREDIT_START, silent: None, streak: 0, guess: Vec::with_capacity(1) }
    }

    /// Whether it drafts at present.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.credit > 0
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
        self.guess.clear();
        self.drafter.draft(tokens, 1, &mut self.guess);
        self.silent = self.guess.first().map(|guess| (tokens.len(), *guess));
    }
}

impl<D: Drafter> Drafter for Gated<D> {
    fn draft(&mut self, tokens: &[TokenId], max: usize, out: &mut Vec<TokenId>) {
        if !self.is_open() {
            self.watch(tokens);
        }
        if self.is_open() {
            self.drafter.draft(tokens, max.min(self.credit), out);
        }
    }

    fn accepted(&mut self, drafted: usize, accepted: usize) {
        let wrong = drafted.saturating_sub(accepted);
        self.credit = (self.credit + 2 * accepted).min(CREDIT_MAX).saturating_sub(wrong);
        self.drafter.accepted(drafted, accepted);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{LookupParams, PromptLookup};
    use super::*;

    fn ids(numbers: &[u32]) -> Vec<TokenId> {
        numbers.iter().copied().map(TokenId).collect()
    }

    fn lookup() -> Gated<PromptLookup> {
        Gated::new(PromptLookup::new(LookupParams::default()))
    }

    fn draft(drafter: &mut impl Drafter, tokens: &[TokenId], max: usize) -> Vec<TokenId> {
        let mut out = Vec::new();
        drafter.draft(tokens, max, &mut out);
        out
    }

    #[test]
    fn always_wrong_drafts_end_within_16_tokens() {
        for max in 1..=16 {
            let mut gated = lookup();
            let mut tokens = ids(&[1, 2, 3, 4, 5, 6, 7, 8].repeat(4));
            let (mut drafted, mut passes_with_drafts) = (0, 0);
            for pass in 0..200 {
                let out = draft(&mut gated, &tokens, max);
                drafted += out.len();
                if !out.is_empty() {
                    assert!(pass < 16);
                    passes_with_drafts += 1;
                }
                gated.accepted(out.len(), 0);
                // What comes is never what came: a new token, then an old pair that baits the lookup.
                tokens.push(TokenId(1000 + pass));
                tokens.extend(ids(&[1, 2]));
            }
            assert!((1..=16).contains(&drafted) && passes_with_drafts <= 8, "{max}: {drafted}");
            assert!(!gated.is_open());
        }
    }

    #[test]
    fn a_closed_gate_opens_again_when_the_text_repeats() {
        let mut gated = lookup();
        gated.accepted(8, 0);
        assert!(!gated.is_open());
        let text = ids(&[5, 6, 7, 8, 9, 10, 11, 12].repeat(3));
        let opened = (8..text.len()).find(|n| !draft(&mut gated, &text[..*n], 4).is_empty());
        // Two tokens are matched at 10; four silent guesses are right by 14.
        assert_eq!(opened, Some(14));
    }

    #[test]
    fn right_drafts_keep_it_open() {
        let mut gated = lookup();
        for _ in 0..100 {
            assert_eq!(draft(&mut gated, &ids(&[1, 2, 3, 4, 5, 6, 1, 2]), 4).len(), 4);
            gated.accepted(4, 4);
        }
        gated.accepted(4, 2);
        assert!(gated.is_open());
    }
}
