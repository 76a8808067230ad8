//! `k3 generate`: a prompt in, its continuation out.

mod saved;

use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::anyhow;
use k3_pipeline::engine::Engine;
use k3_pipeline::forward::RunError;
use k3_pipeline::generation::{Chosen, Generator};
use k3_pipeline::session::{Prefill, Progress, Session};
use k3_pipeline::stats::Stats;
use k3_pipeline::units::TokenId;
use serde::Serialize;

use crate::engine_args::EngineArgs;
use crate::failure::{Failure, Outcome};
use crate::logits_file::LogitsFile;
use crate::printer::{FinishReason, Printer, TokenLogprobs};
use crate::prompt_args::PromptArgs;
use crate::sampling_args::{SamplingArgs, StopArgs};
use crate::{interrupt, output, progress, report, terminal};
use saved::{Checkpoints, Notes, Place};

/// Tokens to generate when nothing is said.
pub(crate) const MAX_TOKENS: usize = 256;

/// Arguments of `k3 generate`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 generate --preset demo 'Shall I'
  k3 generate --preset demo --ids 1,2,3 --max-tokens 16
  k3 generate --preset laptop --model ~/Kimi-K3 'The capital of France is'
  k3 generate --preset demo --temperature 0.8 --seed 7 --stop '.' 'Shall I'
  k3 generate --model ~/Kimi-K3 --prompt-file essay.txt --dump-logits logits.safetensors --json
  k3 generate --preset demo --session s.k3s --max-tokens 40 'Shall I'
  k3 generate --preset demo --session s.k3s --max-tokens 40

The last two give the text that one run with --max-tokens 80 would: half a character at the end
of a run, or the beginning of a stop text, comes with the next. With a prompt, a session file
changes nothing but the time: what it has already read of the same text is not read again. A long
prompt is saved between its passes: if the run ends there, the same command goes on behind them.

The text goes to stdout as it is decided, the report to stderr. A model directory without a
tokenizer takes and gives token ids.")]
pub(crate) struct Args {
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    /// Most tokens to generate; without it, 256 or what the context has room for.
    #[arg(long, value_name = "N", value_parser = max_tokens, allow_hyphen_values = true)]
    max_tokens: Option<usize>,
    /// Resume the generation in this file, if it is there, and save it at the end. Without a prompt the
    /// text goes on where it stopped, and so do the random numbers, whatever the seed.
    #[arg(long, value_name = "FILE")]
    session: Option<PathBuf>,
    /// Write the logits of every position fed, prompt and generated, to this safetensors file: `ids` [n]
    /// I32, `logits` [n, vocabulary] F32.
    #[arg(long, value_name = "FILE")]
    dump_logits: Option<PathBuf>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
    /// With --json: log-probabilities of every token and of the N most likely ones in its place.
    #[arg(long, value_name = "N", requires = "json")]
    logprobs: Option<usize>,
    // Last: what stands below these would come under their headings.
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    stop: StopArgs,
}

/// Most tokens that can be asked for.
const MAX_TOKENS_MAX: usize = 1 << 24;

/// Understands `--max-tokens`.
pub(crate) fn max_tokens(text: &str) -> Result<usize, String> {
    let n = text.parse().map_err(|_| "a whole number is expected".to_owned())?;
    if (1..=MAX_TOKENS_MAX).contains(&n) { Ok(n) } else { Err(format!("must be 1 to {MAX_TOKENS_MAX}")) }
}

#[derive(Serialize)]
struct Report<'a> {
    prompt_ids: &'a [TokenId],
    /// Tokens of it that a session had read before.
    reused_tokens: usize,
    generated_ids: &'a [TokenId],
    text: Option<String>,
    finish_reason: FinishReason,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<&'a [TokenLogprobs]>,
    stats: Stats,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> Outcome {
    output::distinct(&[
        ("--prompt-file", args.prompt.file()),
        ("--session", args.session.as_deref()),
        ("--dump-logits", args.dump_logits.as_deref()),
        ("--trace", args.engine.trace()),
    ])?;
    let planned = args.engine.plan()?;
    let tokenizer = planned.tokenizer()?;
    let vocab = planned.config.vocab;
    let place = args.session.as_deref().map(|path| Place::new(path, &planned)).transpose()?;
    let prompt = if args.prompt.is_absent() && place.as_ref().is_some_and(Place::exists) {
        None
    } else {
        let prompt = args.prompt.ids(vocab, || {
            tokenizer.as_ref().ok_or_else(|| {
                Failure::refused(anyhow!("{} has no tokenizer", planned.dir.display()))
                    .hint("give the prompt as token ids, as in --ids 1,2,3")
            })
        })?;
        room(planned.plan.context_tokens, prompt.len(), args.max_tokens)?;
        Some(prompt)
    };
    let dump = args.dump_logits.as_deref().map(|path| LogitsFile::create(path, vocab)).transpose()?;

    let params = args.sampling.params(0.0, args.logprobs);
    let generator = args.sampling.generator(params, vocab, place.is_some())?;
    let stop = args.stop.matcher(vocab, planned.config.eos)?;
    if args.stop.has_strings() && tokenizer.is_none() {
        return Err(Failure::refused(anyhow!(
            "--stop needs text, and {} has no tokenizer",
            planned.dir.display()
        ))
        .hint("stop at token ids with --stop-id"));
    }
    let engine = planned.open()?;
    interrupt::listen(engine.cancel_flag())?;
    let mut run = Run {
        session: Session::new(&engine),
        engine,
        generator,
        text: Vec::new(),
        prompt_tokens: 0,
        reused: 0,
        extends_saved: true,
        output: Output {
            max_tokens: 0,
            dump,
            printer: Printer::new(tokenizer.as_ref(), stop, !args.json),
            generated: Vec::new(),
            logprobs: Vec::new(),
            reason: FinishReason::Length,
        },
    };
    run.begin(place.as_ref(), prompt, args.max_tokens)?;
    let outcome = run.generate(place.as_ref());
    let saved = match (place, &outcome) {
        (Some(place), Ok(reason)) => run.save(&place, *reason),
        _ => Ok(()),
    };
    run.finish(outcome, args).and(saved)
}

