//! What a run has cost: time, bytes, hits, memory.

use std::fs::File;
use std::io::Read;
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
    /// Processor time of all threads meanwhile, in this program's own code, waiting in turns included; 0
    /// where the system does not tell.
    pub user_seconds: f64,
    /// The same in the system's code: reads, and pages handed out.
    pub system_seconds: f64,
    /// Bytes read from disk meanwhile, those read ahead for the next pass among them.
    pub read_bytes: u64,
}

impl PhaseStats {
    /// Adds one pass.
    pub(crate) fn add(&mut self, tokens: usize, time: PassTime, cpu: CpuTime, read_bytes: u64) {
        self.read_bytes += read_bytes;
        self.user_seconds += cpu.user_seconds;
        self.system_seconds += cpu.system_seconds;
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

/// More than the first 15 fields of `/proc/PID/stat` take: a name of 64 bytes and 14 numbers.
const STAT_BYTES: usize = 512;

/// Processor time of all threads of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CpuTime {
    /// In the program's own code.
    pub user_seconds: f64,
    /// In the system's.
    pub system_seconds: f64,
}

impl CpuTime {
    /// Of process `id`, or of this one, up to now; `None` where the system does not tell. Of this one
    /// nothing is allocated: every pass asks.
    #[must_use]
    pub fn of(id: Option<u32>) -> Option<Self> {
        let file = match id {
            Some(id) => File::open(format!("/proc/{id}/stat")),
            None => File::open("/proc/self/stat"),
        };
        let mut start = [0; STAT_BYTES];
        let bytes = file.ok()?.read(&mut start).ok()?;
        Self::parse(&start[..bytes])
    }

    /// The 14th and 15th fields; the second is a name that may hold anything.
    fn parse(stat: &[u8]) -> Option<Self> {
        let name_end = stat.iter().rposition(|byte| *byte == b')')?;
        let mut fields = std::str::from_utf8(&stat[name_end + 1..]).ok()?.split_whitespace().skip(11);
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        let mut seconds = || Some(fields.next()?.parse::<f64>().ok()? / ticks);
        Some(Self { user_seconds: seconds()?, system_seconds: seconds()? })
    }

    /// What has been used since `earlier`.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            user_seconds: self.user_seconds - earlier.user_seconds,
            system_seconds: self.system_seconds - earlier.system_seconds,
        }
    }
}

/// Running totals of an engine.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) prefill: PhaseStats,
    pub(crate) decode: PhaseStats,
    pub(crate) open: Duration,
}

impl Tally {
    pub(crate) fn add(&mut self, phase: Phase, tokens: usize, time: PassTime, cpu: CpuTime, read_bytes: u64) {
        let phase = match phase {
            Phase::Prefill => &mut self.prefill,
            Phase::Decode => &mut self.decode,
        };
        phase.add(tokens, time, cpu, read_bytes);
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
    fn processor_time_is_read_behind_any_name() {
        let ticks = rustix::param::clock_ticks_per_second();
        let stat = format!(") 9 9 b) S 1 2 3 4 5 6 7 8 9 10 {} {} 0 0 20", 2 * ticks, ticks / 2);
        let stat = [b"7 (\xff", stat.as_bytes()].concat();
        assert_eq!(CpuTime::parse(&stat), Some(CpuTime { user_seconds: 2.0, system_seconds: 0.5 }));
        for none in ["", "7 (a) S 1 2", "7 (a) S 1 2 3 4 5 6 7 8 9 10 11"] {
            assert_eq!(CpuTime::parse(none.as_bytes()), None, "{none:?}");
        }
        assert!(CpuTime::of(None).is_some() && CpuTime::of(Some(u32::MAX)).is_none());
    }

    #[test]
    fn processor_time_since_is_what_came_on_top() {
        let [earlier, later] = [(1.0, 4.0), (3.5, 4.5)]
            .map(|(user_seconds, system_seconds)| CpuTime { user_seconds, system_seconds });
        assert_eq!(later.since(earlier), CpuTime { user_seconds: 2.5, system_seconds: 0.5 });
    }

    #[test]
    fn passes_are_counted_for_their_part_of_the_run() {
        let mut tally = Tally::default();
        let time = PassTime { total: Duration::from_secs(1), waited: Duration::ZERO };
        let cpu = CpuTime { user_seconds: 1.5, system_seconds: 0.25 };
        tally.add(Phase::Prefill, 7, time, cpu, 100);
        tally.add(Phase::Decode, 1, time, cpu, 30);
        tally.add(Phase::Decode, 1, time, cpu, 40);
        let sum = |passes, tokens, read_bytes| PhaseStats {
            passes,
            tokens,
            seconds: passes as f64,
            waited_seconds: 0.0,
            user_seconds: 1.5 * passes as f64,
            system_seconds: 0.25 * passes as f64,
            read_bytes,
        };
        assert_eq!((tally.prefill, tally.decode), (sum(1, 7, 100), sum(2, 2, 70)));
    }

    #[test]
    fn shares_are_of_the_passes_time() {
        let mut phase = PhaseStats::default();
        assert_eq!((phase.seconds_per_token(), phase.waited_share()), (None, None));
        let time = PassTime { total: Duration::from_secs(4), waited: Duration::from_secs(1) };
        let cpu = CpuTime { user_seconds: 2.5, system_seconds: 0.5 };
        phase.add(8, time, cpu, 100);
        assert_eq!((phase.read_bytes, phase.user_seconds, phase.system_seconds), (100, 2.5, 0.5));
        assert_eq!((phase.seconds_per_token(), phase.waited_share()), (Some(0.5), Some(0.25)));
    }
}
