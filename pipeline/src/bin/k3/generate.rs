//! `k3 generate`: a prompt in, its continuation out.

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

use crate::engine_args::{EngineArgs, Planned};
use crate::failure::{Failure, Outcome};
use crate::logits_file::LogitsFile;
use crate::printer::{FinishReason, Printer, TokenLogprobs};
use crate::progress::Bar;
use crate::prompt_args::PromptArgs;
use crate::sampling_args::{SamplingArgs, StopArgs};
use crate::{interrupt, output, report};

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

The text goes to stdout as it is decided, the report to stderr. A model directory without a
tokenizer takes and gives token ids.")]
pub(crate) struct Args {
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    stop: StopArgs,
    /// Most tokens to generate; without it, 256 or what the context has room for.
    #[arg(long, value_name = "N", value_parser = max_tokens, allow_hyphen_values = true)]
    max_tokens: Option<usize>,
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
    generated_ids: &'a [TokenId],
    text: Option<String>,
    finish_reason: FinishReason,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<&'a [TokenLogprobs]>,
    stats: Stats,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> Outcome {
    let planned = args.engine.plan()?;
    let tokenizer = planned.tokenizer()?;
    let vocab = planned.config.vocab;
    let prompt = args.prompt.ids(vocab, || {
        tokenizer.as_ref().ok_or_else(|| {
            Failure::refused(anyhow!("{} has no tokenizer", planned.dir.display()))
                .hint("give the prompt as token ids, as in --ids 1,2,3")
        })
    })?;
    let max_tokens = room(&planned, &prompt, args.max_tokens)?;
    let dump = args.dump_logits.as_deref().map(|path| LogitsFile::create(path, vocab)).transpose()?;

    let params = args.sampling.params(0.0, args.logprobs);
    let mut generator = args.sampling.generator(params, vocab, false)?;
    let stop = args.stop.matcher(vocab, planned.config.eos)?;
    if args.stop.has_strings() && tokenizer.is_none() {
        return Err(Failure::refused(anyhow!(
            "--stop needs text, and {} has no tokenizer",
            planned.dir.display()
        ))
        .hint("stop at token ids with --stop-id"));
    }
    let mut engine = planned.open()?;
    interrupt::listen(engine.cancel_flag())?;
    let printer = Printer::new(tokenizer.as_ref(), stop, !args.json);
    let generated = Vec::with_capacity(max_tokens);
    let mut run =
        Run { max_tokens, dump, printer, generated, logprobs: Vec::new(), reason: FinishReason::Length };
    let outcome = run.generate(&mut generator, &mut engine, &prompt);
    run.finish(&engine, &prompt, outcome, args)
}

/// Tokens to generate. The last of them is decided, not fed.
fn room(planned: &Planned, prompt: &[TokenId], wanted: Option<usize>) -> Result<usize, Failure> {
    let context = planned.plan.context_tokens;
    let room = (context + 1).saturating_sub(prompt.len());
    let hint = "raise `context.tokens` with --set, or give less";
    if room == 0 {
        let have = prompt.len();
        return Err(
            Failure::refused(anyhow!("the prompt has {have} tokens, the context holds {context}")).hint(hint)
        );
    }
    match wanted {
        None => Ok(MAX_TOKENS.min(room)),
        Some(n) if n <= room => Ok(n),
        Some(n) => Err(Failure::refused(anyhow!(
            "{} prompt tokens and {n} more do not fit in a context of {context}",
            prompt.len()
        ))
        .hint(hint)),
    }
}

/// A generation under way.
struct Run<'t> {
    max_tokens: usize,
    dump: Option<LogitsFile>,
    printer: Printer<'t>,
    generated: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
    /// Why [`Run::take`] ended.
    reason: FinishReason,
}

impl Run<'_> {
    fn generate(
        &mut self,
        generator: &mut Generator,
        engine: &mut Engine,
        prompt: &[TokenId],
    ) -> Result<FinishReason, Failure> {
        let mut session = Session::new(engine);
        generator.sampler_mut().begin(prompt)?;
        let mut flow = match self.prefill(generator, &mut session, engine, prompt)? {
            Some(flow) => flow,
            None => return Ok(FinishReason::Interrupted),
        };
        while let ControlFlow::Continue(decided) = flow {
            let mut emit = |chosen: Chosen<'_>| {
                if let Some(dump) = &mut self.dump {
                    dump.push(chosen.row)?;
                }
                self.take(chosen)
            };
            flow = match generator.step(engine, &mut session, decided, &mut emit) {
                Err(failure) if failure.is::<RunError>(|e| matches!(e, RunError::Cancelled)) => {
                    return Ok(FinishReason::Interrupted);
                }
                flow => flow?,
            };
        }
        Ok(self.reason)
    }

    /// Reads the prompt and decides the first token; `None` when interrupted.
    fn prefill(
        &mut self,
        generator: &mut Generator,
        session: &mut Session,
        engine: &mut Engine,
        prompt: &[TokenId],
    ) -> Result<Option<ControlFlow<TokenId, TokenId>>, Failure> {
        let bar = Bar::prompt();
        let dump = &mut self.dump;
        let all_logits = dump.is_some();
        let mut dumped = Ok(());
        let mut observe = |seen: Progress<'_>| {
            bar.show_prompt(&seen);
            if let (Some(dump), Ok(())) = (&mut *dump, &dumped) {
                dumped = dump.push(seen.logits.data());
            }
        };
        let how = Prefill { all_logits, observe: Some(&mut observe), ..Prefill::default() };
        let logits = session.prefill(engine, prompt, how);
        dumped?;
        let logits = match logits {
            Err(RunError::Cancelled) => return Ok(None),
            logits => logits?,
        };
        let chosen = generator.first(logits.last().unwrap_or_default())?;
        let id = chosen.id;
        Ok(Some(self.take(chosen)?.map_break(|()| id).map_continue(|()| id)))
    }

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

    /// Ends the text, prints the report, puts files in their places.
    fn finish(
        mut self,
        engine: &Engine,
        prompt: &[TokenId],
        outcome: Result<FinishReason, Failure>,
        args: &Args,
    ) -> Outcome {
        let reason = match outcome {
            Ok(reason) => reason,
            Err(failure) => {
                report::print(&engine.stats());
                return Err(failure);
            }
        };
        let printed = self.printer.finish();
        let stats = engine.stats();
        report::print(&stats);
        if let Some(dump) = self.dump {
            let fed: Vec<TokenId> = prompt.iter().chain(&self.generated).copied().collect();
            dump.finish(&fed)?;
        }
        let text = printed?;
        if args.json {
            output::print_json(&Report {
                prompt_ids: prompt,
                generated_ids: &self.generated,
                text,
                finish_reason: reason,
                logprobs: args.logprobs.map(|_| &self.logprobs[..]),
                stats,
            })?;
        }
        match reason {
            FinishReason::Interrupted => Err(Failure::run(RunError::Cancelled)),
            FinishReason::Stop | FinishReason::Length => Ok(()),
        }
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
