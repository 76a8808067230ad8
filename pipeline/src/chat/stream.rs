//! The format over a vocabulary: requests to ids, ids to events.

use crate::tokenizer::{StreamDecoder, Tokenizer, TokenizerError};
use crate::units::TokenId;

use super::encode::{self, CLOSE, END_OF_MESSAGE, OPEN, RequestError, SEP, Segment};
use super::parse::{Channel, ChatEvent, ChatParser, Piece};
use super::request::ChatRequest;

/// Why a chat cannot be encoded or decoded.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The vocabulary was not made for chat.
    #[error("this model's tokenizer has no {missing} token: it completes text and cannot chat")]
    NoControlTokens {
        /// The first control token that is missing.
        missing: &'static str,
    },
    /// The request contradicts itself.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The tokenizer refused a text or an id.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// The chat format over one vocabulary.
#[derive(Clone, Copy, Debug)]
pub struct ChatFormat<'a> {
    tokenizer: &'a Tokenizer,
    open: TokenId,
    close: TokenId,
    sep: TokenId,
    end_of_message: TokenId,
}

impl<'a> ChatFormat<'a> {
    /// The format over `tokenizer`.
    ///
    /// # Errors
    /// A vocabulary without the control tokens.
    pub fn new(tokenizer: &'a Tokenizer) -> Result<Self, ChatError> {
        let id =
            |content| tokenizer.special_id(content).ok_or(ChatError::NoControlTokens { missing: content });
        Ok(Self {
            tokenizer,
            open: id(OPEN)?,
            close: id(CLOSE)?,
            sep: id(SEP)?,
            end_of_message: id(END_OF_MESSAGE)?,
        })
    }

    /// The token that ends an answer.
    #[must_use]
    pub fn end_of_message(&self) -> TokenId {
        self.end_of_message
    }

    /// The prompt of a request.
    ///
    /// # Errors
    /// A request that contradicts itself.
    pub fn encode(&self, request: &ChatRequest) -> Result<Vec<TokenId>, ChatError> {
        let mut ids = Vec::new();
        for segment in encode::segments(request)? {
            ids.extend(self.encode_segment(&segment)?);
        }
        Ok(ids)
    }

    fn encode_segment(&self, segment: &Segment) -> Result<Vec<TokenId>, TokenizerError> {
        if segment.control {
            self.tokenizer.encode_with_specials(&segment.text)
        } else {
            self.tokenizer.encode(&segment.text)
        }
    }

    /// Takes apart an answer whose prompt opened the thinking channel, or the response.
    #[must_use]
    pub fn stream(&self, thinking: bool) -> ChatStream<'a> {
        let channel = if thinking { Channel::Thinking } else { Channel::Response };
        ChatStream {
            format: *self,
            parser: ChatParser::new(channel),
            decoder: StreamDecoder::new(),
            text: String::new(),
        }
    }
}

/// An answer, taken apart as its tokens arrive.
#[derive(Debug)]
pub struct ChatStream<'a> {
    format: ChatFormat<'a>,
    parser: ChatParser,
    decoder: StreamDecoder,
    text: String,
}

impl ChatStream<'_> {
    /// Takes the next token; appends what it brings to `events`.
    ///
    /// # Errors
    /// An id that the vocabulary does not have.
    pub fn push(&mut self, id: TokenId, events: &mut Vec<ChatEvent>) -> Result<(), ChatError> {
        let format = self.format;
        let bytes = format.tokenizer.token_bytes(id)?;
        if !format.tokenizer.is_special(id) {
            self.decoder.push(bytes, &mut self.text);
            self.flush(events);
            return Ok(());
        }
        self.decoder.finish(&mut self.text);
        self.flush(events);
        let piece = match id {
            id if id == format.open => Piece::Open,
            id if id == format.close => Piece::Close,
            id if id == format.sep => Piece::Sep,
            id if id == format.end_of_message => Piece::EndOfMessage,
            // Other special tokens have no place in an answer and no text of their own.
            _ => return Ok(()),
        };
        self.parser.push(piece, events);
        Ok(())
    }

    /// The token that ends an answer.
    #[must_use]
    pub fn end_of_message(&self) -> TokenId {
        self.format.end_of_message()
    }

    /// The ids that end the answer here as the model would have: open channels and the message are
    /// closed.
    ///
    /// # Errors
    /// Only if the tokenizer fails.
    pub fn closing(&self) -> Result<Vec<TokenId>, ChatError> {
        let mut ids = Vec::new();
        for segment in encode::closing(self.parser.channel()) {
            ids.extend(self.format.encode_segment(&segment)?);
        }
        Ok(ids)
    }

    /// Ends the answer: what was still open is given out.
    pub fn finish(&mut self, events: &mut Vec<ChatEvent>) {
        self.decoder.finish(&mut self.text);
        self.flush(events);
        self.parser.finish(events);
    }

    fn flush(&mut self, events: &mut Vec<ChatEvent>) {
        if !self.text.is_empty() {
            self.parser.push(Piece::Text(&self.text), events);
            self.text.clear();
        }
    }
}
