//! `--session FILE`: a generation that goes on where an earlier one stopped.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use k3_pipeline::causes::with_causes;
use k3_pipeline::generation::Generator;
use k3_pipeline::model::tensors::Fingerprint;
use k3_pipeline::session::{Progress, Session};
use k3_pipeline::session_file::{self, SessionFileError, SessionMeta};
use k3_pipeline::units::TokenId;
use serde::{Deserialize, Serialize};

use crate::engine_args::Planned;
use crate::failure::{Failure, Outcome};
use crate::output;
use crate::printer::Printer;
use crate::terminal;

/// Where a session is kept, and of which model it is.
pub(super) struct Place<'a> {
    path: &'a Path,
    fingerprint: Fingerprint,
    model: String,
}

/// What a generation notes beside its session.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Notes {
    /// What is not yet read: the rest of the prompt, or the last token, which was chosen.
    pub(super) unread: Vec<TokenId>,
    /// Bytes of the output's text that have been given out: what follows them waits for the next run.
    pub(super) given: usize,
}

/// A text that was generated so far.
pub(super) struct Saved {
    /// Prompt and output.
    pub(super) text: Vec<TokenId>,
    given: usize,
    meta: SessionMeta,
}

impl Saved {
    /// How much of the text is prompt.
    pub(super) fn prompt_tokens(&self) -> usize {
        self.meta.prompt_tokens
    }

    /// Lets a sampler go on as if it had chosen the output itself, and a printer after what it gave out.
    pub(super) fn resume(&self, generator: &mut Generator, printer: &mut Printer<'_>) -> Outcome {
        let (prompt, output) = self.text.split_at(self.meta.prompt_tokens);
        let sampler = generator.sampler_mut();
        sampler.begin(prompt)?;
        sampler.see_output(output)?;
        sampler.set_random_state(self.meta.random);
        printer.resume(output, self.given)
    }
}

impl<'a> Place<'a> {
    /// Refuses a place where nothing can be kept, before anything is computed.
    pub(super) fn new(path: &'a Path, planned: &Planned) -> Result<Self, Failure> {
        drop(output::place("--session", path)?);
        Ok(Self { path, fingerprint: planned.tensors.fingerprint, model: planned.name() })
    }

    /// Whether there is something to go on from.
    pub(super) fn exists(&self) -> bool {
        self.path.exists()
    }

    /// Makes `session` the saved one, where there is one.
    pub(super) fn load(&self, session: &mut Session) -> Result<Option<Saved>, Failure> {
        if !self.exists() {
            return Ok(None);
        }
        let meta = session_file::resume(self.path, session, self.fingerprint)?;
        let notes: Notes = serde_json::from_slice(&meta.notes).map_err(|_| {
            Failure::refused(anyhow!("{}: the session was not saved by `k3 generate`", self.path.display()))
                .hint("a session of `k3 chat` goes on with `k3 chat --session FILE`")
        })?;
        let text = [session.tokens(), &notes.unread].concat();
        if meta.prompt_tokens > text.len() || session.len() >= text.len() {
            let (prompt, len) = (meta.prompt_tokens, text.len());
            return Err(Failure::refused(anyhow!(
                "{}: a prompt of {prompt} tokens in a text of {len}, of which {} are read: the file is damaged",
                self.path.display(),
                session.len()
            )));
        }
        Ok(Some(Saved { text, given: notes.given, meta }))
    }

    /// Saves a session whose text goes on as `notes` say.
    pub(super) fn save(
        &self,
        session: &Session,
        (prompt_tokens, notes): (usize, &Notes),
        generator: &Generator,
    ) -> Outcome {
        let meta = SessionMeta {
            fingerprint: self.fingerprint,
            model: self.model.clone(),
            prompt_tokens,
            random: generator.sampler().random_state(),
            notes: serde_json::to_vec(notes).map_err(Failure::run)?,
        };
        Ok(session_file::save(self.path, session, &meta)?)
    }
}

/// Saves a session between the passes over a long prompt, so that an end in the middle costs little: as
/// often as it takes no more than a twentieth of the time.
pub(super) struct Checkpoints<'p> {
    place: &'p Place<'p>,
    /// When the next is due, counted as [`Progress::elapsed`]; never again after one that failed.
    due: Duration,
    /// Tokens of the prompt that were read when the last one was made.
    pub(super) read: Option<usize>,
}

impl<'p> Checkpoints<'p> {
    const SHARE: u32 = 20;

    pub(super) fn new(place: &'p Place<'p>) -> Self {
        Self { place, due: Duration::ZERO, read: None }
    }

    /// Told after a pass over a part of `prompt`. A save that fails is told to the user and costs the run
    /// nothing.
    pub(super) fn after(&mut self, seen: Progress<'_>, prompt: &[TokenId], generator: &Generator) {
        if seen.done == seen.total || seen.elapsed < self.due {
            return;
        }
        let begun = Instant::now();
        let (read, unread) = prompt.split_at(seen.session.len());
        let notes = Notes { unread: unread.to_vec(), given: 0 };
        match self.place.save(seen.session, (prompt.len(), &notes), generator) {
            Ok(()) => {
                self.due = seen.elapsed + begun.elapsed() * Self::SHARE;
                self.read = Some(read.len());
            }
            Err(failure) => {
                self.due = Duration::MAX;
                if let Failure::Error { error, .. } = failure {
                    let why = with_causes(error.as_ref());
                    terminal::report(&format!("the prompt is read on, but not saved on the way: {why}\n"));
                }
            }
        }
    }
}

/// What is wrong with a file is refused, what is wrong with the disk is a failed run.
impl From<SessionFileError> for Failure {
    fn from(error: SessionFileError) -> Self {
        match error {
            SessionFileError::Write { .. }
            | SessionFileError::Read { .. }
            | SessionFileError::DamagedState => Self::run(error),
            SessionFileError::TooLong { .. } => {
                Self::refused(error).hint("--set context.tokens=N holds more, or begin another session file")
            }
            error => Self::refused(error).hint("remove the file to begin anew, or name another one"),
        }
    }
}