/// Tokens to generate after `have`. The last of them is decided, not fed.
pub(crate) fn room(context: usize, have: usize, wanted: Option<usize>) -> Result<usize, Failure> {
    let room = (context + 1).saturating_sub(have);
    let hint = "raise `context.tokens` with --set, or give less";
    if room == 0 {
        let over = report::count((have - context) as u64, "token");
        return Err(Failure::refused(anyhow!(
            "the prompt is {over} too long: it has {have} tokens, the context holds {context}"
        ))
        .hint(hint));
    }
    match wanted {
        None => Ok(MAX_TOKENS.min(room)),
        Some(n) if n <= room => Ok(n),
        Some(n) => Err(Failure::refused(anyhow!(
            "{have} prompt tokens and {n} more do not fit in a context of {context}"
        ))
        .hint(hint)),
    }
}

/// A generation under way.
struct Run<'t> {
    engine: Engine,
    session: Session,
    generator: Generator,
    /// What the generated tokens follow: the prompt, or everything that a resumed session has.
    text: Vec<TokenId>,
    /// How much of it is prompt.
    prompt_tokens: usize,
    /// How much of it had been read before.
    reused: usize,
    /// Whether it begins with all of the text that is saved, if any is.
    extends_saved: bool,
    output: Output<'t>,
}

/// What has been generated.
struct Output<'t> {
    max_tokens: usize,
    dump: Option<LogitsFile>,
    printer: Printer<'t>,
    generated: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
    /// Why [`Output::take`] ended.
    reason: FinishReason,
}

