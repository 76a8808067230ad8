//! `k3 batch`: many requests, one JSON object per line, sharing every pass over the weights.

mod answer;
mod lines;
mod request;

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::anyhow;
use k3_pipeline::batch::{Batch, Heard, Request as BatchRequest};
use k3_pipeline::causes::with_causes;
use k3_pipeline::engine::Engine;
use k3_pipeline::forward::RunError;
use k3_pipeline::tokenizer::Tokenizer;
use k3_pipeline::units::TokenId;
use serde::Serialize;

use crate::engine_args::EngineArgs;
use crate::failure::{Failure, Outcome};
use crate::generate::{max_tokens, room};
use crate::sampling_args::{SamplingArgs, StopArgs};
use crate::{interrupt, output, report};
use answer::{Answer, Name};
use lines::{Line, Lines, Next};
use request::Request;

/// Arguments of `k3 batch`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 batch requests.jsonl --preset max --model ~/Kimi-K3 > answers.jsonl
  k3 batch --parallel 4 --preset demo - < requests.jsonl

A line of the input is one request:
  {\"id\": \"a\", \"prompt\": \"Once upon a time\", \"max_tokens\": 40}
  {\"id\": 2, \"ids\": [1, 2, 3], \"temperature\": 0.8, \"seed\": 7, \"stop\": [\".\"]}
  {\"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}], \"thinking\": false}
Also: top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias
({\"ID\": BIAS}), stop_ids, logprobs, and with messages thinking_effort, tools, tool_choice,
response_format. What a request leaves out is as the options say.

Each answer is a line on stdout as soon as it ends: {\"line\", \"id\", \"prompt_tokens\",
\"generated_ids\", \"text\", \"finish_reason\", ...}, or {\"line\", \"id\", \"error\"} for a request that
failed; the others go on. Every answer is what it would be alone, bit for bit. Exit code 1 if any
request failed or was interrupted.")]
pub(crate) struct Args {
    #[command(flatten)]
    engine: EngineArgs,
    /// The requests, a JSON object per line; - is standard input.
    #[arg(value_name = "FILE")]
    requests: PathBuf,
    /// Sequences at once, each with a state and a cache of its own: short for
    /// `--set context.sequences=N`.
    #[arg(long, value_name = "N")]
    parallel: Option<u16>,
    /// Most tokens of an answer whose request does not say; without it, 256 or what the context has
    /// room for.
    #[arg(long, value_name = "N", value_parser = max_tokens, allow_hyphen_values = true)]
    max_tokens: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    stop: StopArgs,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> Outcome {
    output::distinct(&[("FILE", Some(&args.requests)), ("--trace", args.engine.trace())])?;
    // No sequence of a batch ever goes back.
    let mut changes = vec!["context.snapshots=0".to_owned()];
    changes.extend(args.parallel.map(|n| format!("context.sequences={n}")));
    let planned = args.engine.plan_with(&changes)?;
    let tokenizer = planned.tokenizer()?;
    let (vocabulary, end) = (planned.config.vocab, planned.config.eos);
    args.stop.matcher(vocabulary, end)?;
    if args.stop.has_strings() && tokenizer.is_none() {
        return Err(Failure::refused(anyhow!(
            "--stop needs text, and {} has no tokenizer",
            planned.dir.display()
        ))
        .hint("stop at token ids with --stop-id"));
    }
    args.sampling.generator(args.sampling.params(0.0, None), vocabulary, false)?;
    let lines = Lines::open(&args.requests)?;
    let engine = planned.open()?;
    let cancel = engine.cancel_flag();
    interrupt::listen(Arc::clone(&cancel))?;
    let mut server = Server {
        batch: Batch::new(&engine),
        engine,
        args,
        tokenizer: tokenizer.as_ref(),
        vocabulary,
        end,
        cancel,
        answers: BTreeMap::new(),
        tally: Tally::default(),
    };
    let outcome = server.serve(&lines);
    report::print(&server.engine.stats());
    server.tally.print();
    outcome?;
    server.tally.outcome()
}

/// Requests by how they ended.
#[derive(Debug, Default)]
struct Tally {
    answered: usize,
    failed: usize,
    interrupted: usize,
    tokens: usize,
}

impl Tally {
    fn print(&self) {
        let Self { answered, failed, interrupted, tokens } = self;
        crate::terminal::report(&format!(
            "batch   {answered} answered, {failed} failed, {interrupted} interrupted; {tokens} tokens generated\n"
        ));
    }

    fn outcome(&self) -> Outcome {
        match self.failed {
            0 => Ok(()),
            failed => Err(Failure::run(anyhow!("{failed} of {} requests failed", self.answered + failed))),
        }
    }
}

/// A request that failed, as a line of the output.
#[derive(Serialize)]
struct Failed<'a> {
    #[serde(flatten)]
    name: &'a Name,
    error: String,
}

/// Takes requests as there is room for them, and gives answers as they end.
struct Server<'a> {
    engine: Engine,
    batch: Batch,
    args: &'a Args,
    tokenizer: Option<&'a Tokenizer>,
    vocabulary: usize,
    end: TokenId,
    cancel: Arc<AtomicBool>,
    /// By the number of the line.
    answers: BTreeMap<u64, Answer<'a>>,
    tally: Tally,
}

impl Server<'_> {
    fn serve(&mut self, lines: &Lines) -> Outcome {
        let mut has_ended = false;
        loop {
            while self.batch.has_room() && !has_ended && !self.cancel.load(Ordering::SeqCst) {
                match lines.next(self.batch.is_empty()) {
                    Next::Line(line) => self.admit(line)?,
                    Next::NotYet if self.batch.is_empty() => {}
                    Next::NotYet => break,
                    Next::End => has_ended = true,
                }
            }
            if self.cancel.load(Ordering::SeqCst) {
                return self.interrupt();
            }
            if self.batch.is_empty() {
                return Ok(());
            }
            self.step()?;
        }
    }

    /// Lets a request enter, or says why not.
    fn admit(&mut self, line: Line) -> Outcome {
        let Line { number, text } = line;
        let text = match text {
            Ok(text) if text.is_empty() => return Ok(()),
            text => text,
        };
        let id = text.as_deref().ok().and_then(request::id_of);
        let name = Name { line: number, id };
        match text.map_err(|why| Failure::refused(anyhow!(why))).and_then(|text| self.enter(&name, &text)) {
            Ok(()) => Ok(()),
            Err(failure) => self.fail(&name, failure),
        }
    }

    fn enter(&mut self, name: &Name, text: &str) -> Outcome {
        let request = Request::parse(name.line, text)?;
        let params = request.params(self.args.sampling.params(0.0, None));
        let mut generator = self.args.sampling.generator(params, self.vocabulary, false)?;
        let stop = request.stop(self.args.stop.raw(), (self.vocabulary, self.end))?;
        let max_tokens = request.max_tokens;
        let (prompt, text) = request.prompt(self.tokenizer, stop)?;
        if prompt.is_empty() {
            return Err(Failure::refused(anyhow!(
                "the prompt is empty: expected a text, or at least one id"
            )));
        }
        generator.sampler_mut().begin(&prompt)?;
        if max_tokens == Some(0) {
            return Err(Failure::refused(anyhow!("max_tokens: at least 1")));
        }
        let context = self.engine.plan().context_tokens;
        let max_tokens = room(context, prompt.len(), max_tokens.or(self.args.max_tokens))?;
        let answer = Answer::new(name.clone(), prompt.len(), text);
        self.batch.enter(&self.engine, BatchRequest { key: name.line, prompt, max_tokens, generator })?;
        self.answers.insert(name.line, answer);
        Ok(())
    }

    /// One pass, and the answers that end with it.
    fn step(&mut self) -> Outcome {
        let mut failed = Vec::new();
        let Self { answers, tally, .. } = self;
        let mut hear = |key: u64, heard: Heard<'_>| {
            let Some(answer) = answers.get_mut(&key) else { return ControlFlow::Break(()) };
            let flow = match heard {
                Heard::Token(chosen) => {
                    tally.tokens += 1;
                    answer.take(chosen)
                }
                Heard::Failed(error) => Err(error.into()),
            };
            flow.unwrap_or_else(|failure| {
                failed.push((key, failure));
                ControlFlow::Break(())
            })
        };
        let ended = match self.batch.step(&mut self.engine, &mut hear) {
            Ok(ended) => ended,
            Err(RunError::Cancelled) => return self.interrupt(),
            Err(error) => return self.lose(&error),
        };
        for (key, failure) in failed {
            if let Some(answer) = self.answers.remove(&key) {
                self.fail(answer.name(), failure)?;
            }
        }
        for key in ended {
            if let Some(answer) = self.answers.remove(&key) {
                print(&answer.finish(false)?)?;
                self.tally.answered += 1;
            }
        }
        Ok(())
    }

    /// A pass that failed takes all its requests with it.
    fn lose(&mut self, error: &RunError) -> Outcome {
        self.batch.clear();
        for answer in std::mem::take(&mut self.answers).into_values() {
            self.fail(answer.name(), Failure::run(anyhow!(error.to_string())))?;
        }
        Ok(())
    }

    /// Gives out what there is of every answer.
    fn interrupt(&mut self) -> Outcome {
        self.batch.clear();
        for answer in std::mem::take(&mut self.answers).into_values() {
            print(&answer.finish(true)?)?;
            self.tally.interrupted += 1;
        }
        Err(Failure::run(RunError::Cancelled))
    }

    fn fail(&mut self, name: &Name, failure: Failure) -> Outcome {
        let Failure::Error { error, hint, .. } = failure else { return Err(failure) };
        self.tally.failed += 1;
        let hint = hint.map_or(String::new(), |hint| format!("; {hint}"));
        let failed = Failed { name, error: with_causes(error.as_ref()) + &hint };
        print(&serde_json::to_string(&failed).map_err(Failure::run)?)
    }
}

/// A line of the output, at once.
fn print(line: &str) -> Outcome {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()?;
    Ok(())
}
