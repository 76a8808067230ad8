//! A session: one text, the state after it, and the ways to add to it.
//!
//! Everything here is exact: however a text is cut into passes, and whether its tokens come as a prompt,
//! one by one, or as a committed draft, the logits have the same bits.

use std::time::{Duration, Instant};

use crate::engine::Engine;
use crate::forward::{Commit, Logits, LogitsWanted, RunError, SequenceRun, Tap};
use crate::state::SequenceState;
use crate::stats::Phase;
use crate::units::TokenId;

/// One sequence of tokens and the state after them.
pub struct Session {
    state: SequenceState,
    /// Committed tokens, then those of a pending draft.
    tokens: Vec<TokenId>,
}

/// How a text is read.
#[derive(Default)]
pub struct Prefill<'a> {
    /// Tokens per pass; `None`, and anything larger than the plan allows: the plan's.
    pub chunk: Option<usize>,
    /// Logits of every position go to `observe`, not only those of the last.
    pub all_logits: bool,
    /// Told after every pass.
    pub observe: Option<&'a mut dyn FnMut(Progress<'_>)>,
    /// Looks at every pass.
    pub tap: Option<&'a mut dyn Tap>,
}

/// How far a prefill has come.
#[derive(Clone, Copy)]
pub struct Progress<'l> {
    /// The session as it is now.
    pub session: &'l Session,
    /// Tokens read.
    pub done: usize,
    /// Tokens to read.
    pub total: usize,
    /// Since the start of the prefill.
    pub elapsed: Duration,
    /// Logits of the pass: one row for each of its tokens, or none, or the last.
    pub logits: Logits<'l>,
}

impl Session {
    /// An empty session.
    #[must_use]
    pub fn new(engine: &Engine) -> Self {
        let state = engine.new_state();
        let tokens = Vec::with_capacity(state.context());
        Self { state, tokens }
    }

