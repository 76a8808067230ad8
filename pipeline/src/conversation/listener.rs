//! Tokens of one answer to what is heard of them.

use std::ops::ControlFlow;

use super::{Answer, ConversationError, Ended, Heard};
use crate::chat::{CalledTool, ChatEvent, ChatStream};
use crate::generation::Chosen;
use crate::sample::StopMatcher;
use crate::tokenizer::{StreamDecoder, Tokenizer};
use crate::units::TokenId;

/// What makes text of tokens.
pub enum Ear<'t> {
    /// Thinking, response and calls, as the chat format has them.
    Chat(ChatStream<'t>),
    /// Text alone.
    Plain(&'t Tokenizer, StreamDecoder),
}

/// Takes the tokens of one answer.
pub struct Listener<'t> {
    ear: Ear<'t>,
    stop: StopMatcher,
    most: usize,
    ids: Vec<TokenId>,
    events: Vec<ChatEvent>,
    thinking: String,
    response: String,
    calls: Vec<CalledTool>,
    /// Why the answer ended, so far as is known.
    pub(super) ended: Ended,
}

impl<'t> Listener<'t> {
    /// Nothing heard yet; the answer ends at `stop` or with `most` tokens.
    #[must_use]
    pub fn new(ear: Ear<'t>, stop: StopMatcher, most: usize) -> Self {
        Self {
            ear,
            stop,
            most,
            ids: Vec::new(),
            events: Vec::new(),
            thinking: String::new(),
            response: String::new(),
            calls: Vec::new(),
            ended: Ended::Length,
        }
    }

    /// Takes a token and tells `hear` what it brings; breaks where the answer ends.
    ///
    /// # Errors
    /// An id that the vocabulary does not have.
    pub fn take(
        &mut self,
        chosen: Chosen<'_>,
        hear: &mut dyn FnMut(Heard<'_>),
    ) -> Result<ControlFlow<()>, ConversationError> {
        let id = chosen.id;
        let is_end = matches!(&self.ear, Ear::Chat(stream) if id == stream.end_of_message());
        if self.stop.is_stop(id) && !is_end {
            self.ended = Ended::Stop;
            return Ok(ControlFlow::Break(()));
        }
        self.ids.push(id);
        match &mut self.ear {
            Ear::Chat(stream) => stream.push(id, &mut self.events)?,
            // Special tokens are no text.
            Ear::Plain(tokenizer, _) if tokenizer.is_special(id) => {}
            Ear::Plain(tokenizer, decoder) => {
                let mut text = String::new();
                decoder.push(tokenizer.token_bytes(id)?, &mut text);
                self.events.push(ChatEvent::Response(text));
            }
        }
        self.ended = match self.drain(hear) {
            Some(ended) => ended,
            None if self.ids.len() >= self.most => Ended::Length,
            None => return Ok(ControlFlow::Continue(())),
        };
        Ok(ControlFlow::Break(()))
    }

    /// Passes on what came; says why the answer ended, where it did.
    fn drain(&mut self, hear: &mut dyn FnMut(Heard<'_>)) -> Option<Ended> {
        let mut ended = None;
        for event in std::mem::take(&mut self.events) {
            match event {
                ChatEvent::Thinking(text) => {
                    hear(Heard::Thinking(&text));
                    self.thinking.push_str(&text);
                }
                ChatEvent::Response(text) => {
                    let from = self.response.len();
                    if self.stop.push(&text, &mut self.response) {
                        ended = Some(Ended::Stop);
                    }
                    self.say_response(from, hear);
                }
                ChatEvent::ToolCallStart { .. } => {}
                ChatEvent::ToolCall(call) => {
                    hear(Heard::ToolCall(&call));
                    self.calls.push(call);
                }
                ChatEvent::End => ended = ended.or(Some(Ended::Whole)),
            }
        }
        ended
    }

    fn say_response(&self, from: usize, hear: &mut dyn FnMut(Heard<'_>)) {
        if self.response.len() > from {
            hear(Heard::Response(&self.response[from..]));
        }
    }

    /// Ends the answer; gives its tokens, closed as the format wants it.
    ///
    /// # Errors
    /// Only if the tokenizer fails.
    pub fn finish(
        mut self,
        prompt_tokens: usize,
        hear: &mut dyn FnMut(Heard<'_>),
    ) -> Result<(Answer, Vec<TokenId>), ConversationError> {
        let tokens = self.ids.len();
        match &mut self.ear {
            Ear::Chat(stream) => {
                if self.ended != Ended::Whole {
                    self.ids.extend(stream.closing()?);
                }
                stream.finish(&mut self.events);
            }
            Ear::Plain(_, decoder) => {
                let mut text = String::new();
                decoder.finish(&mut text);
                self.events.push(ChatEvent::Response(text));
            }
        }
        self.drain(hear);
        let from = self.response.len();
        self.stop.finish(&mut self.response);
        self.say_response(from, hear);
        let answer = Answer {
            thinking: self.thinking,
            response: self.response,
            calls: self.calls,
            ended: self.ended,
            prompt_tokens,
            tokens,
        };
        Ok((answer, self.ids))
    }
}
