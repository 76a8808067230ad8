//! `k3 generate`: a prompt in, its continuation out, each token the most likely one.

use std::io::Write;
use std::path::PathBuf;

use anyhow::anyhow;
use k3_pipeline::engine::Engine;
use k3_pipeline::forward::RunError;
use k3_pipeline::session::{Prefill, Progress, Session};
use k3_pipeline::stats::Stats;
use k3_pipeline::tokenizer::{StreamDecoder, Tokenizer};
use k3_pipeline::units::TokenId;
use serde::Serialize;

use crate::engine_args::{EngineArgs, Planned};
use crate::failure::{Failure, Outcome};
use crate::logits_file::LogitsFile;
use crate::prompt_args::PromptArgs;
use crate::{interrupt, output, progress, report};

/// Tokens to generate when nothing is said.
const MAX_TOKENS: usize = 256;

/// Arguments of `k3 generate`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 generate --preset demo --ids 1,2,3 --max-tokens 16
  k3 generate --preset laptop --model ~/Kimi-K3 'The capital of France is'
  k3 generate --model DIR --prompt-file essay.txt --dump-logits logits.safetensors --json

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
    /// Write the logits of every position fed, prompt and generated, to this safetensors file: `ids` [n]
    /// I32, `logits` [n, vocabulary] F32.
    #[arg(long, value_name = "FILE")]
    dump_logits: Option<PathBuf>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// Most tokens that can be asked for.
const MAX_TOKENS_MAX: usize = 1 << 24;

fn max_tokens(text: &str) -> Result<usize, String> {
    let n = text.parse().map_err(|_| "a whole number is expected".to_owned())?;
    if (1..=MAX_TOKENS_MAX).contains(&n) { Ok(n) } else { Err(format!("must be 1 to {MAX_TOKENS_MAX}")) }
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum FinishReason {
    /// The model ended its message.
    Stop,
    /// As many tokens as asked for, or no room for more.
    Length,
    /// Ctrl-C.
    Interrupted,
}

#[derive(Serialize)]
struct Report<'a> {
    prompt_ids: &'a [TokenId],
    generated_ids: &'a [TokenId],
    text: Option<String>,
    finish_reason: FinishReason,
    stats: Stats,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> Outcome {
    let planned = args.engine.plan()?;
    let tokenizer = open_tokenizer(&planned)?;
    let vocab = planned.config.vocab;
    let prompt = args.prompt.ids(vocab, || {
        tokenizer.as_ref().ok_or_else(|| {
            Failure::refused(anyhow!("{} has no tokenizer", planned.dir.display()))
                .hint("give the prompt as token ids, as in --ids 1,2,3")
        })
    })?;
    let max_tokens = room(&planned, &prompt, args.max_tokens)?;
    let dump = args.dump_logits.as_deref().map(|path| LogitsFile::create(path, vocab)).transpose()?;

    let eos = planned.config.eos;
    let mut engine = planned.open()?;
    interrupt::listen(engine.cancel_flag())?;
    let printer = Printer::new(tokenizer.as_ref(), !args.json);
    let mut run = Run { eos, max_tokens, dump, printer, generated: Vec::with_capacity(max_tokens) };
    let outcome = run.generate(&mut engine, &prompt);
    run.finish(&engine, &prompt, outcome, args.json)
}

/// The tokenizer of the model directory; `None` where it has none.
fn open_tokenizer(planned: &Planned) -> Result<Option<Tokenizer>, Failure> {
    if planned.dir.join("tiktoken.model").exists() || planned.dir.join("tokenizer_config.json").exists() {
        Ok(Some(Tokenizer::open(&planned.dir)?))
    } else {
        Ok(None)
    }
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
    eos: TokenId,
    max_tokens: usize,
    dump: Option<LogitsFile>,
    printer: Printer<'t>,
    generated: Vec<TokenId>,
}

impl Run<'_> {
    fn generate(&mut self, engine: &mut Engine, prompt: &[TokenId]) -> Result<FinishReason, Failure> {
        let mut session = Session::new(engine);
        let Some(mut next) = self.prefill(&mut session, engine, prompt)? else {
            return Ok(FinishReason::Interrupted);
        };
        loop {
            self.generated.push(next);
            if next == self.eos {
                return Ok(FinishReason::Stop);
            }
            self.printer.push(next)?;
            if self.generated.len() == self.max_tokens {
                return Ok(FinishReason::Length);
            }
            let logits = match session.decode(engine, next) {
                Err(RunError::Cancelled) => return Ok(FinishReason::Interrupted),
                decoded => decoded?,
            };
            if let Some(dump) = &mut self.dump {
                dump.push(logits.data())?;
            }
            next = most_likely(logits.last());
        }
    }

    /// Reads the prompt and decides the first token; `None` when interrupted.
    fn prefill(
        &mut self,
        session: &mut Session,
        engine: &mut Engine,
        prompt: &[TokenId],
    ) -> Result<Option<TokenId>, Failure> {
        let mut bar = progress::Prefill::new();
        let dump = &mut self.dump;
        let all_logits = dump.is_some();
        let mut dumped = Ok(());
        let mut observe = |seen: Progress<'_>| {
            bar.show(&seen);
            if let (Some(dump), Ok(())) = (&mut *dump, &dumped) {
                dumped = dump.push(seen.logits.data());
            }
        };
        let how = Prefill { all_logits, observe: Some(&mut observe), ..Prefill::default() };
        let next = session.prefill(engine, prompt, how).map(|logits| most_likely(logits.last()));
        dumped?;
        match next {
            Err(RunError::Cancelled) => Ok(None),
            next => Ok(Some(next?)),
        }
    }

    /// Ends the text, prints the report, puts files in their places.
    fn finish(
        mut self,
        engine: &Engine,
        prompt: &[TokenId],
        outcome: Result<FinishReason, Failure>,
        json: bool,
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
        if json {
            let (prompt_ids, generated_ids) = (prompt, &self.generated[..]);
            output::print_json(&Report { prompt_ids, generated_ids, text, finish_reason: reason, stats })?;
        }
        match reason {
            FinishReason::Interrupted => Err(Failure::run(RunError::Cancelled)),
            FinishReason::Stop | FinishReason::Length => Ok(()),
        }
    }
}

