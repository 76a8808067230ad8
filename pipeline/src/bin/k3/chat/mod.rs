//! `k3 chat`: a conversation at the terminal, or one message and its answer.

mod command;
mod lines;
mod screen;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, anyhow};
use k3_pipeline::chat::ThinkingEffort;
use k3_pipeline::conversation::{
    Answer, AnswerOptions, ChatOptions, Conversation, ConversationError, Ended, Speaker,
};
use k3_pipeline::engine::Engine;
use k3_pipeline::forward::RunError;
use k3_pipeline::generation::Generator;
use k3_pipeline::model::tensors::Fingerprint;
use k3_pipeline::sample::SamplingParams;
use k3_pipeline::session::Session;
use k3_pipeline::stats::Stats;
use k3_pipeline::tokenizer::Tokenizer;
use k3_pipeline::units::TokenId;
use serde::Serialize;

use crate::engine_args::EngineArgs;
use crate::failure::{Failure, Outcome, in_words};
use crate::generate::max_tokens;
use crate::printer::ReportedCall;
use crate::sampling_args::{SamplingArgs, StopArgs};
use crate::{interrupt, output, progress, report};
use command::{Command, Setting};
use lines::Lines;
use screen::{Screen, Thinking};

/// Arguments of `k3 chat`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 chat --preset laptop --model ~/Kimi-K3
  k3 chat --preset laptop --model ~/Kimi-K3 --effort low --session talk.k3s
  k3 chat --preset demo --message 'Shall I' --max-tokens 40

Ctrl-C stops an answer, Ctrl-D ends the conversation, /help lists the commands. The response goes
to stdout, thinking (dimmed) and reports to stderr. A model whose vocabulary has no chat tokens,
such as the demo's, continues what you write. --quiet leaves the response alone.")]
pub(crate) struct Args {
    #[command(flatten)]
    engine: EngineArgs,
    /// Say this, print the answer, end.
    #[arg(long, value_name = "TEXT", value_parser = message, allow_hyphen_values = true)]
    message: Option<String>,
    /// With --message: print one JSON object.
    #[arg(long, requires = "message")]
    json: bool,
    /// Continue what is written, without the chat format. So it is anyway where the vocabulary has no
    /// chat tokens.
    #[arg(long, conflicts_with_all = ["system", "effort"])]
    plain: bool,
    /// Instructions at the beginning of the conversation.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    /// Answer without thinking first.
    #[arg(long)]
    no_thinking: bool,
    /// How much to think: low, high or max.
    #[arg(long, value_name = "EFFORT", conflicts_with = "no_thinking")]
    effort: Option<ThinkingEffort>,
    /// Do not show the thinking.
    #[arg(long)]
    hide_thinking: bool,
    /// Most tokens of an answer, thinking included; without it, 4096 or what the context holds.
    #[arg(long, value_name = "N", value_parser = max_tokens, allow_hyphen_values = true)]
    max_tokens: Option<usize>,
    /// Resume the conversation in this file, if it is there, and save it after every answer.
    #[arg(long, value_name = "FILE")]
    session: Option<PathBuf>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    stop: StopArgs,
}

/// Temperature where none is given: the model's own distribution.
const TEMPERATURE: f32 = 1.0;
/// Most tokens of an answer when nothing is said.
const MAX_TOKENS: usize = 4096;

/// Refuses a message of nothing.
fn message(text: &str) -> Result<String, String> {
    if text.trim().is_empty() { Err("the message is empty".to_owned()) } else { Ok(text.to_owned()) }
}

