//! The decode loop: a decided token is fed, the next is chosen, guesses are verified on the way.

use std::ops::ControlFlow;

use crate::engine::Engine;
use crate::forward::RunError;
use crate::sample::{Logprobs, Sampler, SamplingError};
use crate::session::Session;
use crate::speculate::Drafter;
use crate::units::TokenId;

/// A token that was chosen, and what it was chosen from.
#[derive(Clone, Copy, Debug)]
pub struct Chosen<'a> {
    /// The token.
    pub id: TokenId,
    /// The row of logits that decided it: `[vocabulary]`.
    pub row: &'a [f32],
    /// Its log-probability and those of the alternatives, where asked for.
    pub logprobs: &'a Logprobs,
}

/// Adds tokens to a session.
///
/// The text is that of plain decoding with or without a drafter, token for token; a drafter changes
/// how many passes it takes.
pub struct Generator {
    sampler: Sampler,
    drafter: Option<Box<dyn Drafter>>,
    /// Every pass can be cancelled without harm to the session, for the price of a replay of its
    /// tokens through the recurrent layers.
    interruptible: bool,
    /// Scratch: the whole text, for the drafter.
    text: Vec<TokenId>,
    /// Scratch: the decided token and the guesses after it.
    fed: Vec<TokenId>,
}

impl Generator {
    /// A generator that chooses with `sampler`.
    #[must_use]
    pub fn new(sampler: Sampler, drafter: Option<Box<dyn Drafter>>, interruptible: bool) -> Self {
        Self { sampler, drafter, interruptible, text: Vec::new(), fed: Vec::new() }
    }

    /// The sampler.
    #[must_use]
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// The sampler, to count a prompt or to go on from a saved state.
    pub fn sampler_mut(&mut self) -> &mut Sampler {
        &mut self.sampler
    }

    /// Chooses the token after a prompt from its last row of logits.
    ///
    /// # Errors
    /// A row that is refused.
    pub fn first<'a>(&'a mut self, row: &'a [f32]) -> Result<Chosen<'a>, SamplingError> {
        let id = self.sampler.sample(row)?;
        Ok(Chosen { id, row, logprobs: self.sampler.logprobs() })
    }

    /// One pass: feeds `decided` (chosen, not yet part of the session), with guesses where there are
    /// any, and gives every token that follows from it to `emit` until that breaks. Returns the last
    /// of them, which is decided and not yet part of the session; `Break` where `emit` ended.
    ///
    /// # Errors
    /// Those of the pass, of the sampler, of `emit`. After a cancelled pass the session is whole if
    /// the generator is interruptible and the plan has room for drafts, else damaged.
    pub fn step<E: From<RunError> + From<SamplingError>>(
        &mut self,
        engine: &mut Engine,
        session: &mut Session,
        decided: TokenId,
        emit: &mut dyn FnMut(Chosen<'_>) -> Result<ControlFlow<()>, E>,
    ) -> Result<ControlFlow<TokenId, TokenId>, E> {
        self.guess(session, decided);
        let is_draft = self.fed.len() > 1
            || (self.interruptible && session.state().draft_max() > 0 && session.room() > 0);
        let logits =
            if is_draft { session.draft(engine, &self.fed)? } else { session.decode(engine, decided)? };
        let mut right = 0;
        let outcome = loop {
            let row = logits.row(right).unwrap_or_default();
            right += 1;
            let id = match self.sampler.sample(row) {
                Ok(id) => id,
                Err(error) => break Err(error.into()),
            };
            match emit(Chosen { id, row, logprobs: self.sampler.logprobs() }) {
                Ok(ControlFlow::Continue(())) => {}
                Ok(ControlFlow::Break(())) => break Ok(ControlFlow::Break(id)),
                Err(error) => break Err(error),
            }
            if self.fed.get(right) != Some(&id) {
                break Ok(ControlFlow::Continue(id));
            }
        };
        if is_draft {
            session.commit(engine, right)?;
        }
        if let Some(drafter) = &mut self.drafter {
            drafter.accepted(self.fed.len() - 1, right - 1);
        }
        outcome
    }

    /// Fills `fed` with the decided token and as many guesses as plan and context have room for.
    fn guess(&mut self, session: &Session, decided: TokenId) {
        self.fed.clear();
        self.fed.push(decided);
        let most = session.state().draft_max().min(session.room()).saturating_sub(1);
        if let Some(drafter) = self.drafter.as_mut().filter(|_| most > 0) {
            self.text.clear();
            self.text.extend_from_slice(session.tokens());
            self.text.push(decided);
            drafter.draft(&self.text, most, &mut self.fed);
            self.fed.truncate(1 + most);
        }
    }
}
