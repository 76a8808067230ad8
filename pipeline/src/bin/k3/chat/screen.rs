//! What is shown of an answer: the response on stdout, thinking and notes on stderr.

use std::io::{self, Write};

use k3_pipeline::conversation::{Ended, Heard};

use super::to_stderr;
use crate::failure::Outcome;
use crate::terminal;

/// What happens with thinking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Thinking {
    /// It is shown.
    Shown,
    /// It happens unseen.
    Hidden,
    /// It does not happen.
    Off,
}

/// The place where an answer appears.
pub(super) struct Screen {
    thinking: Thinking,
    /// Whether the response is printed as it comes.
    streams: bool,
    /// Whether stderr takes colours.
    dims: bool,
    /// Whether the cursor stands in thinking.
    in_thinking: bool,
    /// The first failure to write the response.
    failure: io::Result<()>,
}

impl Screen {
    pub(super) fn new(thinking: Thinking, streams: bool) -> Self {
        Self { thinking, streams, dims: terminal::takes_colour(), in_thinking: false, failure: Ok(()) }
    }

    pub(super) fn set_thinking(&mut self, thinking: Thinking) {
        self.thinking = thinking;
    }

    /// An answer of the program to its user.
    pub(super) fn note(&self, text: &str) {
        to_stderr(&format!("{}\n", text.trim_end()));
    }

    /// A word that nobody asked for: `--quiet` keeps it away.
    pub(super) fn remark(&self, text: &str) {
        if terminal::reports() {
            self.note(text);
        }
    }

    pub(super) fn begin(&mut self) {
        self.in_thinking = false;
        self.failure = Ok(());
    }

    pub(super) fn hear(&mut self, heard: Heard<'_>) {
        match heard {
            Heard::Thinking(text) => {
                if self.thinking == Thinking::Shown && terminal::reports() {
                    let begin = if self.dims && !self.in_thinking { "\x1b[2m" } else { "" };
                    to_stderr(&format!("{begin}{text}"));
                    self.in_thinking = true;
                }
            }
            Heard::Response(text) => {
                self.end_thinking();
                if self.streams && self.failure.is_ok() {
                    self.failure = print(text);
                }
            }
            Heard::ToolCall(call) => {
                self.end_thinking();
                let arguments: Vec<String> =
                    call.arguments.iter().map(|a| format!("{}={}", a.key, a.value())).collect();
                let cut = if call.complete { "" } else { " (not completed)" };
                self.remark(&format!("[calls {}({}){cut}]", call.name, arguments.join(", ")));
            }
        }
    }

    /// Ends the answer's lines; says why it ended where that is not plain.
    pub(super) fn end(&mut self, ended: Option<Ended>) -> Outcome {
        self.end_thinking();
        if self.streams {
            std::mem::replace(&mut self.failure, Ok(()))?;
            print("\n")?;
        }
        match ended {
            Some(Ended::Length) if self.streams => self.remark("[as many tokens as allowed]"),
            Some(Ended::Interrupted) if self.streams => self.remark("[stopped]"),
            _ => {}
        }
        Ok(())
    }

    fn end_thinking(&mut self) {
        if std::mem::take(&mut self.in_thinking) {
            to_stderr(if self.dims { "\x1b[0m\n\n" } else { "\n\n" });
        }
    }
}

fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
