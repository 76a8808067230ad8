//! A drafter that knows the text, and says as much of it as it is asked to.

use std::cell::Cell;
use std::rc::Rc;

use k3_pipeline::speculate::Drafter;
use k3_pipeline::units::TokenId;

/// Of 256 guesses, how many are right.
pub(super) const ALWAYS: u64 = 256;
pub(super) const SOMETIMES: u64 = 128;
pub(super) const NEVER: u64 = 0;

/// Guesses a known text, rightly, wrongly or by chance.
pub(super) struct Guesser {
    text: Vec<TokenId>,
    vocab: u64,
    right: u64,
    random: u64,
    passes: Rc<Cell<usize>>,
}

impl Guesser {
    pub(super) fn new(text: Vec<TokenId>, vocab: usize, right: u64) -> Self {
        Self { text, vocab: vocab as u64, right, random: right + 1, passes: Rc::default() }
    }

    /// Counts the passes that had guesses.
    pub(super) fn passes(&self) -> Rc<Cell<usize>> {
        Rc::clone(&self.passes)
    }

    fn next(&mut self) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.random >> 33
    }
}

impl Drafter for Guesser {
    fn draft(&mut self, tokens: &[TokenId], max: usize, out: &mut Vec<TokenId>) {
        for place in tokens.len()..(tokens.len() + max).min(self.text.len()) {
            let is_right = self.next() % ALWAYS < self.right;
            let away = if is_right { 0 } else { 1 + self.next() % (self.vocab - 1) };
            let id = (u64::from(self.text[place].0) + away) % self.vocab;
            out.push(TokenId(u32::try_from(id).unwrap_or_default()));
        }
    }

    fn accepted(&mut self, drafted: usize, _: usize) {
        if drafted > 0 {
            self.passes.set(self.passes.get() + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guesses_are_right_as_often_as_asked() {
        let text: Vec<TokenId> = (0..2000).map(|i| TokenId(i % 7)).collect();
        for (right, expected) in [(ALWAYS, 2000..=2000), (NEVER, 0..=0), (SOMETIMES, 900..=1100)] {
            let (mut guesser, mut out) = (Guesser::new(text.clone(), 7, right), Vec::new());
            guesser.draft(&[], 3000, &mut out);
            assert!(out.len() == 2000 && out.iter().all(|id| id.0 < 7));
            assert!(expected.contains(&out.iter().zip(&text).filter(|(a, b)| a == b).count()), "{right}");
            guesser.accepted(0, 0);
            guesser.accepted(3, 1);
            assert_eq!(guesser.passes().get(), 1);
        }
    }
}
