//! Opening files that others wrote: only regular ones, without ever waiting on a pipe.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Why a file was not opened or read.
#[derive(Debug)]
pub(crate) enum OpenError {
    /// The system refused.
    Io(io::Error),
    /// It is something else: what it is.
    NotAFile(&'static str),
    /// It has this many bytes, more than asked for.
    TooLong(u64),
}

impl From<io::Error> for OpenError {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}

/// Opens a regular file for reading and gives its length.
pub(crate) fn open_regular(path: &Path) -> Result<(File, u64), OpenError> {
    // Opening a pipe would wait for its writer; with NONBLOCK it returns, and the type tells.
    let nonblock = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).map_err(io::Error::other)?;
    let opened = File::options().read(true).custom_flags(nonblock).open(path);
    let file = match opened {
        Ok(file) => file,
        // Sockets cannot be opened at all: say what it is rather than what the system says.
        Err(e) => match std::fs::metadata(path) {
            Ok(meta) if !meta.is_file() => return Err(OpenError::NotAFile(describe(meta.file_type()))),
            _ => return Err(e.into()),
        },
    };
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(OpenError::NotAFile(describe(meta.file_type())));
    }
    Ok((file, meta.len()))
}

fn describe(kind: std::fs::FileType) -> &'static str {
    if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

/// Reads a whole regular file of at most `bytes_max` bytes.
pub(crate) fn read_small(path: &Path, bytes_max: u64) -> Result<Vec<u8>, OpenError> {
    let (file, bytes) = open_regular(path)?;
    if bytes > bytes_max {
        return Err(OpenError::TooLong(bytes));
    }
    let mut out = Vec::with_capacity(usize::try_from(bytes).map_err(io::Error::other)?);
    file.take(bytes_max).read_to_end(&mut out)?;
    Ok(out)
}

/// Characters of one problem in an error.
const PROBLEM_CHARS_MAX: usize = 600;

/// A problem as one line of bounded length: names come from files that others wrote, and may hold
/// line ends, control characters and megabytes.
pub(crate) fn one_line(problem: &dyn std::fmt::Display) -> String {
    let text = problem.to_string();
    let mut out = String::new();
    for c in text.chars().take(PROBLEM_CHARS_MAX) {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    if text.chars().nth(PROBLEM_CHARS_MAX).is_some() {
        out.push('…');
    }
    out
}
