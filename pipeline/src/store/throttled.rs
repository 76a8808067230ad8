//! A reader with the bandwidth and latency of another disk.

use std::io;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::files::SourceFile;
use super::queue::lock;
use super::reader::BlockReader;

/// Slows a reader down to a bandwidth that all threads share, and adds a latency to every read.
pub struct ThrottledReader {
    inner: Arc<dyn BlockReader>,
    bytes_per_second: f64,
    latency: Duration,
    /// When the disk that this stands for is done with what it was asked for so far.
    busy_until: Mutex<Option<Instant>>,
}

impl ThrottledReader {
    /// At most `bytes_per_second` over all threads; every read takes `latency` more.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockReader>, bytes_per_second: f64, latency: Duration) -> Self {
        Self { inner, bytes_per_second, latency, busy_until: Mutex::new(None) }
    }

    /// Books the transfer of `bytes` bytes that was asked for at `asked`; when it is over.
    fn book(&self, asked: Instant, bytes: usize) -> Instant {
        let transfer = Duration::try_from_secs_f64(bytes as f64 / self.bytes_per_second);
        let mut busy_until = lock(&self.busy_until);
        let start = busy_until.map_or(asked, |t| t.max(asked));
        let end = start + transfer.unwrap_or(Duration::MAX / 4);
        *busy_until = Some(end);
        end + self.latency
    }
}

impl BlockReader for ThrottledReader {
    fn read_at(&self, file: &SourceFile, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let asked = Instant::now();
        let got = self.inner.read_at(file, offset, buf)?;
        let until = self.book(asked, got);
        thread::sleep(until.saturating_duration_since(Instant::now()));
        Ok(got)
    }
}
