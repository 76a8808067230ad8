//! How far a prompt has been read: one line on stderr, for those who watch.

use std::io::{self, IsTerminal, Write};

use k3_pipeline::session::Progress;

/// The line.
pub(crate) struct Prefill {
    watched: bool,
}

impl Prefill {
    /// No line yet; none at all where stderr is no terminal.
    pub(crate) fn new() -> Self {
        Self { watched: io::stderr().is_terminal() }
    }

    /// Shows how far a prefill has come, and clears the line at its end.
    pub(crate) fn show(&mut self, seen: &Progress<'_>) {
        if !self.watched {
            return;
        }
        let line = if seen.done < seen.total {
            let left = seen.elapsed.as_secs_f64() / seen.done as f64 * (seen.total - seen.done) as f64;
            format!("\rprompt: {} of {} tokens, {left:.0} s left\x1b[K", seen.done, seen.total)
        } else {
            "\r\x1b[K".to_owned()
        };
        // A closed stderr leaves nobody to tell.
        let _ = io::stderr().lock().write_all(line.as_bytes());
    }
}
