//! The ear of a conversation: tokens of one answer to what is heard of them.

use std::ops::ControlFlow;

use super::{Answer, ConversationError, Ended, Heard};
use crate::chat::{CalledTool, ChatEvent, ChatStream};
use crate::generation::Chosen;
use crate::sample::StopMatcher;
use crate::tokenizer::{StreamDecoder, Tokenizer};
use crate::units::TokenId;

/// What makes text of tokens.
pub(super) enum Ear<'t> {
    Chat(ChatStream<'t>),
    Plain(&'t Tokenizer, StreamDecoder),
}

/// Takes the tokens of one answer.
pub(super) struct Listener<'t, 'h> {
    ear: Ear<'t>,
    stop: StopMatcher,
    most: usize,
    hear: &'h mut dyn FnMut(Heard<'_>),
    ids: Vec<TokenId>,
    events: Vec<ChatEvent>,
    thinking: String,
    response: String,
    calls: Vec<CalledTool>,
    pub(super) ended: Ended,
}

impl<'t, 'h> Listener<'t, 'h> {
    pub(super) fn new(
        ear: Ear<'t>,
        stop: StopMatcher,
        most: usize,
        hear: &'h mut dyn FnMut(Heard<'_>),
    ) -> Self {
        Self {
            ear,
            stop,
            most,
            hear,
            ids: Vec::new(),
            events: Vec::new(),
            thinking: String::new(),
            response: String::new(),
            calls: Vec::new(),
            ended: Ended::Length,
        }
    }

    /// Takes a token; breaks where the answer ends.
    pub(super) fn take(&mut self, chosen: Chosen<'_>) -> Result<ControlFlow<()>, ConversationError> {
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
        self.ended = match self.drain() {
            Some(ended) => ended,
            None if self.ids.len() >= self.most => Ended::Length,
            None => return Ok(ControlFlow::Continue(())),
        };
        Ok(ControlFlow::Break(()))
    }

    /// Passes on what came; says why the answer ended, where it did.
    fn drain(&mut self) -> Option<Ended> {
        let mut ended = None;
        for event in std::mem::take(&mut self.events) {
            match event {
                ChatEvent::Thinking(text) => {
                    (self.hear)(Heard::Thinking(&text));
                    self.thinking.push_str(&text);
                }
                ChatEvent::Response(text) => {
                    let from = self.response.len();
                    if self.stop.push(&text, &mut self.response) {
                        ended = Some(Ended::Stop);
                    }
                    self.say_response(from);
                }
                ChatEvent::ToolCallStart { .. } => {}
                ChatEvent::ToolCall(call) => {
                    (self.hear)(Heard::ToolCall(&call));
                    self.calls.push(call);
                }
                ChatEvent::End => ended = ended.or(Some(Ended::Whole)),
            }
        }
        ended
    }

    fn say_response(&mut self, from: usize) {
        if self.response.len() > from {
            (self.hear)(Heard::Response(&self.response[from..]));
        }
    }

    /// Ends the answer; gives its tokens, closed as the format wants it.
    pub(super) fn finish(
        mut self,
        prompt_tokens: usize,
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
        self.drain();
        let from = self.response.len();
        self.stop.finish(&mut self.response);
        self.say_response(from);
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