/// The token with the largest logit; of equal ones the lowest.
fn most_likely(logits: Option<&[f32]>) -> TokenId {
    let logits = logits.unwrap_or_default();
    let best = (0..logits.len()).reduce(|best, i| if logits[i] > logits[best] { i } else { best });
    TokenId(best.and_then(|i| u32::try_from(i).ok()).unwrap_or_default())
}

/// Prints tokens as text, or as ids where there is no tokenizer.
struct Printer<'t> {
    tokenizer: Option<&'t Tokenizer>,
    decoder: StreamDecoder,
    streams: bool,
    text: String,
    /// Bytes of `text` that have been printed.
    printed: usize,
    tokens: usize,
}

impl<'t> Printer<'t> {
    fn new(tokenizer: Option<&'t Tokenizer>, streams: bool) -> Self {
        Self { tokenizer, decoder: StreamDecoder::new(), streams, text: String::new(), printed: 0, tokens: 0 }
    }

    fn push(&mut self, id: TokenId) -> Outcome {
        match self.tokenizer {
            Some(tokenizer) => self.decoder.push(tokenizer.token_bytes(id)?, &mut self.text),
            None => {
                let comma = if self.tokens == 0 { "" } else { "," };
                self.text.push_str(&format!("{comma}{id}"));
            }
        }
        self.tokens += 1;
        self.print()
    }

    fn print(&mut self) -> Outcome {
        if self.streams && self.printed < self.text.len() {
            let mut out = std::io::stdout().lock();
            out.write_all(&self.text.as_bytes()[self.printed..])?;
            out.flush()?;
            self.printed = self.text.len();
        }
        Ok(())
    }

    /// Ends the text; gives it where there is a tokenizer.
    fn finish(&mut self) -> Result<Option<String>, Failure> {
        self.decoder.finish(&mut self.text);
        if self.streams {
            self.text.push('\n');
        }
        self.print()?;
        Ok(self.tokenizer.map(|_| std::mem::take(&mut self.text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_equal_logits_the_lowest_id_is_taken() {
        assert_eq!(most_likely(Some(&[1.0, 3.0, 3.0, -1.0])), TokenId(1));
        assert_eq!(most_likely(Some(&[-2.0])), TokenId(0));
    }

    #[test]
    fn token_counts_are_whole_and_within_reason() {
        assert_eq!(max_tokens("16"), Ok(16));
        for bad in ["0", "-1", "abc", "1e8", "100000000", "", "1.5"] {
            assert!(max_tokens(bad).is_err(), "{bad}");
        }
    }
}
