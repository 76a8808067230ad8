//! A reader that fails as disks do, where it is told to.

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use super::files::SourceFile;
use super::reader::BlockReader;

/// What goes wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The system refuses the read with this error number.
    Error(i32),
    /// A read gives at most so many bytes.
    Short(usize),
    /// The file ends at the start of the range.
    EndOfFile,
    /// This bit of the first byte of the range is flipped.
    FlipBit(u8),
    /// A read takes so much longer: later ones overtake it.
    Delay(Duration),
    /// The reader panics.
    Panic,
}

/// A fault and where it strikes: every read that touches the range, after the first `skip` of them.
#[derive(Debug)]
pub struct Fault {
    /// The file.
    pub path: PathBuf,
    /// Bytes of it.
    pub range: Range<u64>,
    /// What goes wrong.
    pub kind: FaultKind,
    /// Reads that are let pass first.
    pub skip: u64,
}

/// Fails where it is told to, and else reads as the reader inside it does.
pub struct FaultyReader {
    inner: Arc<dyn BlockReader>,
    faults: Vec<(Fault, AtomicU64)>,
}

impl FaultyReader {
    /// A reader with these faults.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockReader>, faults: Vec<Fault>) -> Self {
        Self { inner, faults: faults.into_iter().map(|f| (f, AtomicU64::new(0))).collect() }
    }

    fn striking(&self, file: &SourceFile, offset: u64, bytes: usize) -> impl Iterator<Item = &Fault> {
        let end = offset + bytes as u64;
        self.faults.iter().filter_map(move |(fault, seen)| {
            let touches = file.path() == fault.path && offset < fault.range.end && end > fault.range.start;
            (touches && seen.fetch_add(1, Ordering::Relaxed) >= fault.skip).then_some(fault)
        })
    }
}

impl BlockReader for FaultyReader {
    fn read_at(&self, file: &SourceFile, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let mut got = self.inner.read_at(file, offset, buf)?;
        for fault in self.striking(file, offset, buf.len()) {
            match fault.kind {
                FaultKind::Error(number) => return Err(io::Error::from_raw_os_error(number)),
                FaultKind::Short(most) => got = got.min(most),
                FaultKind::EndOfFile => got = got.min(fault.range.start.saturating_sub(offset) as usize),
                FaultKind::FlipBit(bit) => {
                    let at = fault.range.start.checked_sub(offset).map(|at| at as usize);
                    if let Some(byte) = at.filter(|&at| at < got).and_then(|at| buf.get_mut(at)) {
                        *byte ^= 1 << (bit % 8);
                    }
                }
                FaultKind::Delay(time) => thread::sleep(time),
                FaultKind::Panic => std::panic::resume_unwind(Box::new("a reader that panics was asked for")),
            }
        }
        Ok(got)
    }
}
