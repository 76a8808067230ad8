//! A line of the input: one request.

use std::collections::BTreeMap;

use anyhow::anyhow;
use k3_pipeline::chat::{ChatFormat, ChatRequest, Message, ResponseFormat, ThinkingEffort, ToolChoice};
use k3_pipeline::conversation::{Ear, Listener};
use k3_pipeline::sample::{SamplingParams, StopMatcher};
use k3_pipeline::tokenizer::Tokenizer;
use k3_pipeline::units::TokenId;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::answer::Text;
use crate::failure::Failure;
use crate::printer::Printer;

/// A request as it stands in its line. What is left out is as the command line has it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Request {
    /// A text or a number that names it in its result.
    #[serde(default)]
    pub(super) id: Option<Value>,
    prompt: Option<String>,
    ids: Option<Vec<u32>>,
    messages: Option<Vec<Message>>,
    tools: Option<Vec<Map<String, Value>>>,
    tool_choice: Option<ToolChoice>,
    response_format: Option<ResponseFormat>,
    thinking: Option<bool>,
    thinking_effort: Option<ThinkingEffort>,
    pub(super) max_tokens: Option<usize>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<BTreeMap<TokenKey, f32>>,
    seed: Option<u64>,
    stop: Option<Vec<String>>,
    stop_ids: Option<Vec<u32>>,
    logprobs: Option<usize>,
}

/// What a line holds.
const EXPECTED: &str = "an object with prompt, ids or messages, as `k3 batch --help` shows";

/// A token id as the key of an object.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
struct TokenKey(u32);

impl TryFrom<String> for TokenKey {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse().map(Self).map_err(|_| format!("logit_bias: {text:?} is not a token id"))
    }
}

/// The id of a line that may be no request.
pub(super) fn id_of(line: &str) -> Option<Value> {
    serde_json::from_str::<Value>(line).ok()?.get("id").filter(|id| is_id(id)).cloned()
}

fn is_id(id: &Value) -> bool {
    id.is_string() || id.is_number()
}

impl Request {
    /// Reads the line of this number.
    pub(super) fn parse(number: u64, line: &str) -> Result<Self, Failure> {
        // Also so that a list is not taken for an object without its keys.
        if !line.starts_with('{') {
            let found: String = line.chars().take(20).collect();
            return Err(Failure::refused(anyhow!("line {number}: expected {EXPECTED}, found {found:?}")));
        }
        let request: Self = serde_json::from_str(line).map_err(|error| {
            // The reader counts the lines of its own text, which is one.
            let (text, column) = (error.to_string(), error.column());
            let what = text.strip_suffix(&format!(" at line 1 column {column}")).unwrap_or(&text);
            let expected = if what.contains("expected") { "" } else { &format!("; expected {EXPECTED}") };
            Failure::refused(anyhow!("line {number}, column {column}: {what}{expected}"))
        })?;
        match &request.id {
            Some(id) if !is_id(id) => {
                Err(Failure::refused(anyhow!("id: expected a text or a number, found {id}")))
            }
            _ => Ok(request),
        }
    }

