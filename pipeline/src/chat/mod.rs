//! K3's own chat format: control tokens around channels, encoded segment by segment.
//!
//! A message is `open message role="..." sep CONTENT close message sep end_of_msg`; an answer's
//! content is the channels `think`, `response` and, with calls, `tools`. [`ChatFormat`] turns a
//! typed [`ChatRequest`] into ids; [`ChatStream`] takes an answer apart as its tokens arrive.

mod encode;
mod json;
mod parse;
mod request;
mod stream;

#[cfg(test)]
mod tests;

pub use encode::{CLOSE, END_OF_MESSAGE, OPEN, RequestError, SEP, Segment, segments};
pub use parse::{Argument, CalledTool, Channel, ChatEvent, ChatParser, Piece};
pub use request::{
    Arguments, ChatRequest, FunctionCall, JsonSchema, Message, ResponseFormat, ThinkingEffort, ToolCall,
    ToolChoice, ToolKind,
};
pub use stream::{ChatError, ChatFormat, ChatStream};