    /// The text: committed tokens only.
    #[must_use]
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens[..self.state.len()]
    }

    /// Number of committed tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.state.len()
    }

    /// True before the first token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.state.is_empty()
    }

    /// Tokens that still fit.
    #[must_use]
    pub fn room(&self) -> usize {
        self.state.context() - self.state.len()
    }

    /// The state, for saving.
    #[must_use]
    pub fn state(&self) -> &SequenceState {
        &self.state
    }

    /// Keeps what is needed to go back to the first `position` tokens later, as soon as they have been
    /// read; see [`SequenceState::mark`]. Nothing where the plan has no snapshots.
    pub fn mark(&mut self, position: usize) {
        self.state.mark(position);
    }

    /// Keeps as much of the session as can serve for `text`, and gives its length, less than that of
    /// `text`: everything, where `text` goes on after it; else up to the last mark whose tokens are the
    /// beginning of `text`. Nothing that came after a difference is ever kept, and no draft.
    pub fn reuse(&mut self, text: &[TokenId]) -> usize {
        let common = self.tokens().iter().zip(text).take_while(|(a, b)| a == b).count();
        // The last token must be read: what follows it is asked for.
        let limit = common.min(text.len().saturating_sub(1));
        self.state.reject_draft();
        if self.state.is_damaged() || self.len() > limit {
            self.state.go_back(limit);
        }
        self.tokens.truncate(self.state.len());
        self.len()
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.state.clear();
        self.tokens.clear();
    }

    /// Makes `position` a mark again; see [`SequenceState::restore_mark`].
    ///
    /// # Errors
    /// What `fill` returns.
    pub fn restore_mark<E>(
        &mut self,
        position: usize,
        fill: impl FnMut(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.state.restore_mark(position, fill)
    }

    /// Makes this the session of `tokens` whose state's slices `fill` writes; see
    /// [`SequenceState::restore`].
    ///
    /// # Errors
    /// What `fill` returns; the session is empty then.
    ///
    /// # Panics
    /// When there are more tokens than the context holds.
    pub fn restore<E>(
        &mut self,
        tokens: &[TokenId],
        fill: impl FnMut(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let restored = self.state.restore(tokens.len(), fill);
        self.tokens.clear();
        match restored {
            Ok(()) => self.tokens.extend_from_slice(tokens),
            Err(_) => self.state.clear(),
        }
        restored
    }

    /// Adds a text, in passes as large as allowed. Gives the logits after its last token.
    ///
    /// # Errors
    /// Refused before anything is read: no tokens, an id out of range, more than [`Session::room`]. Else
    /// as [`Engine::pass`]; the session is damaged then and must be cleared or restored.
    pub fn prefill<'e>(
        &mut self,
        engine: &'e mut Engine,
        text: &[TokenId],
        mut how: Prefill<'_>,
    ) -> Result<Logits<'e>, RunError> {
        self.admit(engine, text)?;
        let most = if how.all_logits { engine.logits_rows_max() } else { engine.pass_tokens_max() };
        let chunk = how.chunk.unwrap_or(most).clamp(1, most);
        let started = Instant::now();
        let last = text.len() - (text.len() - 1) % chunk - 1;
        for first in (0..last).step_by(chunk) {
            let tokens = &text[first..first + chunk];
            let wanted = if how.all_logits { LogitsWanted::All } else { LogitsWanted::None };
            let tap = how.tap.as_deref_mut().map(|tap| tap as &mut dyn Tap);
            let logits = self.run(engine, Phase::Prefill, (tokens, wanted), tap)?;
            if let Some(observe) = &mut how.observe {
                let done = first + chunk;
                let (session, total) = (&*self, text.len());
                observe(Progress { session, done, total, elapsed: started.elapsed(), logits });
            }
        }
        let wanted = if how.all_logits { LogitsWanted::All } else { LogitsWanted::Last };
        let logits = self.run(engine, Phase::Prefill, (&text[last..], wanted), how.tap)?;
        if let Some(observe) = &mut how.observe {
            let (session, total) = (&*self, text.len());
            observe(Progress { session, done: total, total, elapsed: started.elapsed(), logits });
        }
        Ok(logits)
    }

    /// Adds one token. Gives the logits after it.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn decode<'e>(&mut self, engine: &'e mut Engine, token: TokenId) -> Result<Logits<'e>, RunError> {
        self.run(engine, Phase::Decode, (&[token], LogitsWanted::Last), None)
    }

    /// Computes what would follow each token of `draft`, one row of logits each, without adding them:
    /// [`Session::commit`] then takes the first n and drops the rest.
    ///
    /// # Errors
    /// As [`Session::prefill`], and for a draft longer than the plan's. The session is as it was then.
    pub fn draft<'e>(&mut self, engine: &'e mut Engine, draft: &[TokenId]) -> Result<Logits<'e>, RunError> {
        let run = SequenceRun {
            state: &mut self.state,
            tokens: draft,
            commit: Commit::Deferred,
            logits: LogitsWanted::All,
        };
        let logits = engine.pass(Phase::Decode, &mut [run], None)?;
        self.tokens.truncate(self.state.len());
        self.tokens.extend_from_slice(draft);
        Ok(logits)
    }

    /// Adds the first `tokens` tokens of the draft. Reads nothing from disk.
    ///
    /// # Errors
    /// When the draft is shorter.
    pub fn commit(&mut self, engine: &mut Engine, tokens: usize) -> Result<(), RunError> {
        engine.commit(&mut self.state, tokens)?;
        self.tokens.truncate(self.state.len());
        Ok(())
    }

    /// Computes the whole text afresh, for comparison: same bits.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn recompute<'e>(
        &mut self,
        engine: &'e mut Engine,
        chunk: Option<usize>,
    ) -> Result<Logits<'e>, RunError> {
        let text = self.tokens().to_vec();
        self.clear();
        self.prefill(engine, &text, Prefill { chunk, ..Prefill::default() })
    }

    /// This session's part of a pass shared with others; [`Session::finish`] must follow its success.
    pub fn share<'s>(
        &'s mut self,
        tokens: &'s [TokenId],
        commit: Commit,
        logits: LogitsWanted,
    ) -> SequenceRun<'s> {
        SequenceRun { state: &mut self.state, tokens, commit, logits }
    }

    /// Notes the tokens of a shared pass that succeeded.
    pub fn finish(&mut self, tokens: &[TokenId]) {
        let before = self.state.len() + self.state.draft() - tokens.len();
        self.tokens.truncate(before);
        self.tokens.extend_from_slice(tokens);
    }

    /// Refuses a text that cannot be read whole.
    pub(crate) fn admit(&self, engine: &Engine, text: &[TokenId]) -> Result<(), RunError> {
        if text.is_empty() {
            return Err(RunError::NoTokens);
        }
        let vocab = engine.config().vocab;
        if let Some(&id) = text.iter().find(|id| id.0 as usize >= vocab) {
            return Err(RunError::UnknownToken { id, vocab });
        }
        if text.len() > self.room() {
            let (have, context) = (self.len(), self.state.context());
            return Err(RunError::ContextFull { have, more: text.len(), context });
        }
        Ok(())
    }

    fn run<'e>(
        &mut self,
        engine: &'e mut Engine,
        phase: Phase,
        (tokens, logits): (&[TokenId], LogitsWanted),
        tap: Option<&mut dyn Tap>,
    ) -> Result<Logits<'e>, RunError> {
        let run = SequenceRun { state: &mut self.state, tokens, commit: Commit::All, logits };
        let logits = engine.pass(phase, &mut [run], tap)?;
        self.tokens.extend_from_slice(tokens);
        Ok(logits)
    }
}
