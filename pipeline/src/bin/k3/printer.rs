//! Tokens of an answer as text, as ids, and as numbers of a report.

use std::io::Write;

use k3_pipeline::chat::CalledTool;
use k3_pipeline::sample::{Logprobs, StopMatcher};
use k3_pipeline::tokenizer::{StreamDecoder, Tokenizer};
use k3_pipeline::units::TokenId;
use serde::Serialize;

use crate::failure::{Failure, Outcome};

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FinishReason {
    /// The model ended its message, or a stop text or stop token came.
    Stop,
    /// As many tokens as asked for, or no room for more.
    Length,
    /// Ctrl-C.
    Interrupted,
}

/// Natural logarithms of probabilities at one generated token.
#[derive(Serialize)]
pub(crate) struct TokenLogprobs {
    id: TokenId,
    logprob: f64,
    /// The most likely tokens, the most likely first.
    top: Vec<(TokenId, f64)>,
}

impl TokenLogprobs {
    pub(crate) fn new(id: TokenId, from: &Logprobs) -> Option<Self> {
        Some(Self { id, logprob: from.chosen()?, top: from.top().to_vec() })
    }
}

/// A call of a tool.
#[derive(Serialize)]
pub(crate) struct ReportedCall<'a> {
    index: usize,
    name: &'a str,
    arguments: serde_json::Map<String, serde_json::Value>,
    complete: bool,
}

impl<'a> ReportedCall<'a> {
    pub(crate) fn new(call: &'a CalledTool) -> Self {
        Self {
            index: call.index,
            name: &call.name,
            arguments: call.arguments.iter().map(|a| (a.key.clone(), a.value())).collect(),
            complete: call.complete,
        }
    }
}

/// Prints tokens as text, or as ids where there is no tokenizer, up to where the answer stops.
pub(crate) struct Printer<'t> {
    tokenizer: Option<&'t Tokenizer>,
    decoder: StreamDecoder,
    stop: StopMatcher,
    streams: bool,
    /// Text that has not been through `stop`.
    fresh: String,
    text: String,
    /// Bytes of `text` that have been printed.
    printed: usize,
    tokens: usize,
}

impl<'t> Printer<'t> {
    pub(crate) fn new(tokenizer: Option<&'t Tokenizer>, stop: StopMatcher, streams: bool) -> Self {
        Self {
            tokenizer,
            decoder: StreamDecoder::new(),
            stop,
            streams,
            fresh: String::new(),
            text: String::new(),
            printed: 0,
            tokens: 0,
        }
    }

    /// Takes a token; `true` where the answer stops at it.
    pub(crate) fn push(&mut self, id: TokenId) -> Result<bool, Failure> {
        if self.stop.is_stop(id) {
            return Ok(true);
        }
        let stopped = match self.tokenizer {
            Some(tokenizer) => {
                self.decoder.push(tokenizer.token_bytes(id)?, &mut self.fresh);
                let stopped = self.stop.push(&self.fresh, &mut self.text);
                self.fresh.clear();
                stopped
            }
            None => {
                let comma = if self.tokens == 0 { "" } else { "," };
                self.text.push_str(&format!("{comma}{id}"));
                false
            }
        };
        self.tokens += 1;
        self.print()?;
        Ok(stopped)
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
    pub(crate) fn finish(&mut self) -> Result<Option<String>, Failure> {
        self.decoder.finish(&mut self.fresh);
        self.stop.push(&self.fresh, &mut self.text);
        self.stop.finish(&mut self.text);
        if self.streams {
            self.text.push('\n');
        }
        self.print()?;
        Ok(self.tokenizer.map(|_| std::mem::take(&mut self.text)))
    }
}
