//! A conversation with a model: what was said, and the session that has read it.

mod listener;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::chat::{CalledTool, ChatError, ChatFormat, ChatRequest, Message, ThinkingEffort};
use crate::engine::Engine;
use crate::forward::{RunError, Tap};
use crate::generation::{Chosen, Generator};
use crate::model::tensors::Fingerprint;
use crate::sample::{SamplingError, StopMatcher};
use crate::session::{Prefill, Session};
use crate::session_file::{self, SessionFileError, SessionMeta};
use crate::tokenizer::{StreamDecoder, Tokenizer};
use crate::units::TokenId;
pub use listener::{Ear, Listener};

/// How the model is spoken to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatOptions {
    /// Instructions at the beginning.
    pub system: Option<String>,
    /// Whether the model thinks first.
    pub thinking: bool,
    /// How much.
    pub effort: Option<ThinkingEffort>,
}

/// More of an answer.
#[derive(Clone, Copy, Debug)]
pub enum Heard<'a> {
    /// Thinking.
    Thinking(&'a str),
    /// The response, or the continuation where the model only completes text.
    Response(&'a str),
    /// A call of a tool.
    ToolCall(&'a CalledTool),
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// The model ended it.
    Whole,
    /// A stop text or stop token came.
    Stop,
    /// As many tokens as allowed, or no room for more.
    Length,
    /// Somebody asked the run to stop.
    Interrupted,
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// What was thought.
    pub thinking: String,
    /// The response.
    pub response: String,
    /// The calls of tools.
    pub calls: Vec<CalledTool>,
    /// Why it ended.
    pub ended: Ended,
    /// Tokens of the prompt that had to be read for it.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub tokens: usize,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ConversationError {
    /// The text could not be encoded.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// The pass failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The row was refused.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// Nothing to continue.
    #[error("there is no text to continue")]
    Empty,
    /// The session was not saved or resumed.
    #[error(transparent)]
    File(#[from] SessionFileError),
    /// A session that is no conversation's.
    #[error("{}: not the session of a conversation", path.display())]
    Notes {
        /// The file.
        path: PathBuf,
    },
    /// Notes that are no JSON.
    #[error("the conversation cannot be noted: {source}")]
    Unnoted {
        /// The JSON writer's reason.
        source: serde_json::Error,
    },
}

impl From<crate::tokenizer::TokenizerError> for ConversationError {
    fn from(error: crate::tokenizer::TokenizerError) -> Self {
        Self::Chat(error.into())
    }
}

/// Watches how a prompt is read.
pub trait Watch: Tap {
    /// So many tokens are to be read.
    fn begin(&mut self, tokens: usize);
}

/// Who answers: the engine that runs the passes, the generator that chooses tokens.
pub struct Speaker<'a> {
    /// Runs the passes.
    pub engine: &'a mut Engine,
    /// Chooses the tokens.
    pub generator: &'a mut Generator,
}

/// How an answer is made, and who hears it.
pub struct AnswerOptions<'a> {
    /// Most tokens.
    pub max_tokens: usize,
    /// Stop tokens and stop texts; texts count in the response alone.
    pub stop: StopMatcher,
    /// Looks at the passes that read the prompt.
    pub watch: Option<&'a mut dyn Watch>,
    /// Told the answer as it comes.
    pub hear: &'a mut dyn FnMut(Heard<'_>),
}

/// What a saved conversation needs beside its session.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Notes {
    options: ChatOptions,
    messages: Vec<Message>,
    /// Tokens before each thing that was said.
    turns: Vec<usize>,
    /// Every token so far, whatever of it has been read.
    text: Vec<TokenId>,
}

/// A conversation. Nothing is read twice: each turn adds to the session.
pub struct Conversation<'t> {
    tokenizer: &'t Tokenizer,
    /// `None`: the model completes text.
    format: Option<ChatFormat<'t>>,
    options: ChatOptions,
    session: Session,
    /// Every token so far; the session has read a beginning of it.
    text: Vec<TokenId>,
    messages: Vec<Message>,
    /// Tokens before each thing that was said.
    turns: Vec<usize>,
}

