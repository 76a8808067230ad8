//! The tolerant parser of an answer.
//!
//! Markers never come out as text. A tag is what stands between `open` or `close` and `sep`; a tag
//! that the format has is obeyed even where it is out of place (what is open is closed first), and
//! everything else that the model wrote there is kept as text of the current channel. Text outside
//! every channel belongs to the response.

use serde_json::Value;

/// A tag's header longer than this is text (bytes).
const HEADER_BYTES_MAX: usize = 16 << 10;

/// What the parser is fed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// `<|open|>`
    Open,
    /// `<|close|>`
    Close,
    /// `<|sep|>`
    Sep,
    /// `<|end_of_msg|>`
    EndOfMessage,
    /// Ordinary text, cut anywhere.
    Text(&'a str),
}

/// What an answer consists of, in the order in which it becomes known.
#[derive(Clone, Debug, PartialEq)]
pub enum ChatEvent {
    /// More of the thinking.
    Thinking(String),
    /// More of the response.
    Response(String),
    /// A call begins; its arguments follow with [`ToolCall`](Self::ToolCall).
    ToolCallStart {
        /// Its number, from 1.
        index: usize,
        /// The tool.
        name: String,
    },
    /// A call is known.
    ToolCall(CalledTool),
    /// The message ended as it should.
    End,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CalledTool {
    /// Its number, from 1.
    pub index: usize,
    /// The tool.
    pub name: String,
    /// Arguments in the order written.
    pub arguments: Vec<Argument>,
    /// Whether the model closed the call; a call that it left open should not be run.
    pub complete: bool,
}

/// An argument of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument {
    /// Its name.
    pub key: String,
    /// The type that the model named.
    pub kind: String,
    /// Its text as written.
    pub text: String,
}

impl Argument {
    /// The value: a string as it stands, any other type read as JSON. A text that is not of the
    /// named type is kept as a string.
    #[must_use]
    pub fn value(&self) -> Value {
        let text = || Value::String(self.text.clone());
        if self.kind == "string" {
            return text();
        }
        serde_json::from_str(&self.text).unwrap_or_else(|_| text())
    }
}

/// Where text goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Thinking.
    Thinking,
    /// The response, and whatever stands outside every channel.
    Response,
}

/// A parser of one answer.
#[derive(Clone, Debug)]
pub struct ChatParser {
    channel: Channel,
    header: Option<Header>,
    call: Option<OpenCall>,
    /// Calls begun so far.
    calls: usize,
}

#[derive(Clone, Debug)]
struct Header {
    closes: bool,
    text: String,
}

#[derive(Clone, Debug)]
struct OpenCall {
    tool: CalledTool,
    /// Whether text goes into the last argument.
    in_argument: bool,
}

enum Tag {
    Channel(Channel),
    /// `message` or `tools`: a frame without text of its own.
    Frame,
    Call {
        name: String,
        index: Option<usize>,
    },
    Argument {
        key: String,
        kind: String,
    },
}

impl ChatParser {
    /// A parser of an answer whose prompt opened `channel`.
    #[must_use]
    pub fn new(channel: Channel) -> Self {
        Self { channel, header: None, call: None, calls: 0 }
    }

    /// Where text would go now.
    #[must_use]
    pub fn channel(&self) -> Channel {
        self.channel
    }

    /// Takes the next piece; appends what it brings to `events`.
    pub fn push(&mut self, piece: Piece<'_>, events: &mut Vec<ChatEvent>) {
        match piece {
            Piece::Open => self.begin_header(false, events),
            Piece::Close => self.begin_header(true, events),
            Piece::Sep => self.end_header(events),
            Piece::EndOfMessage => {
                self.finish(events);
                events.push(ChatEvent::End);
            }
            Piece::Text(text) => match &mut self.header {
                Some(header) => {
                    header.text.push_str(text);
                    if header.text.len() > HEADER_BYTES_MAX {
                        self.drop_header(events);
                    }
                }
                None => self.text(text, events),
            },
        }
    }

    /// Gives out what is still open: an unfinished header as text, an unfinished call as not
    /// complete.
    pub fn finish(&mut self, events: &mut Vec<ChatEvent>) {
        self.drop_header(events);
        self.end_call(false, events);
        self.channel = Channel::Response;
    }