/// Refuses an answer longer than anything that the context holds.
fn within_context(what: &str, max_tokens: usize, context: usize) -> Outcome {
    if max_tokens <= context {
        return Ok(());
    }
    Err(Failure::refused(anyhow!("{what}: {max_tokens} tokens do not fit in a context of {context}"))
        .hint("raise `context.tokens` with --set, or ask for fewer"))
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> Outcome {
    output::distinct(&[("--session", args.session.as_deref()), ("--trace", args.engine.trace())])?;
    let planned = args.engine.plan()?;
    let tokenizer = Tokenizer::open(&planned.dir)?;
    let (vocabulary, end) = (planned.config.vocab, planned.config.eos);
    if tokenizer.vocabulary_len() > vocabulary {
        return Err(Failure::refused(anyhow!(
            "the tokenizer has {} ids, the model {vocabulary}",
            tokenizer.vocabulary_len()
        )));
    }
    args.stop.matcher(vocabulary, end)?;
    let context = planned.plan.context_tokens;
    let max_tokens = args.max_tokens.unwrap_or(MAX_TOKENS.min(context));
    within_context("--max-tokens", max_tokens, context)?;
    let generator = args.sampling.generator(args.sampling.params(TEMPERATURE, None), vocabulary, true)?;
    if let Some(path) = &args.session {
        // Refused now, not after the first answer.
        drop(output::place("--session", path)?);
    }
    let model = (planned.tensors.fingerprint, planned.name());
    let engine = planned.open()?;
    let cancel = engine.cancel_flag();
    interrupt::listen(Arc::clone(&cancel))?;
    let thinking = match args.hide_thinking || args.json {
        true => Thinking::Hidden,
        false => Thinking::Shown,
    };
    let options =
        ChatOptions { system: args.system.clone(), thinking: !args.no_thinking, effort: args.effort };
    let mut conversation = Conversation::new(&tokenizer, Session::new(&engine), options);
    if args.plain {
        conversation = conversation.plain();
    }
    let mut chat = Chat {
        conversation,
        engine,
        generator,
        cancel,
        model,
        max_tokens,
        screen: Screen::new(thinking, !args.json),
        args,
        vocabulary,
        end,
    };
    if let Some(path) = args.session.as_deref().filter(|path| path.exists()) {
        let resumed = chat.load(path)?;
        chat.screen.remark(&resumed);
    }
    match &args.message {
        Some(message) => chat.once(message),
        None => chat.converse(),
    }
}

const NOTHING_SAID: &str = "Nothing has been said yet.";

/// A conversation with everything it runs on.
struct Chat<'a> {
    conversation: Conversation<'a>,
    engine: Engine,
    generator: Generator,
    cancel: Arc<AtomicBool>,
    model: (Fingerprint, String),
    max_tokens: usize,
    screen: Screen,
    args: &'a Args,
    vocabulary: usize,
    end: TokenId,
}

#[derive(Serialize)]
struct Report<'a> {
    thinking: &'a str,
    response: &'a str,
    tool_calls: Vec<ReportedCall<'a>>,
    ended: Ended,
    prompt_tokens: usize,
    tokens: usize,
    stats: Stats,
}

