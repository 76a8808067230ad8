//! The decode loop: a decided token is fed, the next is chosen, guesses are verified on the way.

use std::ops::ControlFlow;

use crate::engine::Engine;
use crate::forward::{Commit, RunError};
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
        let logits = match self.prepare(session, decided, usize::MAX) {
            Commit::Deferred => session.draft(engine, &self.fed)?,
            Commit::All => session.decode(engine, decided)?,
        };
        let (right, outcome) = self.choose(|i| logits.row(i).unwrap_or_default(), emit);
        if session.state().draft() > 0 {
            session.commit(engine, right)?;
        }
        outcome
    }

    /// Gets the tokens of the next pass ready: `decided`, and guesses after it as far as plan, context
    /// and the `room` of the pass allow. Says whether they must wait to be committed.
    pub(crate) fn prepare(&mut self, session: &Session, decided: TokenId, room: usize) -> Commit {
        self.guess(session, decided, room);
        let harmless = self.interruptible && session.state().draft_max() > 0 && session.room() > 0;
        if self.fed.len() > 1 || harmless { Commit::Deferred } else { Commit::All }
    }

    /// The tokens of the next pass.
    pub(crate) fn fed(&self) -> &[TokenId] {
        &self.fed
    }

    /// Chooses what follows the tokens that were fed, from the row of logits after each, until one is
    /// not the guess or `emit` breaks. Returns how many of the tokens fed were right, and where that
    /// leads, as [`Generator::step`] does.
    pub(crate) fn choose<'a, E: From<SamplingError>>(
        &mut self,
        row: impl Fn(usize) -> &'a [f32],
        emit: &mut dyn FnMut(Chosen<'_>) -> Result<ControlFlow<()>, E>,
    ) -> (usize, Result<ControlFlow<TokenId, TokenId>, E>) {
        let mut right = 0;
        let outcome = loop {
            let row = row(right);
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
        if let Some(drafter) = &mut self.drafter {
            drafter.accepted(self.fed.len() - 1, right - 1);
        }
        (right, outcome)
    }

    /// Fills `fed` with the decided token and as many guesses as there is room for.
    fn guess(&mut self, session: &Session, decided: TokenId, room: usize) {
        self.fed.clear();
        self.fed.push(decided);
        let most = session.state().draft_max().min(session.room()).min(room).saturating_sub(1);
        if let Some(drafter) = self.drafter.as_mut().filter(|_| most > 0) {
            self.text.clear();
            self.text.extend_from_slice(session.tokens());
            self.text.push(decided);
            drafter.draft(&self.text, most, &mut self.fed);
            self.fed.truncate(1 + most);
        }
    }
}
