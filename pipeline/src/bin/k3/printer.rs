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
    /// Bytes of `text` that were given out before this printer's time.
    given: usize,
    /// Bytes of `text` that have been printed, those among them.
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
            given: 0,
            printed: 0,
            tokens: 0,
        }
    }

    /// Goes on after `output`, of whose text the first `given` bytes have been given out. What waited at its
    /// end (half a character, the beginning of a stop text) waits again. A stop within it ended an earlier
    /// run, not this one.
    pub(crate) fn resume(&mut self, output: &[TokenId], given: usize) -> Outcome {
        if self.tokenizer.is_some() {
            let stop = self.stop.clone();
            for id in output {
                if self.take(*id)? {
                    self.end_text();
                    self.stop = stop.clone();
                }
            }
            (self.given, self.printed) = (given, given);
        }
        Ok(())
    }

    /// Bytes of text given out so far, by this printer or before its time.
    pub(crate) fn given(&self) -> usize {
        self.tokenizer.map_or(0, |_| self.given.max(self.text.len()))
    }

    /// Takes a token; `true` where the answer stops at it.
    pub(crate) fn push(&mut self, id: TokenId) -> Result<bool, Failure> {
        let stopped = self.take(id)?;
        self.print()?;
        Ok(stopped)
    }

    fn take(&mut self, id: TokenId) -> Result<bool, Failure> {
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

    /// Nothing follows: what waited is part of the text.
    pub(crate) fn end_text(&mut self) {
        self.decoder.finish(&mut self.fresh);
        self.stop.push(&self.fresh, &mut self.text);
        self.fresh.clear();
        self.stop.finish(&mut self.text);
    }

    /// Prints the rest; gives this printer's part of the text where there is a tokenizer.
    pub(crate) fn finish(&mut self) -> Result<Option<String>, Failure> {
        self.print()?;
        if self.streams {
            let mut out = std::io::stdout().lock();
            out.write_all(b"\n")?;
            out.flush()?;
        }
        let from = self.text.floor_char_boundary(self.given);
        Ok(self.tokenizer.map(|_| self.text.split_off(from)))
    }
}