impl Run<'_> {
    /// Takes up the session at `place`, and what the text is.
    fn begin(
        &mut self,
        place: Option<&Place<'_>>,
        prompt: Option<Vec<TokenId>>,
        max_tokens: Option<usize>,
    ) -> Outcome {
        let saved = place.map_or(Ok(None), |place| place.load(&mut self.session))?;
        match (prompt, saved) {
            (None, Some(saved)) => {
                saved.resume(&mut self.generator, &mut self.output.printer)?;
                self.prompt_tokens = saved.prompt_tokens();
                self.text = saved.text;
            }
            (prompt, saved) => {
                self.text = prompt.unwrap_or_default();
                self.extends_saved = saved.is_none_or(|saved| self.text.starts_with(&saved.text));
                self.prompt_tokens = self.text.len();
                self.generator.sampler_mut().begin(&self.text)?;
            }
        }
        let max_tokens = room(self.engine.plan().context_tokens, self.text.len(), max_tokens)?;
        self.output.max_tokens = max_tokens;
        self.output.generated.reserve(max_tokens);
        Ok(())
    }

    fn generate(&mut self, place: Option<&Place<'_>>) -> Result<FinishReason, Failure> {
        let Some(mut flow) = self.prefill(place)? else { return Ok(FinishReason::Interrupted) };
        while let ControlFlow::Continue(decided) = flow {
            flow = match self.step(decided) {
                Err(failure) if failure.is::<RunError>(|e| matches!(e, RunError::Cancelled)) => {
                    return Ok(FinishReason::Interrupted);
                }
                flow => flow?,
            };
        }
        Ok(self.output.reason)
    }

    /// Reads the text and decides the first token; `None` when interrupted. A long prompt is saved to
    /// `place` on the way, unless that would replace another text.
    fn prefill(
        &mut self,
        place: Option<&Place<'_>>,
    ) -> Result<Option<ControlFlow<TokenId, TokenId>>, Failure> {
        self.reused = self.session.reuse(&self.text);
        // The same prompt may come again.
        self.session.mark(self.prompt_tokens.saturating_sub(1));
        let mut checkpoints = place.filter(|_| self.extends_saved).map(Checkpoints::new);
        let Self { engine, session, generator, output, text, .. } = self;
        let unread = &text[self.reused..];
        let mut bar = progress::Prompt::new(unread.len(), engine.config().layers.len());
        let all_logits = output.dump.is_some();
        let mut kept = Ok(());
        let mut keep = |seen: Progress<'_>| {
            if let Some(checkpoints) = &mut checkpoints {
                checkpoints.after(seen, text, generator);
            }
            output.dump.as_mut().map_or(Ok(()), |dump| dump.push(seen.logits.data()))
        };
        let mut observe = |seen: Progress<'_>| {
            if kept.is_ok() {
                kept = keep(seen);
            }
        };
        let how = Prefill { all_logits, observe: Some(&mut observe), tap: Some(&mut bar), chunk: None };
        let logits = session.prefill(engine, unread, how);
        drop(bar);
        kept?;
        let logits = match logits {
            Err(RunError::Cancelled) => {
                if let Some(read) = checkpoints.and_then(|checkpoints| checkpoints.read) {
                    let of = text.len();
                    terminal::report(&format!(
                        "session saved after {read} of {of} prompt tokens: the same command goes on there\n"
                    ));
                }
                return Ok(None);
            }
            logits => logits?,
        };
        let chosen = generator.first(logits.last().unwrap_or_default())?;
        let id = chosen.id;
        Ok(Some(output.take(chosen)?.map_break(|()| id).map_continue(|()| id)))
    }

    /// One pass.
    fn step(&mut self, decided: TokenId) -> Result<ControlFlow<TokenId, TokenId>, Failure> {
        let Self { engine, session, generator, output, .. } = self;
        let mut emit = |chosen: Chosen<'_>| {
            if let Some(dump) = &mut output.dump {
                dump.push(chosen.row)?;
            }
            output.take(chosen)
        };
        generator.step(engine, session, decided, &mut emit)
    }

    /// Saves the session, unless it ended in the middle of the prompt: the last [`Checkpoints`] stays then.
    fn save(&mut self, place: &Place<'_>, reason: FinishReason) -> Outcome {
        let Output { generated, printer, .. } = &mut self.output;
        match generated.last() {
            Some(&decided) if !self.session.state().is_damaged() => {
                if reason == FinishReason::Stop {
                    printer.end_text();
                }
                let notes = Notes { unread: vec![decided], given: printer.given() };
                place.save(&self.session, (self.prompt_tokens, &notes), &self.generator)
            }
            Some(_) => {
                terminal::report(
                    "session not saved: the interrupted pass left it half changed, which `pass.draft_tokens` of at \
                     least 1 prevents\n",
                );
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Ends the text, prints the report, puts files in their places.
    fn finish(self, outcome: Result<FinishReason, Failure>, args: &Args) -> Outcome {
        let Self { engine, text: prompt, reused, output, .. } = self;
        let Output { mut printer, dump, generated, logprobs, .. } = output;
        let reason = match outcome {
            Ok(reason) => reason,
            Err(failure) => {
                report::print(&engine.stats());
                return Err(failure);
            }
        };
        // In a session the text goes on.
        if args.session.is_none() || reason == FinishReason::Stop {
            printer.end_text();
        }
        let printed = printer.finish();
        let stats = engine.stats();
        report::print(&stats);
        if let Some(dump) = dump {
            let fed: Vec<TokenId> = prompt[reused..].iter().chain(&generated).copied().collect();
            dump.finish(&fed)?;
        }
        let text = printed?;
        if args.json {
            output::print_json(&Report {
                prompt_ids: &prompt,
                reused_tokens: reused,
                generated_ids: &generated,
                text,
                finish_reason: reason,
                logprobs: args.logprobs.map(|_| &logprobs[..]),
                stats,
            })?;
        }
        match reason {
            FinishReason::Interrupted => Err(Failure::run(RunError::Cancelled)),
            FinishReason::Stop | FinishReason::Length => Ok(()),
        }
    }
}

impl Output<'_> {
    /// Keeps and prints a token; breaks at the last one.
    fn take(&mut self, chosen: Chosen<'_>) -> Result<ControlFlow<()>, Failure> {
        self.generated.push(chosen.id);
        self.logprobs.extend(TokenLogprobs::new(chosen.id, chosen.logprobs));
        if self.printer.push(chosen.id)? {
            self.reason = FinishReason::Stop;
            return Ok(ControlFlow::Break(()));
        }
        if self.generated.len() == self.max_tokens {
            self.reason = FinishReason::Length;
            return Ok(ControlFlow::Break(()));
        }
        Ok(ControlFlow::Continue(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_counts_are_whole_and_within_reason() {
        assert_eq!(max_tokens("16"), Ok(16));
        for bad in ["0", "-1", "abc", "1e8", "100000000", "", "1.5"] {
            assert!(max_tokens(bad).is_err(), "{bad}");
        }
    }
}