impl Chat<'_> {
    /// Says one thing and prints the answer.
    fn once(&mut self, message: &str) -> Outcome {
        let answer = self.say(message)?;
        if self.args.json {
            output::print_json(&Report {
                thinking: &answer.thinking,
                response: &answer.response,
                tool_calls: answer.calls.iter().map(ReportedCall::new).collect(),
                ended: answer.ended,
                prompt_tokens: answer.prompt_tokens,
                tokens: answer.tokens,
                stats: self.engine.stats(),
            })?;
        } else {
            report::print(&self.engine.stats());
        }
        match answer.ended {
            Ended::Interrupted => Err(Failure::run(RunError::Cancelled)),
            Ended::Whole | Ended::Stop | Ended::Length => Ok(()),
        }
    }

    /// Reads lines until their end.
    fn converse(&mut self) -> Outcome {
        let mut lines = Lines::open()?;
        self.screen.remark(if self.conversation.is_chat() {
            "/help lists the commands, Ctrl-D ends."
        } else {
            "The model continues what you write. /help lists the commands, Ctrl-D ends."
        });
        while let Some(line) = lines.next()? {
            let outcome = match command::parse(&line) {
                Ok(None) => Ok(()),
                Ok(Some(Command::Exit)) => break,
                Ok(Some(command)) => self.obey(command),
                Err(problem) => {
                    self.screen.note(&problem);
                    Ok(())
                }
            };
            match outcome {
                // What cannot be done is said, and the conversation goes on.
                Err(Failure::Error { error, hint, .. }) => {
                    self.screen.note(&in_words(&error, hint.as_deref()));
                }
                outcome => outcome?,
            }
        }
        Ok(())
    }

    fn obey(&mut self, command: Command) -> Outcome {
        match command {
            Command::Say(text) => self.say(&text).map(|_| ()),
            Command::Help => self.shown(command::HELP),
            Command::Reset => {
                self.conversation.reset();
                self.shown("The conversation is empty.")
            }
            Command::Undo => match self.conversation.take_back() {
                Some(said) => self.shown(&format!("Taken back: {said}")),
                None => self.shown(NOTHING_SAID),
            },
            Command::Again => match self.conversation.take_back() {
                Some(said) => self.say(&said).map(|_| ()),
                None => self.shown(NOTHING_SAID),
            },
            Command::Edit(text) => match self.conversation.take_back() {
                Some(_) => self.say(&text).map(|_| ()),
                None => self.shown(NOTHING_SAID),
            },
            Command::System(text) => {
                let system = Some(text).filter(|text| !text.is_empty());
                let options = ChatOptions { system, ..self.conversation.options().clone() };
                self.set_options(options)
            }
            Command::Save(path) => {
                self.save(&path)?;
                self.shown(&format!("Saved to {}.", path.display()))
            }
            Command::Load(path) => {
                let resumed = self.load(&path)?;
                self.shown(&resumed)
            }
            Command::Stats => {
                report::print(&self.engine.stats());
                self.shown(&format!("context {} tokens", self.conversation.len()))
            }
            Command::Set(setting) => self.set(setting),
            Command::Exit => Ok(()),
        }
    }

    fn shown(&self, text: &str) -> Outcome {
        self.screen.note(text);
        Ok(())
    }

    fn set_options(&mut self, options: ChatOptions) -> Outcome {
        self.conversation.set_options(options)?;
        Ok(())
    }

    fn set(&mut self, setting: Setting) -> Outcome {
        let params = self.generator.sampler().params().clone();
        match setting {
            Setting::Temperature(temperature) => self.set_params(SamplingParams { temperature, ..params }),
            Setting::TopK(top_k) => self.set_params(SamplingParams { top_k, ..params }),
            Setting::TopP(top_p) => self.set_params(SamplingParams { top_p, ..params }),
            Setting::MinP(min_p) => self.set_params(SamplingParams { min_p, ..params }),
            Setting::Seed(seed) => {
                self.generator =
                    self.args.sampling.generator(SamplingParams { seed, ..params }, self.vocabulary, true)?;
                Ok(())
            }
            Setting::MaxTokens(n) => {
                within_context("max-tokens", n, self.engine.plan().context_tokens)?;
                self.max_tokens = n;
                Ok(())
            }
            Setting::Thinking(shown) => {
                self.screen.set_thinking(shown);
                let thinking = shown != Thinking::Off;
                self.set_options(ChatOptions { thinking, ..self.conversation.options().clone() })
            }
            Setting::Effort(effort) => {
                self.set_options(ChatOptions { effort, ..self.conversation.options().clone() })
            }
        }
    }

    /// New parameters; the random numbers go on where they are.
    fn set_params(&mut self, params: SamplingParams) -> Outcome {
        let state = self.generator.sampler().random_state();
        self.generator = self.args.sampling.generator(params, self.vocabulary, true)?;
        self.generator.sampler_mut().set_random_state(state);
        Ok(())
    }

    fn say(&mut self, text: &str) -> Result<Answer, Failure> {
        // A Ctrl-C from before is not meant for this answer.
        self.cancel.store(false, Ordering::SeqCst);
        let mut bar = progress::Prompt::new(0, self.engine.config().layers.len());
        let screen = &mut self.screen;
        screen.begin();
        let options = AnswerOptions {
            max_tokens: self.max_tokens,
            stop: self.args.stop.matcher(self.vocabulary, self.end)?,
            watch: Some(&mut bar),
            hear: &mut |heard| screen.hear(heard),
        };
        let speaker = Speaker { engine: &mut self.engine, generator: &mut self.generator };
        let answer = self.conversation.say(speaker, text, options);
        self.cancel.store(false, Ordering::SeqCst);
        self.screen.end(answer.as_ref().ok().map(|answer| answer.ended))?;
        let answer = answer?;
        if let Some(path) = self.args.session.clone() {
            self.save(&path)?;
        }
        Ok(answer)
    }

    fn save(&self, path: &Path) -> Outcome {
        let (fingerprint, name) = &self.model;
        self.conversation.save(path, (*fingerprint, name), &self.generator)?;
        Ok(())
    }

    /// Goes on with a saved conversation; gives what is to say of it.
    fn load(&mut self, path: &Path) -> Result<String, Failure> {
        self.conversation.load(path, self.model.0, &mut self.generator)?;
        let (messages, tokens) = (self.conversation.messages().len(), self.conversation.len());
        Ok(format!("Resumed {}: {messages} messages, {tokens} tokens.", path.display()))
    }
}

/// What was refused before the run, and what went wrong in it.
impl From<ConversationError> for Failure {
    fn from(error: ConversationError) -> Self {
        match error {
            ConversationError::Run(error) => error.into(),
            ConversationError::Sampling(error) => error.into(),
            ConversationError::File(error) => error.into(),
            error @ ConversationError::Notes { .. } => Self::refused(error)
                .hint("a session of `k3 generate` goes on with `k3 generate --session FILE`"),
            error => Self::refused(error),
        }
    }
}

/// Where the history of lines is kept: `$XDG_STATE_HOME` or `~/.local/state`, then `k3/history`.
fn history_file() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    Some(state.or_else(home)?.join("k3/history"))
}

/// Creates the directory of a file, for its owner alone.
fn create_parent(path: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let Some(dir) = path.parent() else { return Ok(()) };
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .with_context(|| format!("{}: cannot create the directory", dir.display()))
}

/// Writes to stderr; a closed stderr leaves nobody to tell.
fn to_stderr(text: &str) {
    let mut err = std::io::stderr().lock();
    let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
}
