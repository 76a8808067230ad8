//! What a run has cost: time, bytes, hits, memory.

use std::time::Duration;

use serde::Serialize;

use crate::forward::PassTime;
use crate::store::disks::DiskReport;
use crate::store::stats::StoreStats;

/// Which part of a run a pass belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Reading a given text.
    Prefill,
    /// Producing new tokens.
    Decode,
}

/// Time of one part of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PhaseStats {
    /// Passes over the weights.
    pub passes: u64,
    /// Tokens fed.
    pub tokens: u64,
    /// Seconds in passes.
    pub seconds: f64,
    /// Of those, seconds in which the computation waited for the disk.
    pub waited_seconds: f64,
    /// Bytes read from disk meanwhile, those read ahead for the next pass among them.
    pub read_bytes: u64,
}

impl PhaseStats {
    /// Adds one pass.
    pub(crate) fn add(&mut self, tokens: usize, time: PassTime, read_bytes: u64) {
        self.read_bytes += read_bytes;
        self.passes += 1;
        self.tokens += tokens as u64;
        self.seconds += time.total.as_secs_f64();
        self.waited_seconds += time.waited.as_secs_f64();
    }

    /// Seconds per token; `None` before the first.
    #[must_use]
    pub fn seconds_per_token(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.seconds / self.tokens as f64)
    }

    /// Share of the time that was waited, 0 to 1; `None` before the first pass.
    #[must_use]
    pub fn waited_share(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.waited_seconds / self.seconds)
    }
}

/// Everything that is known about a run so far.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stats {
    /// Name of the preset.
    pub preset: String,
    /// Instruction set in use.
    pub isa: String,
    /// Compute threads.
    pub threads: usize,
    /// Seconds to allocate, open and load.
    pub open_seconds: f64,
    /// Prompt.
    pub prefill: PhaseStats,
    /// Generated tokens.
    pub decode: PhaseStats,
    /// Reads, and hits of the expert cache.
    pub store: StoreStats,
    /// How each disk is really read.
    pub disks: Vec<DiskReport>,
    /// Memory that the plan foresaw.
    pub planned_bytes: u64,
    /// Largest resident memory of the process so far, from the system; `None` where it does not tell.
    pub peak_rss_bytes: Option<u64>,
}

/// Largest resident memory of this process, from the system.
#[must_use]
pub fn peak_rss_bytes() -> Option<u64> {
    parse_peak(&std::fs::read_to_string("/proc/self/status").ok()?)
}

fn parse_peak(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Running totals of an engine.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) prefill: PhaseStats,
    pub(crate) decode: PhaseStats,
    pub(crate) open: Duration,
}

impl Tally {
    pub(crate) fn add(&mut self, phase: Phase, tokens: usize, time: PassTime, read_bytes: u64) {
        let phase = match phase {
            Phase::Prefill => &mut self.prefill,
            Phase::Decode => &mut self.decode,
        };
        phase.add(tokens, time, read_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_memory_is_read_from_the_systems_words() {
        assert_eq!(parse_peak("VmPeak:\t  9 kB\nVmHWM:\t   1234 kB\n"), Some(1234 * 1024));
        assert_eq!(parse_peak("VmHWM:\t x kB\n"), None);
        assert_eq!(parse_peak(""), None);
    }

    #[test]
    fn shares_are_of_the_passes_time() {
        let mut phase = PhaseStats::default();
        assert_eq!((phase.seconds_per_token(), phase.waited_share()), (None, None));
        let time = PassTime { total: Duration::from_secs(4), waited: Duration::from_secs(1) };
        phase.add(8, time, 100);
        assert_eq!(phase.read_bytes, 100);
        assert_eq!((phase.seconds_per_token(), phase.waited_share()), (Some(0.5), Some(0.25)));
    }
}
