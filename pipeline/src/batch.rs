//! Independent sequences decoded together: every pass reads each weight block and each expert once for
//! all of them.
//!
//! Each sequence has its own state, caches, sampler and drafter, and the bits it would have alone.
//! Sequences come and go between passes: one may read its prompt while others decode.

use std::ops::ControlFlow;

use crate::engine::Engine;
use crate::forward::{Commit, Logits, LogitsWanted, RunError, SequenceRun};
use crate::generation::{Chosen, Generator};
use crate::sample::SamplingError;
use crate::session::Session;
use crate::stats::Phase;
use crate::units::TokenId;

/// A sequence to be run.
pub struct Request {
    /// What [`Batch::step`] calls it by.
    pub key: u64,
    /// At least one token.
    pub prompt: Vec<TokenId>,
    /// Most tokens to generate; the sequence ends with the last of them.
    pub max_tokens: usize,
    /// Chooses its tokens; its sampler has begun after the prompt.
    pub generator: Generator,
}

/// What a sequence of a batch brings.
pub enum Heard<'a> {
    /// Its next token.
    Token(Chosen<'a>),
    /// It cannot go on; it leaves the batch, the others stay.
    Failed(SamplingError),
}

/// Told what each sequence brings, by its key; `Break` ends the sequence.
pub type Hear<'h> = dyn FnMut(u64, Heard<'_>) -> ControlFlow<()> + 'h;

/// Sequences that share passes.
pub struct Batch {
    /// Sessions that nobody uses.
    free: Vec<Session>,
    running: Vec<Running>,
}

impl Batch {
    /// No sequence yet, with room for as many as the plan foresees.
    #[must_use]
    pub fn new(engine: &Engine) -> Self {
        let most = engine.plan().sequences_max;
        let free = (0..most).map(|_| Session::new(engine)).collect();
        Self { free, running: Vec::with_capacity(most) }
    }

    /// Whether another sequence can enter.
    #[must_use]
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Number of sequences under way.
    #[must_use]
    pub fn len(&self) -> usize {
        self.running.len()
    }

    /// Whether no sequence is under way.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// Lets a sequence enter; its prompt is read by the next passes.
    ///
    /// # Errors
    /// A prompt that cannot be read whole (empty, an unknown id, longer than the context), or with more
    /// tokens to come than fit after it. The batch is as it was then.
    ///
    /// # Panics
    /// When there is no room: ask [`Batch::has_room`].
    pub fn enter(&mut self, engine: &Engine, request: Request) -> Result<(), RunError> {
        let Request { key, prompt, max_tokens, generator } = request;
        let at = self.free.len() - 1;
        let session = &self.free[at];
        session.admit(engine, &prompt)?;
        // The last token is decided, not fed.
        if max_tokens > session.room() - prompt.len() + 1 {
            let (have, context) = (prompt.len(), session.room());
            return Err(RunError::ContextFull { have, more: max_tokens - 1, context });
        }
        let session = self.free.remove(at);
        let stage = Stage::Reading(0);
        self.running.push(Running {
            key,
            session,
            generator,
            prompt,
            left: max_tokens,
            stage,
            turn: Turn::NONE,
        });
        Ok(())
    }

    /// Drops every sequence, after a pass that failed too.
    pub fn clear(&mut self) {
        for running in self.running.drain(..) {
            self.free.push(running.into_session());
        }
    }

    /// One pass: a token or a draft of every sequence that decodes, and as much of the prompts of the
    /// others as the pass has room for. Does nothing when no sequence is under way.
    ///
    /// # Errors
    /// As [`Engine::pass`]; no sequence can go on then, and [`Batch::clear`] must follow.
    pub fn step(&mut self, engine: &mut Engine, hear: &mut Hear<'_>) -> Result<Vec<u64>, RunError> {
        let mut ended = Vec::new();
        if self.running.is_empty() {
            return Ok(ended);
        }
        self.take_turns(engine);
        let phase = match self.running.iter().any(|r| r.turn.tokens > 0 && r.is_decoding()) {
            true => Phase::Decode,
            false => Phase::Prefill,
        };
        let mut runs: Vec<SequenceRun<'_>> =
            self.running.iter_mut().filter(|r| r.turn.tokens > 0).map(Running::run).collect();
        let logits = engine.pass(phase, &mut runs, None)?;
        let mut row = 0;
        for running in self.running.iter_mut().filter(|r| r.turn.tokens > 0) {
            row = running.finish(logits, row, hear);
        }
        for running in self.running.iter_mut().filter(|r| r.session.state().draft() > 0) {
            running.session.commit(engine, running.turn.right)?;
        }
        for at in (0..self.running.len()).rev() {
            if matches!(self.running[at].stage, Stage::Ended) {
                let running = self.running.remove(at);
                ended.push(running.key);
                self.free.push(running.into_session());
            }
        }
        // Where not all had a turn, the next pass begins with another.
        if self.running.iter().any(|r| r.turn.tokens == 0) {
            self.running.rotate_left(1);
        }
        Ok(ended)
    }

