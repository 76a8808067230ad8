//! A chat request as the segments that are encoded one by one.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::json;
use super::parse::Channel;
use super::request::{Arguments, ChatRequest, Message, ResponseFormat, ToolCall, ToolChoice};

/// Opens a tag.
pub const OPEN: &str = "<|open|>";
/// Closes a tag.
pub const CLOSE: &str = "<|close|>";
/// Ends a tag's header.
pub const SEP: &str = "<|sep|>";
/// Ends a message; generation stops on it.
pub const END_OF_MESSAGE: &str = "<|end_of_msg|>";

/// Where a content has an image.
const IMAGE_PLACEHOLDER: &str = "<|kimi_image_placeholder|>";

/// A piece of the prompt. Each is encoded on its own: a control segment with special tokens
/// recognised, every other as ordinary text, so that text which spells a control token stays text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its text; never empty.
    pub text: Cow<'static, str>,
    /// Whether special tokens are recognised in it.
    pub control: bool,
}

/// Why a request cannot be put into the format.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// `arguments` is a text that is not a JSON object.
    #[error("messages[{message}]: the arguments of the call of {tool:?} are not a JSON object: {source}")]
    Arguments {
        /// Index of the message.
        message: usize,
        /// The tool.
        tool: String,
        /// The JSON reader's reason.
        source: serde_json::Error,
    },
    /// A result for a call that was not made.
    #[error("messages[{message}]: tool_call_id {id:?} is not a call of the last assistant message")]
    UnknownCall {
        /// Index of the message.
        message: usize,
        /// The id.
        id: String,
    },
    /// Two results for one call.
    #[error("messages[{message}]: a second result for tool_call_id {id:?}")]
    SecondResult {
        /// Index of the message.
        message: usize,
        /// The id.
        id: String,
    },
    /// A result that says neither its call nor its tool.
    #[error("messages[{message}]: a tool result needs tool_call_id or tool")]
    NamelessResult {
        /// Index of the message.
        message: usize,
    },
    /// A result that names another tool than its call does.
    #[error("messages[{message}]: the result is from {found:?}, but call {id:?} is of {expected:?}")]
    OtherTool {
        /// Index of the message.
        message: usize,
        /// The call.
        id: String,
        /// The call's tool.
        expected: String,
        /// The result's tool.
        found: String,
    },
    /// A tool must be called and none is there.
    #[error("tool_choice is required, but no tools are declared")]
    NoTools,
    /// The number of image prompts is not that of the placeholders.
    #[error("{prompts} image prompts for {placeholders} image placeholders in the messages")]
    Images {
        /// Given.
        prompts: usize,
        /// Found.
        placeholders: usize,
    },
    /// A JSON value could not be spelt.
    #[error("cannot write JSON: {source}")]
    Json {
        /// The writer's reason.
        source: serde_json::Error,
    },
}

/// Puts a request into the format.
///
/// The order is: declared tools, thinking effort, the messages (tool results in the order of their
/// calls), the tool choice, the response format, the opening of the answer. Earlier answers always
/// have a thinking channel, empty where nothing was thought.
///
/// # Errors
/// A request that contradicts itself; see [`RequestError`].
pub fn segments(request: &ChatRequest) -> Result<Vec<Segment>, RequestError> {
    let mut writer = Writer { segments: Vec::new(), images: Images::of(request)? };
    if !request.tools.is_empty() {
        let tools = request.tools.iter().cloned().map(Value::Object).collect();
        writer.notice("tool-declare", &declaration(tools)?);
    }
    if let Some(effort) = request.thinking_effort.filter(|_| request.thinking) {
        writer.notice(
            "thinking-effort",
            &format!(
                "`thinking_effort` guides on how much to think in your thinking channel (not including the \
                 response channel), supported values include `low`, `medium`, `high`, and `max`.\n\
                 Now the system is invoked with `thinking_effort={}`.",
                effort.as_str()
            ),
        );
    }
    writer.messages(&request.messages)?;
    if request.tool_choice == ToolChoice::Required {
        if request.tools.is_empty() {
            return Err(RequestError::NoTools);
        }
        writer.notice(
            "tool-choice",
            "The system is invoked with `tool_choice=required`.\n\
             You MUST call tools in the next message.",
        );
    }
    if let ResponseFormat::JsonSchema { json_schema } = &request.response_format {
        writer.notice("response-format", &schema_notice(json_schema.schema.clone())?);
    }
    if request.add_generation_prompt {
        writer.open("message", &[("role", "assistant")]);
        writer.open(if request.thinking { "think" } else { "response" }, &[]);
    }
    Ok(writer.segments)
}

