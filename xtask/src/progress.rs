//! A line on stderr that says how far a task is and how long it will take.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Between two lines on a terminal, and in a log.
const TERMINAL_PERIOD: Duration = Duration::from_millis(200);
const LOG_PERIOD: Duration = Duration::from_secs(10);

/// A task of a known size.
pub struct Progress {
    what: &'static str,
    total: u64,
    started: Instant,
    shown: Instant,
    terminal: bool,
}

impl Progress {
    /// A task of `total` units, whatever they are.
    pub fn new(what: &'static str, total: u64) -> Self {
        let now = Instant::now();
        Self { what, total, started: now, shown: now, terminal: std::io::stderr().is_terminal() }
    }

    /// Shows that `done` units are done, if it is time to.
    pub fn show(&mut self, done: u64) {
        let period = if self.terminal { TERMINAL_PERIOD } else { LOG_PERIOD };
        if self.shown.elapsed() < period {
            return;
        }
        self.shown = Instant::now();
        let line = line(self.what, done, self.total, self.started.elapsed());
        let (before, after) = if self.terminal { ("\r", "\x1b[K") } else { ("", "\n") };
        // A closed stderr leaves nobody to tell.
        let _ = write!(std::io::stderr(), "{before}{line}{after}");
    }

    /// Clears the line.
    pub fn finish(&self) {
        if self.terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

fn line(what: &str, done: u64, total: u64, elapsed: Duration) -> String {
    let share = done as f64 / total.max(1) as f64;
    let left = elapsed.as_secs_f64() * (1.0 - share) / share.max(1e-9);
    format!("{what}: {:.0} %, {left:.0} s to go", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_takes_as_long_as_the_part_done() {
        assert_eq!(line("writing", 25, 100, Duration::from_secs(10)), "writing: 25 %, 30 s to go");
    }
}
