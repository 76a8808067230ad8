//! Guessing tokens ahead, so that one pass over the weights can verify several.
//!
//! A [`Drafter`] guesses; the pass gives the rows of logits after each guess; acceptance keeps the
//! output exactly what it would be without guesses: greedy decoding bit for bit, sampling in
//! distribution (and, for a drafter that names one token per place, token for token: see
//! [`Sampler::sample`](crate::sample::Sampler::sample)).

mod accept;
mod gate;
mod lookup;

pub use accept::{Verdict, accept_greedy, accept_or_replace};
pub use gate::Gated;
pub use lookup::{LookupParams, PromptLookup};

use crate::units::TokenId;

/// Guesses the tokens that follow.
pub trait Drafter {
    /// Appends at most `max` guesses for what follows `tokens` (prompt and output so far) to `out`;
    /// nothing where it has no good guess. Called once before every pass.
    fn draft(&mut self, tokens: &[TokenId], max: usize, out: &mut Vec<TokenId>);

    /// Hears that of the last `drafted` guesses the first `accepted` were right.
    fn accepted(&mut self, drafted: usize, accepted: usize);
}
