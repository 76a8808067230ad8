//! Whatever is guessed, right, wrong or at random: the same tokens from the same rows of logits, bit for bit.

use k3_pipeline::speculate::Drafter;
use k3_pipeline::units::TokenId;

use crate::batch::{Heard1, alone, engine, prompt, together_with};

/// Knows the text, and says something else in so many of 256 cases.
struct Liar {
    text: Vec<TokenId>,
    vocab: usize,
    lies: u64,
    state: u64,
}

impl Liar {
    fn random(&mut self) -> u64 {
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.state >> 33
    }
}

impl Drafter for Liar {
    fn draft(&mut self, tokens: &[TokenId], max: usize, out: &mut Vec<TokenId>) {
        let guesses = 1 + self.random() as usize % max;
        for place in tokens.len()..tokens.len() + guesses {
            let random = TokenId((self.random() % self.vocab as u64) as u32);
            let is_lie = self.random() % 256 < self.lies;
            out.push(self.text.get(place).copied().filter(|_| !is_lie).unwrap_or(random));
        }
    }

    fn accepted(&mut self, _: usize, _: usize) {}
}

#[test]
fn no_guess_changes_a_bit() {
    for model in ["k3-tiny-a", "k3-tiny-b"] {
        for drafts in ["pass.draft_tokens=2", "pass.draft_tokens=4", "pass.draft_tokens=8"] {
            let mut engine = engine(model, &[drafts]);
            let vocab = engine.config().vocab;
            for of in [0, 2, 4] {
                let want: Heard1 = alone(&mut engine, of, None);
                let passes = |engine: &k3_pipeline::engine::Engine| engine.stats().decode.passes;
                for lies in [0, 40, 128, 256] {
                    let text = [prompt(of, vocab), want.0.clone()].concat();
                    let before = passes(&engine);
                    let liar = Liar { text, vocab, lies, state: lies + u64::from(of) };
                    let found = alone(&mut engine, of, Some(Box::new(liar)));
                    assert!(found == want, "{model} {drafts}, request {of}, {lies} lies in 256");
                    let took = passes(&engine) - before;
                    assert!(took < want.0.len() as u64, "more passes than tokens: {took}");
                }
            }
        }
    }
}

#[test]
fn guesses_of_one_sequence_leave_those_beside_it_alone() {
    let requests = [0, 1, 2, 3, 4, 5];
    let mut plain = engine("k3-tiny-a", &[]);
    let vocab = plain.config().vocab;
    let want: Vec<Heard1> = requests.map(|of| alone(&mut plain, of, None)).into();
    for (sequences, pass) in [(2, "pass.tokens=7"), (3, "pass.tokens=16"), (6, "pass.tokens=64")] {
        let sequences = format!("context.sequences={sequences}");
        let mut engine = engine("k3-tiny-a", &[&sequences, pass, "pass.draft_tokens=5"]);
        for round in 0..4 {
            let found = together_with(&mut engine, &requests, |of| {
                let text = [prompt(of, vocab), want[of as usize].0.clone()].concat();
                let lies = [0, 256, 90, 200][(of as usize + round) % 4];
                Some(Box::new(Liar { text, vocab, lies, state: u64::from(of) + 10 * round as u64 }))
            });
            for of in requests {
                assert!(
                    found[&u64::from(of)] == want[of as usize],
                    "{sequences} {pass}, round {round}: request {of}"
                );
            }
        }
    }
}