/// Ends an answer whose text stands in `channel`.
pub(super) fn closing(channel: Channel) -> Vec<Segment> {
    let mut writer = Writer { segments: Vec::new(), images: Images { prompts: Vec::new().into_iter() } };
    if channel == Channel::Thinking {
        writer.close("think");
        writer.open("response", &[]);
    }
    writer.close("response");
    writer.end_message();
    writer.segments
}

fn declaration(tools: Value) -> Result<String, RequestError> {
    let json = json::compact_sorted(tools).map_err(|source| RequestError::Json { source })?;
    Ok(format!("# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{json}\n```"))
}

fn schema_notice(schema: Map<String, Value>) -> Result<String, RequestError> {
    let json = json::compact_sorted(Value::Object(schema)).map_err(|source| RequestError::Json { source })?;
    Ok(format!(
        "The system is invoked with `response_format=json_schema`.\n\
         Your response must be raw JSON data without markdown code blocks (```json) or any additional \
         formatting.\nThe JSON data must match the following schema:\n```json\n{json}\n```"
    ))
}

/// The image prompts that are still to be placed.
struct Images {
    prompts: std::vec::IntoIter<String>,
}

impl Images {
    /// Either every placeholder has its prompt, or there are no prompts and placeholders are text.
    fn of(request: &ChatRequest) -> Result<Self, RequestError> {
        let content = |message: &Message| match message {
            Message::System { content, .. }
            | Message::User { content, .. }
            | Message::Tool { content, .. } => content.matches(IMAGE_PLACEHOLDER).count(),
            Message::Assistant { .. } => 0,
        };
        let (prompts, placeholders) =
            (request.image_prompts.len(), request.messages.iter().map(content).sum());
        if prompts != 0 && prompts != placeholders {
            return Err(RequestError::Images { prompts, placeholders });
        }
        Ok(Self { prompts: request.image_prompts.clone().into_iter() })
    }
}

struct Writer {
    segments: Vec<Segment>,
    images: Images,
}

impl Writer {
    fn push(&mut self, text: impl Into<Cow<'static, str>>, control: bool) {
        let text = text.into();
        if !text.is_empty() {
            self.segments.push(Segment { text, control });
        }
    }

    fn text(&mut self, text: &str) {
        self.push(text.to_owned(), false);
    }

