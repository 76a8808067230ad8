//! Timing: threads that start together, medians, and how fast memory can be read.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;

use clap::ValueEnum;
use rustix::time::{ClockId, clock_gettime};

/// Work that threads share out: what `thread` of `threads` does in call number `call`.
pub trait Work: Sync {
    /// A thread's own part, with its own output buffers.
    fn worker(&self, thread: usize, threads: usize) -> Box<dyn FnMut(usize) + '_>;
}

/// Which clock the time is read from.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Clock {
    /// The one on the wall.
    Wall,
    /// The processor time of the slowest thread: for a machine that does other work too.
    Cpu,
}

impl Clock {
    fn seconds(self) -> f64 {
        let id = match self {
            Self::Wall => ClockId::Monotonic,
            Self::Cpu => ClockId::ThreadCPUTime,
        };
        let time = clock_gettime(id);
        time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
    }

    /// Seconds for one call out of `calls`, all threads together. The calls are numbered from `first`.
    pub fn time(self, work: &dyn Work, threads: usize, first: usize, calls: usize) -> f64 {
        let barrier = Barrier::new(threads);
        let run = |thread| {
            let mut worker = work.worker(thread, threads);
            barrier.wait();
            let start = self.seconds();
            for call in first..first + calls {
                worker(call);
            }
            self.seconds() - start
        };
        thread::scope(|scope| {
            let others: Vec<_> = (1..threads)
                .map(|other| {
                    let run = &run;
                    scope.spawn(move || run(other))
                })
                .collect();
            let own = run(0);
            others.into_iter().filter_map(|other| other.join().ok()).fold(own, f64::max) / calls as f64
        })
    }

    /// Calls that take about `target` seconds together.
    pub fn calls_for(self, work: &dyn Work, threads: usize, target: f64) -> usize {
        let once = self.time(work, threads, 0, 1).min(self.time(work, threads, 1, 1));
        ((target / once).round() as usize).clamp(1, 1 << 20)
    }
}

/// The middle value, or the mean of the middle two; NaN of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = |place: usize| values.get(place).copied().unwrap_or(f64::NAN);
    f64::midpoint(middle(values.len().saturating_sub(1) / 2), middle(values.len() / 2))
}

/// `len` bytes that begin at a page.
pub struct Pages {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Pages {
    /// Zeros.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + 4096];
        let start = bytes.as_ptr().align_offset(4096);
        Self { bytes, start, len }
    }

    /// The bytes.
    pub fn get(&self) -> &[u8] {
        &self.bytes[self.start..][..self.len]
    }

    /// The bytes.
    pub fn get_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.len]
    }
}

/// Rows `0..rows` cut into equal parts at multiples of `granule`.
pub fn part(rows: usize, granule: usize, thread: usize, threads: usize) -> std::ops::Range<usize> {
    let cut = |thread: usize| (rows * thread / threads).div_ceil(granule).saturating_mul(granule).min(rows);
    cut(thread)..cut(thread + 1)
}

/// Reading memory with four distant streams for each thread: the bandwidth that kernels are measured by.
pub struct Read {
    words: Vec<u64>,
}

impl Read {
    /// Far more than any cache holds.
    pub fn new() -> Self {
        Self { words: (0..24 << 20).collect() }
    }

    /// Bytes of one call.
    pub fn bytes(&self) -> f64 {
        (self.words.len() * 8) as f64
    }
}

impl Work for Read {
    fn worker(&self, thread: usize, threads: usize) -> Box<dyn FnMut(usize) + '_> {
        let words = &self.words[part(self.words.len(), 64, thread, threads)];
        Box::new(move |_| {
            let quarter = words.len() / 4;
            let mut sums = [[0u64; 8]; 4];
            let streams: [&[[u64; 8]]; 4] =
                std::array::from_fn(|i| words[i * quarter..][..quarter].as_chunks().0);
            for i in 0..streams[0].len() {
                for (sums, stream) in sums.iter_mut().zip(&streams) {
                    for (sum, word) in sums.iter_mut().zip(&stream[i]) {
                        *sum = sum.wrapping_add(*word);
                    }
                }
            }
            black_box(sums);
        })
    }
}