impl<'t> Conversation<'t> {
    /// An empty conversation; one that completes text where the vocabulary has no chat tokens.
    #[must_use]
    pub fn new(tokenizer: &'t Tokenizer, session: Session, options: ChatOptions) -> Self {
        let format = ChatFormat::new(tokenizer).ok();
        Self {
            tokenizer,
            format,
            options,
            session,
            text: Vec::new(),
            messages: Vec::new(),
            turns: Vec::new(),
        }
    }

    /// The same conversation with a model that completes text, whatever its vocabulary.
    #[must_use]
    pub fn plain(self) -> Self {
        Self { format: None, ..self }
    }

    /// Whether the model chats; else it completes text.
    #[must_use]
    pub fn is_chat(&self) -> bool {
        self.format.is_some()
    }

    /// How the model is spoken to.
    #[must_use]
    pub fn options(&self) -> &ChatOptions {
        &self.options
    }

    /// What was said.
    #[must_use]
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Tokens so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.text.len()
    }

    /// Whether nothing was said.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Forgets what was said.
    pub fn reset(&mut self) {
        self.session.clear();
        self.text.clear();
        self.messages.clear();
        self.turns.clear();
    }

    /// Takes back the last thing that was said, and its answer; gives what it was.
    pub fn take_back(&mut self) -> Option<String> {
        let before = self.turns.pop()?;
        self.text.truncate(before);
        self.messages.pop();
        match self.messages.pop() {
            Some(Message::User { content, .. }) => Some(content),
            _ => None,
        }
    }

    /// Changes how the model is spoken to. Where that changes the beginning of the text, the next turn
    /// reads what comes after the change afresh.
    ///
    /// # Errors
    /// Only if the tokenizer fails.
    pub fn set_options(&mut self, options: ChatOptions) -> Result<(), ConversationError> {
        let begins = |o: &ChatOptions| (o.system.clone(), o.effort.filter(|_| o.thinking));
        let is_new = begins(&options) != begins(&self.options);
        self.options = options;
        if let Some(format) = self.format.filter(|_| is_new && !self.is_empty()) {
            let mut request = ChatRequest::new(self.opening());
            request.thinking = self.options.thinking;
            request.thinking_effort = self.options.effort;
            request.add_generation_prompt = false;
            self.turns.clear();
            self.text.clear();
            for turn in self.messages.chunks(2) {
                self.turns.push(self.text.len());
                request.messages.extend_from_slice(turn);
                self.text = format.encode(&request)?;
            }
        }
        Ok(())
    }

    /// Says something and hears the answer.
    ///
    /// # Errors
    /// A text that does not fit, or a failed pass; the conversation is then as it was before.
    pub fn say(
        &mut self,
        speaker: Speaker<'_>,
        what: &str,
        options: AnswerOptions<'_>,
    ) -> Result<Answer, ConversationError> {
        let before = self.text.len();
        let answer = self.turn(speaker, what, options);
        match &answer {
            Ok(answer) => {
                self.turns.push(before);
                self.remember(what, answer);
            }
            Err(_) => self.text.truncate(before),
        }
        if answer.is_err() || self.session.state().is_damaged() {
            self.session.reuse(&self.text);
        }
        answer
    }

    fn remember(&mut self, what: &str, answer: &Answer) {
        self.messages.push(Message::user(what));
        self.messages.push(Message::Assistant {
            content: Some(answer.response.clone()),
            name: None,
            reasoning_content: Some(answer.thinking.clone()).filter(|thinking| !thinking.is_empty()),
            tool_calls: Vec::new(),
        });
    }

    /// The system message, where there is one.
    fn opening(&self) -> Vec<Message> {
        self.options.system.iter().map(Message::system).collect()
    }

    /// Tokens of the system message at the beginning of the text.
    fn instructions(&self) -> usize {
        let Some(format) = self.format.filter(|_| self.options.system.is_some()) else { return 0 };
        let mut request = ChatRequest::new(self.opening());
        request.thinking = self.options.thinking;
        request.thinking_effort = self.options.effort;
        request.add_generation_prompt = false;
        let alone = format.encode(&request).unwrap_or_default();
        if self.text.starts_with(&alone) { alone.len() } else { 0 }
    }

    /// The tokens of something said.
    fn encode(&self, what: &str) -> Result<Vec<TokenId>, ConversationError> {
        let Some(format) = self.format else { return Ok(self.tokenizer.encode(what)?) };
        let is_first = self.is_empty();
        let mut request = ChatRequest::new(if is_first { self.opening() } else { Vec::new() });
        request.messages.push(Message::user(what));
        request.thinking = self.options.thinking;
        request.thinking_effort = self.options.effort.filter(|_| is_first);
        Ok(format.encode(&request)?)
    }

    fn turn(
        &mut self,
        Speaker { engine, generator }: Speaker<'_>,
        what: &str,
        options: AnswerOptions<'_>,
    ) -> Result<Answer, ConversationError> {
        let AnswerOptions { max_tokens, stop, watch, hear } = options;
        let before = self.text.len();
        self.text.extend(self.encode(what)?);
        if self.text.is_empty() {
            return Err(ConversationError::Empty);
        }
        self.session.reuse(&self.text);
        // Where one comes back to: with other words after the instructions, or after an earlier turn.
        self.session.mark(self.instructions());
        self.session.mark(before);
        let unread = &self.text[self.session.len()..];
        let prompt_tokens = unread.len();
        generator.sampler_mut().begin(&self.text)?;
        let tap = watch.map(|watch| {
            watch.begin(prompt_tokens);
            watch as &mut dyn Tap
        });
        let how = Prefill { tap, ..Prefill::default() };
        let logits = self.session.prefill(engine, unread, how)?;
        let most = max_tokens.min(self.session.room() + 1);
        let ear = match self.format {
            Some(format) => Ear::Chat(format.stream(self.options.thinking)),
            None => Ear::Plain(self.tokenizer, StreamDecoder::new()),
        };
        let mut listener = Listener::new(ear, stop, most);
        let first = generator.first(logits.last().unwrap_or_default())?;
        let id = first.id;
        let mut flow = listener.take(first, hear)?.map_break(|()| id).map_continue(|()| id);
        while let ControlFlow::Continue(decided) = flow {
            let mut emit = |chosen: Chosen<'_>| listener.take(chosen, hear);
            flow = match generator.step(engine, &mut self.session, decided, &mut emit) {
                Err(ConversationError::Run(RunError::Cancelled)) => {
                    listener.ended = Ended::Interrupted;
                    ControlFlow::Break(decided)
                }
                flow => flow?,
            };
        }
        let (answer, ids) = listener.finish(prompt_tokens, hear)?;
        self.text.extend(ids);
        Ok(answer)
    }

    /// Saves the conversation.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn save(
        &self,
        path: &Path,
        (fingerprint, model): (Fingerprint, &str),
        generator: &Generator,
    ) -> Result<(), ConversationError> {
        let notes = Notes {
            options: self.options.clone(),
            messages: self.messages.clone(),
            turns: self.turns.clone(),
            text: self.text.clone(),
        };
        let meta = SessionMeta {
            fingerprint,
            model: model.to_owned(),
            prompt_tokens: self.session.len(),
            random: generator.sampler().random_state(),
            notes: serde_json::to_vec(&notes).map_err(|source| ConversationError::Unnoted { source })?,
        };
        Ok(session_file::save(path, &self.session, &meta)?)
    }

    /// Goes on with a saved conversation, in place of this one.
    ///
    /// # Errors
    /// A file that is damaged or of another model; the conversation is as it was then, but may have to be
    /// read again.
    pub fn load(
        &mut self,
        path: &Path,
        fingerprint: Fingerprint,
        generator: &mut Generator,
    ) -> Result<(), ConversationError> {
        let meta = session_file::resume(path, &mut self.session, fingerprint)?;
        let notes: Notes = serde_json::from_slice(&meta.notes)
            .map_err(|_| ConversationError::Notes { path: path.to_owned() })?;
        generator.sampler_mut().set_random_state(meta.random);
        self.text = notes.text;
        self.options = notes.options;
        self.messages = notes.messages;
        self.turns = notes.turns;
        Ok(())
    }
}