    fn begin_header(&mut self, closes: bool, events: &mut Vec<ChatEvent>) {
        self.drop_header(events);
        self.header = Some(Header { closes, text: String::new() });
    }

    /// What was taken for a header is text.
    fn drop_header(&mut self, events: &mut Vec<ChatEvent>) {
        if let Some(header) = self.header.take() {
            self.text(&header.text, events);
        }
    }

    fn end_header(&mut self, events: &mut Vec<ChatEvent>) {
        let Some(header) = self.header.take() else { return };
        let known = if header.closes {
            self.close(&header.text, events)
        } else {
            read_tag(&header.text).is_some_and(|tag| self.open(tag, events))
        };
        if !known {
            self.text(&header.text, events);
        }
    }

    fn open(&mut self, tag: Tag, events: &mut Vec<ChatEvent>) -> bool {
        match tag {
            Tag::Argument { key, kind } => {
                let Some(call) = &mut self.call else { return false };
                call.tool.arguments.push(Argument { key, kind, text: String::new() });
                call.in_argument = true;
            }
            Tag::Call { name, index } => {
                self.end_call(false, events);
                self.channel = Channel::Response;
                self.calls += 1;
                let index = index.unwrap_or(self.calls);
                events.push(ChatEvent::ToolCallStart { index, name: name.clone() });
                let tool = CalledTool { index, name, arguments: Vec::new(), complete: false };
                self.call = Some(OpenCall { tool, in_argument: false });
            }
            Tag::Channel(channel) => {
                self.end_call(false, events);
                self.channel = channel;
            }
            Tag::Frame => {
                self.end_call(false, events);
                self.channel = Channel::Response;
            }
        }
        true
    }

    /// Closes a tag by its name; closing what is not open changes nothing.
    fn close(&mut self, name: &str, events: &mut Vec<ChatEvent>) -> bool {
        match name {
            "argument" => {
                if let Some(call) = &mut self.call {
                    call.in_argument = false;
                }
            }
            "call" => {
                // An argument that was left open may have lost its end.
                let whole = self.call.as_ref().is_some_and(|call| !call.in_argument);
                self.end_call(whole, events);
            }
            "think" | "response" | "tools" | "message" => {
                self.end_call(false, events);
                self.channel = Channel::Response;
            }
            _ => return false,
        }
        true
    }

    fn end_call(&mut self, complete: bool, events: &mut Vec<ChatEvent>) {
        if let Some(call) = self.call.take() {
            events.push(ChatEvent::ToolCall(CalledTool { complete, ..call.tool }));
        }
    }

    fn text(&mut self, text: &str, events: &mut Vec<ChatEvent>) {
        if text.is_empty() {
            return;
        }
        if let Some(call) = self.call.as_mut().filter(|call| call.in_argument) {
            if let Some(argument) = call.tool.arguments.last_mut() {
                argument.text.push_str(text);
            }
            return;
        }
        events.push(match self.channel {
            Channel::Thinking => ChatEvent::Thinking(text.to_owned()),
            Channel::Response => ChatEvent::Response(text.to_owned()),
        });
    }
}

/// Reads the header of an opening tag; `None` where the format has no such tag.
fn read_tag(header: &str) -> Option<Tag> {
    let (name, mut rest) = header.split_at(header.find(' ').unwrap_or(header.len()));
    let mut attributes = Vec::new();
    while !rest.is_empty() {
        let (key, after) = rest.strip_prefix(' ')?.split_once("=\"")?;
        let (value, after) = after.split_once('"')?;
        attributes.push((key, value.replace("&quot;", "\"").replace("&amp;", "&")));
        rest = after;
    }
    let mut take = |key| {
        let at = attributes.iter().position(|(found, _)| *found == key)?;
        Some(attributes.remove(at).1)
    };
    let tag = match name {
        "think" => Tag::Channel(Channel::Thinking),
        "response" => Tag::Channel(Channel::Response),
        "tools" => Tag::Frame,
        "message" if take("role")? == "assistant" => Tag::Frame,
        "call" => Tag::Call {
            name: take("tool")?,
            index: match take("index") {
                Some(index) => Some(index.parse().ok()?),
                None => None,
            },
        },
        "argument" => Tag::Argument { key: take("key")?, kind: take("type")? },
        _ => return None,
    };
    attributes.is_empty().then_some(tag)
}
