//! How far a long task is: a bar with the time left on stderr, for those who watch.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use k3_pipeline::session::Progress;

use crate::terminal;

/// Most times a second that a bar is drawn.
const DRAWS_PER_SECOND: u8 = 5;

/// The bar of one task; nothing where nobody watches.
pub(crate) struct Bar(ProgressBar);

impl Bar {
    /// A task counted in bytes.
    pub(crate) fn bytes(what: &'static str) -> Self {
        let counts = "{decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}";
        Self::new(what, counts)
    }

    /// The reading of a prompt.
    pub(crate) fn prompt() -> Self {
        Self::new("prompt", "{pos} of {len} tokens")
    }

    fn new(what: &'static str, counts: &str) -> Self {
        let target = match terminal::is_watched() {
            true => ProgressDrawTarget::stderr_with_hz(DRAWS_PER_SECOND),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(None, target).with_message(what);
        let template = format!("{{msg}} {{bar:24}} {counts}, {{eta}} left");
        // A template that does not parse leaves the plain style.
        Self(match ProgressStyle::with_template(&template) {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        })
    }

    /// Shows that `done` of `total` are done, if it is time to; what was done at the first call does not
    /// count for the speed.
    pub(crate) fn show(&self, done: u64, total: u64) {
        if self.0.length().is_none() {
            self.0.set_length(total);
            self.0.set_position(done);
            self.0.reset_eta();
        }
        if done < total {
            self.0.set_position(done);
        } else {
            self.0.finish_and_clear();
        }
    }

    /// Shows how far a prompt has been read.
    pub(crate) fn show_prompt(&self, seen: &Progress<'_>) {
        self.show(seen.done as u64, seen.total as u64);
    }
}

/// The bar goes when the task ends, however it does.
impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_templates_are_templates() {
        for counts in ["{decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}", "{pos} of {len}"]
        {
            assert!(ProgressStyle::with_template(&format!("{{msg}} {{bar:24}} {counts}, {{eta}}")).is_ok());
        }
    }
}
