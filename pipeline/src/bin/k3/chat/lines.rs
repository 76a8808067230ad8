//! Lines from the terminal, with editing and history; or from a pipe.

use anyhow::Context;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::{create_parent, history_file, to_stderr};
use crate::failure::Failure;

/// A reader of lines.
pub(super) struct Lines {
    editor: DefaultEditor,
}

impl Lines {
    pub(super) fn open() -> Result<Self, Failure> {
        let mut editor = DefaultEditor::new().context("cannot read lines").map_err(Failure::run)?;
        if let Some(path) = history_file() {
            // There is none at first.
            let _ = editor.load_history(&path);
        }
        Ok(Self { editor })
    }

    /// The next line; `None` at the end. Ctrl-C clears the line.
    pub(super) fn next(&mut self) -> Result<Option<String>, Failure> {
        loop {
            match self.editor.readline("> ") {
                Ok(line) => {
                    self.remember(&line);
                    return Ok(Some(line));
                }
                Err(ReadlineError::Interrupted) => to_stderr("Ctrl-D ends the conversation.\n"),
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => {
                    return Err(Failure::run(anyhow::Error::new(error).context("cannot read lines")));
                }
            }
        }
    }

    /// Keeps a line; a history that cannot be written is no reason to end a conversation.
    fn remember(&mut self, line: &str) {
        if line.trim().is_empty() || !matches!(self.editor.add_history_entry(line), Ok(true)) {
            return;
        }
        if let Some(path) = history_file()
            && create_parent(&path).is_ok()
        {
            let _ = self.editor.save_history(&path);
        }
    }
}