    /// The parameters, from `common` where it names none.
    pub(super) fn params(&self, common: SamplingParams) -> SamplingParams {
        let bias =
            |map: &BTreeMap<TokenKey, f32>| map.iter().map(|(id, bias)| (TokenId(id.0), *bias)).collect();
        SamplingParams {
            temperature: self.temperature.unwrap_or(common.temperature),
            top_k: self.top_k.unwrap_or(common.top_k),
            top_p: self.top_p.unwrap_or(common.top_p),
            min_p: self.min_p.unwrap_or(common.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(common.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(common.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(common.frequency_penalty),
            logit_bias: self.logit_bias.as_ref().map_or(common.logit_bias, bias),
            seed: self.seed.unwrap_or(common.seed),
            logprobs: self.logprobs.or(common.logprobs),
        }
    }

    /// Stops, those of the command line where the request names none; `end` always stops.
    pub(super) fn stop(
        &self,
        (strings, ids): (&[String], &[u32]),
        (vocabulary, end): (usize, TokenId),
    ) -> Result<StopMatcher, Failure> {
        let ids = self.stop_ids.as_deref().unwrap_or(ids);
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocabulary) {
            return Err(Failure::refused(anyhow!(
                "stop id {id} is not in the vocabulary of {vocabulary} ids"
            )));
        }
        let strings = self.stop.clone().unwrap_or_else(|| strings.to_vec());
        Ok(StopMatcher::new(ids.iter().copied().map(TokenId).chain([end]).collect(), strings)?)
    }

    /// Whether a stop text is asked for.
    pub(super) fn has_stop_texts(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| !stop.is_empty())
    }

    /// The ids of the prompt, and what makes text of the answer.
    pub(super) fn prompt<'t>(
        self,
        tokenizer: Option<&'t Tokenizer>,
        stop: StopMatcher,
    ) -> Result<(Vec<TokenId>, Text<'t>), Failure> {
        let needed = |what: &str| {
            tokenizer
                .ok_or_else(|| Failure::refused(anyhow!("{what} needs a tokenizer, and the model has none")))
        };
        if self.has_stop_texts() {
            needed("stop")?;
        }
        if self.messages.is_none() && self.speaks_of_chat() {
            return Err(Failure::refused(anyhow!(
                "tools, tool_choice, response_format, thinking and thinking_effort go with messages"
            )));
        }
        let plain = |ids, stop| Ok((ids, Text::Plain(Box::new(Printer::new(tokenizer, stop, false)))));
        match (self.prompt, self.ids, self.messages) {
            (Some(text), None, None) => plain(needed("prompt")?.encode(&text)?, stop),
            (None, Some(ids), None) => plain(ids.into_iter().map(TokenId).collect(), stop),
            (None, None, Some(messages)) => {
                let format = ChatFormat::new(needed("messages")?).map_err(Failure::refused)?;
                let thinking = self.thinking.unwrap_or(true);
                let request = ChatRequest {
                    tools: self.tools.unwrap_or_default(),
                    tool_choice: self.tool_choice.unwrap_or_default(),
                    response_format: self.response_format.unwrap_or_default(),
                    thinking,
                    thinking_effort: self.thinking_effort,
                    ..ChatRequest::new(messages)
                };
                let ids = format.encode(&request).map_err(Failure::refused)?;
                let listener = Listener::new(Ear::Chat(format.stream(thinking)), stop, usize::MAX);
                Ok((ids, Text::Chat(Box::new(listener))))
            }
            _ => Err(Failure::refused(anyhow!("expected one of prompt, ids and messages"))),
        }
    }

    fn speaks_of_chat(&self) -> bool {
        self.tools.is_some()
            || self.tool_choice.is_some()
            || self.response_format.is_some()
            || self.thinking.is_some()
            || self.thinking_effort.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_request_is_refused_and_its_id_found_all_the_same() {
        let bad = [
            r#"{"id": 1"#,
            r#"{"id": "a", "prompt": "x", "promt": "y"}"#,
            r#"{"id": [1], "prompt": "x"}"#,
            r#"{"prompt": 1}"#,
            r#"{"ids": [-1]}"#,
            r#"{"ids": [1], "logit_bias": {"x": 1}}"#,
            r#"{"ids": [1], "max_tokens": -1}"#,
            "[]",
            "x",
        ];
        for line in bad {
            assert!(Request::parse(1, line).is_err(), "{line}");
        }
        let error = |line: &str| format!("{:?}", Request::parse(7, line).unwrap_err());
        assert!(error("[]").contains("line 7: expected an object with prompt, ids or messages"));
        let cut = error(bad[0]);
        assert!(cut.contains("line 7, column 8: EOF") && !cut.contains("line 1"), "{cut}");
        assert_eq!(id_of(bad[1]), Some(Value::from("a")));
        assert_eq!((id_of(bad[0]), id_of(bad[2]), id_of(bad[7])), (None, None, None));
        for line in [
            r#"{"ids": [1], "prompt": "x"}"#,
            "{}",
            r#"{"ids": [1], "thinking": true}"#,
            r#"{"prompt": "x"}"#,
        ] {
            let stop = StopMatcher::new(Vec::new(), Vec::new()).unwrap();
            assert!(Request::parse(1, line).unwrap().prompt(None, stop).is_err(), "{line}");
        }
    }

    #[test]
    fn what_a_request_leaves_out_is_as_the_command_has_it() {
        let common = SamplingParams { temperature: 0.5, top_k: 3, seed: 9, ..SamplingParams::default() };
        let request = Request::parse(1, r#"{"ids": [1], "top_k": 4, "logit_bias": {"7": -2.5}}"#).unwrap();
        let expected = SamplingParams { top_k: 4, logit_bias: vec![(TokenId(7), -2.5)], ..common.clone() };
        assert_eq!(request.params(common), expected);
    }
}