    fn open(&mut self, tag: &'static str, attributes: &[(&'static str, &str)]) {
        self.push(OPEN, true);
        self.push(tag, false);
        for (key, value) in attributes {
            self.push(format!(" {key}"), false);
            self.push("=\"", false);
            self.push(value.replace('&', "&amp;").replace('"', "&quot;"), false);
            self.push("\"", false);
        }
        self.push(SEP, true);
    }

    fn close(&mut self, tag: &'static str) {
        self.push(CLOSE, true);
        self.push(tag, false);
        self.push(SEP, true);
    }

    fn end_message(&mut self) {
        self.close("message");
        self.push(END_OF_MESSAGE, true);
    }

    /// A system message of the format's own.
    fn notice(&mut self, kind: &str, text: &str) {
        self.open("message", &[("role", "system"), ("type", kind)]);
        self.text(text);
        self.end_message();
    }

    fn channel(&mut self, tag: &'static str, text: &str) {
        self.open(tag, &[]);
        self.text(text);
        self.close(tag);
    }

    /// A content in which placeholders become the next image prompts.
    fn content(&mut self, content: &str) {
        let mut rest = content;
        while let Some((before, after)) = rest.split_once(IMAGE_PLACEHOLDER) {
            let Some(prompt) = self.images.prompts.next() else { break };
            self.text(before);
            self.push(prompt, true);
            rest = after;
        }
        self.text(rest);
    }

    fn spoken(&mut self, role: &str, name: Option<&str>, content: &str) {
        self.open_spoken(role, name);
        self.content(content);
        self.end_message();
    }

    fn open_spoken(&mut self, role: &str, name: Option<&str>) {
        match name {
            Some(name) => self.open("message", &[("role", role), ("name", name)]),
            None => self.open("message", &[("role", role)]),
        }
    }

    fn messages(&mut self, messages: &[Message]) -> Result<(), RequestError> {
        let mut calls: &[ToolCall] = &[];
        let mut index = 0;
        while let Some(message) = messages.get(index) {
            match message {
                Message::System { content, name } => self.spoken("system", name.as_deref(), content),
                Message::User { content, name } => self.spoken("user", name.as_deref(), content),
                Message::Assistant { content, name, reasoning_content, tool_calls } => {
                    calls = tool_calls;
                    self.open_spoken("assistant", name.as_deref());
                    self.channel("think", reasoning_content.as_deref().unwrap_or_default());
                    self.channel("response", content.as_deref().unwrap_or_default());
                    self.calls(index, tool_calls)?;
                    self.end_message();
                }
                Message::Tool { .. } => {
                    let run =
                        messages[index..].iter().take_while(|m| matches!(m, Message::Tool { .. })).count();
                    self.results(index, &messages[index..index + run], calls)?;
                    index += run;
                    continue;
                }
            }
            index += 1;
        }
        Ok(())
    }

    fn calls(&mut self, message: usize, calls: &[ToolCall]) -> Result<(), RequestError> {
        if calls.is_empty() {
            return Ok(());
        }
        self.open("tools", &[]);
        for (call, number) in calls.iter().zip(1_usize..) {
            let tool = &call.function.name;
            self.open("call", &[("tool", tool), ("index", &number.to_string())]);
            for (key, value) in &*arguments(message, call)? {
                self.argument(key, value)?;
            }
            self.close("call");
        }
        self.close("tools");
        Ok(())
    }

    fn argument(&mut self, key: &str, value: &Value) -> Result<(), RequestError> {
        let kind = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        self.open("argument", &[("key", key), ("type", kind)]);
        match value {
            Value::String(text) => self.text(text),
            other => self.push(json::spaced(other).map_err(|source| RequestError::Json { source })?, false),
        }
        self.close("argument");
        Ok(())
    }

    /// A run of tool results in the order of their calls; one without a call is numbered by its
    /// place in the run.
    fn results(&mut self, first: usize, run: &[Message], calls: &[ToolCall]) -> Result<(), RequestError> {
        let mut results: Vec<(usize, &str, &str)> = Vec::with_capacity(run.len());
        for (at, message) in run.iter().enumerate() {
            let Message::Tool { content, tool_call_id, tool } = message else { continue };
            let (number, tool) =
                number_result(first + at, at, tool_call_id.as_deref(), tool.as_deref(), calls)?;
            if let Some(id) = tool_call_id.as_ref().filter(|_| results.iter().any(|r| r.0 == number)) {
                return Err(RequestError::SecondResult { message: first + at, id: id.clone() });
            }
            results.push((number, tool, content));
        }
        results.sort_by_key(|(number, ..)| *number);
        for (number, tool, content) in results {
            self.open("message", &[("role", "tool"), ("tool", tool), ("index", &number.to_string())]);
            self.content(content);
            self.end_message();
        }
        Ok(())
    }
}

/// The number, from 1, and the tool of a result.
fn number_result<'a>(
    message: usize,
    place: usize,
    id: Option<&str>,
    tool: Option<&'a str>,
    calls: &'a [ToolCall],
) -> Result<(usize, &'a str), RequestError> {
    let Some(id) = id else {
        return Ok((place + 1, tool.ok_or(RequestError::NamelessResult { message })?));
    };
    let Some(index) = calls.iter().position(|call| call.id.as_deref() == Some(id)) else {
        return Err(RequestError::UnknownCall { message, id: id.to_owned() });
    };
    let expected = calls[index].function.name.as_str();
    match tool.filter(|found| *found != expected) {
        None => Ok((index + 1, expected)),
        Some(found) => Err(RequestError::OtherTool {
            message,
            id: id.to_owned(),
            expected: expected.to_owned(),
            found: found.to_owned(),
        }),
    }
}

fn arguments(message: usize, call: &ToolCall) -> Result<Cow<'_, Map<String, Value>>, RequestError> {
    match &call.function.arguments {
        Arguments::Object(map) => Ok(Cow::Borrowed(map)),
        Arguments::Text(text) if text.is_empty() => Ok(Cow::Owned(Map::new())),
        Arguments::Text(text) => serde_json::from_str(text)
            .map(Cow::Owned)
            .map_err(|source| RequestError::Arguments { message, tool: call.function.name.clone(), source }),
    }
}
