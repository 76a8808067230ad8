//! How far a long task is: a bar with the time left on stderr, for those who watch; for prompts also a line
//! now and then in a log.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use k3_kernel::Columns;
use k3_pipeline::conversation::Watch;
use k3_pipeline::forward::{Tap, TapPoint};
use k3_pipeline::units::LayerIndex;

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
    fn prompt() -> Self {
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
}

/// The bar goes when the task ends, however it does.
impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Between two lines of a log.
const LOG_PERIOD: Duration = Duration::from_secs(30);

/// How far a prompt has been read. It looks at the layers of each pass: one chunk may take an hour from a
/// slow disk.
pub(crate) struct Prompt {
    bar: Bar,
    total: usize,
    layers: usize,
    /// Tokens of the chunks that are done.
    done: usize,
    started: Instant,
    logged: Instant,
}

impl Prompt {
    /// A prompt of `total` tokens through `layers` layers.
    pub(crate) fn new(total: usize, layers: usize) -> Self {
        let now = Instant::now();
        Self { bar: Bar::prompt(), total, layers, done: 0, started: now, logged: now }
    }

    /// A chunk has come through a layer.
    fn layer(&mut self, layer: usize, tokens: usize) {
        let share = (layer + 1) as f64 / self.layers as f64;
        let done = self.done as f64 + tokens as f64 * share;
        self.bar.show(done as u64, self.total as u64);
        if layer + 1 == self.layers {
            self.done += tokens;
        }
        let is_log = !terminal::is_watched() && self.done < self.total;
        if is_log && self.logged.elapsed() >= LOG_PERIOD {
            self.logged = Instant::now();
            terminal::report(&self.line(done, self.started.elapsed()));
        }
    }

    fn line(&self, done: f64, elapsed: Duration) -> String {
        let left = elapsed.as_secs_f64() * (self.total as f64 / done.max(f64::MIN_POSITIVE) - 1.0);
        format!("prompt: {} of {} tokens, {} left\n", done as usize, self.total, duration(left))
    }
}

impl Tap for Prompt {
    fn values(&mut self, point: TapPoint, layer: Option<LayerIndex>, columns: Columns<'_>) {
        if let (TapPoint::Prefix, Some(layer)) = (point, layer) {
            self.layer(layer.index(), columns.count);
        }
    }

    fn router(&mut self, _: LayerIndex, _: &[u16], _: &[f32], _: usize) {}
}

impl Watch for Prompt {
    fn begin(&mut self, tokens: usize) {
        *self = Self::new(tokens, self.layers);
    }
}

/// "12 s", "3 min", "2.5 h".
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 100.0 => format!("{s:.0} s"),
        s if s < 6000.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
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

    #[test]
    fn what_is_left_follows_from_the_layers_done() {
        let mut prompt = Prompt::new(30, 4);
        for layer in 0..4 {
            prompt.layer(layer, 20);
        }
        assert_eq!(prompt.done, 20);
        assert_eq!(prompt.line(22.5, Duration::from_secs(90)), "prompt: 22 of 30 tokens, 30 s left\n");
        let shown = [99.4, 180.0, 9000.0].map(duration);
        assert_eq!(shown, ["99 s", "3 min", "2.5 h"]);
    }
}