    /// Divides the tokens and rows of a pass: first one token for each that decodes, with guesses where
    /// everybody has had one, then prompts in their order.
    fn take_turns(&mut self, engine: &Engine) {
        let mut room = Room { tokens: engine.pass_tokens_max(), rows: engine.logits_rows_max() };
        let mut others = self.running.len();
        for running in self.running.iter_mut().filter(|r| r.is_decoding()) {
            others -= 1;
            running.take_decoding_turn(&mut room, others);
        }
        for running in self.running.iter_mut().filter(|r| !r.is_decoding()) {
            running.take_reading_turn(&mut room);
        }
    }
}

/// What a pass still has room for.
struct Room {
    tokens: usize,
    rows: usize,
}

/// How far a sequence has come.
enum Stage {
    /// So many tokens of the prompt are read.
    Reading(usize),
    /// The last token chosen: decided, not yet fed.
    Decoding(TokenId),
    /// It leaves after this pass.
    Ended,
}

/// A sequence's part of one pass.
#[derive(Clone, Copy)]
struct Turn {
    tokens: usize,
    commit: Commit,
    logits: LogitsWanted,
    /// How many of the tokens turned out right.
    right: usize,
}

impl Turn {
    const NONE: Self = Self { tokens: 0, commit: Commit::All, logits: LogitsWanted::None, right: 0 };
}

struct Running {
    key: u64,
    session: Session,
    generator: Generator,
    prompt: Vec<TokenId>,
    /// Tokens still to be generated.
    left: usize,
    stage: Stage,
    turn: Turn,
}

impl Running {
    fn is_decoding(&self) -> bool {
        matches!(self.stage, Stage::Decoding(_))
    }

    fn into_session(mut self) -> Session {
        self.session.clear();
        self.session
    }

    /// Takes a token and its guesses; `others` still wait for a token of this pass.
    fn take_decoding_turn(&mut self, room: &mut Room, others: usize) {
        self.turn = Turn::NONE;
        let Stage::Decoding(decided) = self.stage else { return };
        let most = room.tokens.min(room.rows);
        if most == 0 {
            return;
        }
        let commit = self.generator.prepare(&self.session, decided, most.saturating_sub(others).max(1));
        let tokens = self.generator.fed().len();
        room.tokens -= tokens;
        room.rows -= tokens;
        self.turn = Turn { tokens, commit, logits: LogitsWanted::All, right: 0 };
    }

    /// Takes as much of the prompt as there is room for; its last token needs a row of logits.
    fn take_reading_turn(&mut self, room: &mut Room) {
        self.turn = Turn::NONE;
        let Stage::Reading(read) = self.stage else { return };
        let left = self.prompt.len() - read;
        let tokens = left.min(room.tokens);
        let is_last = tokens == left;
        let tokens = if is_last && room.rows == 0 { tokens - 1 } else { tokens };
        let logits = if tokens == left { LogitsWanted::Last } else { LogitsWanted::None };
        room.tokens -= tokens;
        room.rows -= logits.rows(tokens);
        self.turn = Turn { tokens, commit: Commit::All, logits, right: 0 };
    }

    /// Its part of the pass.
    fn run(&mut self) -> SequenceRun<'_> {
        let tokens = match self.stage {
            Stage::Reading(read) => &self.prompt[read..read + self.turn.tokens],
            Stage::Decoding(_) | Stage::Ended => self.generator.fed(),
        };
        self.session.share(tokens, self.turn.commit, self.turn.logits)
    }

    /// Takes what the pass brought, its rows from `row` on; gives the first row of the next sequence.
    fn finish(&mut self, logits: Logits<'_>, row: usize, hear: &mut Hear<'_>) -> usize {
        let rows = self.turn.logits.rows(self.turn.tokens);
        let of = |i: usize| logits.row(row + i).unwrap_or_default();
        let key = self.key;
        let mut emit = |chosen: Chosen<'_>| {
            self.left = self.left.saturating_sub(1);
            let flow = hear(key, Heard::Token(chosen));
            Ok(if self.left == 0 { ControlFlow::Break(()) } else { flow })
        };
        let flow = match self.stage {
            Stage::Reading(read) => {
                let read_now = read + self.turn.tokens;
                self.session.finish(&self.prompt[read..read_now]);
                if rows == 0 {
                    self.stage = Stage::Reading(read_now);
                    return row;
                }
                self.generator.first(of(0)).and_then(|chosen| {
                    let id = chosen.id;
                    Ok(emit(chosen)?.map_break(|()| id).map_continue(|()| id))
                })
            }
            Stage::Decoding(_) | Stage::Ended => {
                self.session.finish(self.generator.fed());
                let (right, flow) = self.generator.choose(of, &mut emit);
                self.turn.right = right;
                flow
            }
        };
        self.stage = match flow {
            Ok(ControlFlow::Continue(decided)) => Stage::Decoding(decided),
            Ok(ControlFlow::Break(_)) => Stage::Ended,
            Err(error) => {
                // It leaves whatever the answer is.
                let _ = hear(key, Heard::Failed(error));
                Stage::Ended
            }
        };
        row + rows
    }
}
