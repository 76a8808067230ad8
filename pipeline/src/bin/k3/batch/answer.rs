//! The answer to one request, as it grows and as a line of the output.

use std::ops::ControlFlow;

use k3_pipeline::conversation::Listener;
use k3_pipeline::generation::Chosen;
use k3_pipeline::units::TokenId;
use serde::Serialize;
use serde_json::Value;

use crate::failure::Failure;
use crate::printer::{FinishReason, Printer, ReportedCall, TokenLogprobs};

/// What makes text of the tokens.
pub(super) enum Text<'t> {
    Plain(Box<Printer<'t>>),
    Chat(Box<Listener<'t>>),
}

/// Which request, in the words of its sender.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Name {
    /// Number of its line, from 1.
    pub(super) line: u64,
    /// What it calls itself.
    pub(super) id: Option<Value>,
}

/// An answer under way.
pub(super) struct Answer<'t> {
    name: Name,
    prompt_tokens: usize,
    text: Text<'t>,
    ids: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
    reason: FinishReason,
}

/// A result as a line of the output.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    name: &'a Name,
    prompt_tokens: usize,
    generated_ids: &'a [TokenId],
    /// `None` where the model has no tokenizer.
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ReportedCall<'a>>,
    finish_reason: FinishReason,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    logprobs: &'a [TokenLogprobs],
}

impl<'t> Answer<'t> {
    pub(super) fn new(name: Name, prompt_tokens: usize, text: Text<'t>) -> Self {
        let (ids, logprobs) = (Vec::new(), Vec::new());
        Self { name, prompt_tokens, text, ids, logprobs, reason: FinishReason::Length }
    }

    pub(super) fn name(&self) -> &Name {
        &self.name
    }

    /// Takes a token; breaks where the answer stops.
    pub(super) fn take(&mut self, chosen: Chosen<'_>) -> Result<ControlFlow<()>, Failure> {
        self.ids.push(chosen.id);
        self.logprobs.extend(TokenLogprobs::new(chosen.id, chosen.logprobs));
        let stopped = match &mut self.text {
            Text::Plain(printer) => printer.push(chosen.id)?,
            Text::Chat(listener) => listener.take(chosen, &mut |_| ())?.is_break(),
        };
        if !stopped {
            return Ok(ControlFlow::Continue(()));
        }
        self.reason = FinishReason::Stop;
        Ok(ControlFlow::Break(()))
    }

    /// Ends the answer; `true`: in the middle. Gives its line.
    pub(super) fn finish(mut self, is_interrupted: bool) -> Result<String, Failure> {
        if is_interrupted {
            self.reason = FinishReason::Interrupted;
        }
        let report = |text, thinking, tool_calls| Report {
            name: &self.name,
            prompt_tokens: self.prompt_tokens,
            generated_ids: &self.ids,
            text,
            thinking,
            tool_calls,
            finish_reason: self.reason,
            logprobs: &self.logprobs,
        };
        let line = match self.text {
            Text::Plain(mut printer) => {
                printer.end_text();
                serde_json::to_string(&report(printer.finish()?, None, Vec::new()))
            }
            Text::Chat(listener) => {
                let (heard, _) = listener.finish(self.prompt_tokens, &mut |_| ())?;
                let calls = heard.calls.iter().map(ReportedCall::new).collect();
                serde_json::to_string(&report(Some(heard.response), Some(&heard.thinking), calls))
            }
        };
        line.map_err(Failure::run)
    }
}
