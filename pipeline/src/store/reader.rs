//! How bytes are read, as a parameter: the plain reader here, and readers around it that throttle or fail.

use std::io;

use super::error::StoreError;
use super::files::SourceFile;
use crate::memory::arena::SLOT_ALIGN;

/// A way to read a weight file. Implementations may give fewer bytes than asked for, as the system does;
/// that a block is whole is the business of [`read_exact_at`].
pub trait BlockReader: Send + Sync {
    /// Reads up to `buf.len()` bytes at `offset`; 0 means that the file ends there.
    ///
    /// # Errors
    /// The system's.
    fn read_at(&self, file: &SourceFile, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
}

/// Reads as the system does.
#[derive(Clone, Copy, Debug, Default)]
pub struct PreadReader;

impl BlockReader for PreadReader {
    fn read_at(&self, file: &SourceFile, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        file.read_at(offset, buf)
    }
}

/// How often a read may come back without a whole sector before it counts as short.
const STALLS_MAX: u32 = 16;

/// How far a read of several steps is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    /// Bytes that are here.
    pub(crate) done: usize,
    /// Bytes that must come; the buffer may be longer, up to the next sector.
    pub(crate) needed: usize,
    stalls: u32,
}

/// What a step of a read leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// All is here.
    Whole,
    /// Go on at `Progress::done`.
    Again,
    /// The file gave out.
    Short,
}

impl Progress {
    pub(crate) fn new(needed: usize) -> Self {
        Self { done: 0, needed, stalls: 0 }
    }

    /// Counts `got` more bytes. Direct reads go on from a sector's start.
    pub(crate) fn advance(&mut self, got: usize, direct: bool) -> Step {
        let here = self.done.saturating_add(got);
        if here >= self.needed {
            self.done = self.needed;
            return Step::Whole;
        }
        if got == 0 {
            return Step::Short;
        }
        let next = if direct { here / SLOT_ALIGN * SLOT_ALIGN } else { here };
        if next == self.done {
            self.stalls += 1;
            if self.stalls == STALLS_MAX {
                return Step::Short;
            }
        }
        self.done = next;
        Step::Again
    }
}

/// Fills the first `needed` bytes of `buf` from `offset`; those after it may be filled too. Short reads
/// are taken up again.
///
/// # Errors
/// A failed read, a file that changed, or one that ends too early, with file and offset.
pub fn read_exact_at(
    reader: &dyn BlockReader,
    file: &SourceFile,
    offset: u64,
    buf: &mut [u8],
    needed: usize,
) -> Result<(), StoreError> {
    let mut progress = Progress::new(needed);
    while progress.done < needed {
        let at = offset + progress.done as u64;
        let rest = &mut buf[progress.done..];
        let room = rest.len();
        match reader.read_at(file, at, rest) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(source) => return Err(read_failed(file, at, needed - progress.done, source)),
            Ok(got) => match progress.advance(got.min(room), file.is_direct()) {
                Step::Whole | Step::Again => {}
                Step::Short => return Err(short_read(file, offset, &progress)),
            },
        }
    }
    Ok(())
}

pub(crate) fn read_failed(file: &SourceFile, offset: u64, bytes: usize, source: io::Error) -> StoreError {
    StoreError::Read { path: file.path().to_owned(), offset, bytes: bytes as u64, source }
}

/// The error of a read that ended early: that the file changed, where it did.
pub(crate) fn short_read(file: &SourceFile, offset: u64, progress: &Progress) -> StoreError {
    file.check_unchanged().err().unwrap_or_else(|| StoreError::ShortRead {
        path: file.path().to_owned(),
        offset,
        expected: progress.needed as u64,
        got: progress.done as u64,
    })
}
