//! Open weight files: opened once, with O_DIRECT where it works, watched for change while in use.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::error::StoreError;
use crate::memory::arena::{Arena, SLOT_ALIGN};
use crate::model::tensors::{Extent, FileId, WeightFile};
use crate::plan::DirectMode;

/// What tells that a file is still the one that was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    bytes: u64,
    modified_ns: u64,
}

impl Identity {
    fn of(m: &Metadata) -> Self {
        // Wraps beyond the year 2554, where it still tells one time from another.
        let modified_ns = (m.mtime() as u64).wrapping_mul(1_000_000_000).wrapping_add(m.mtime_nsec() as u64);
        Self { device: m.dev(), inode: m.ino(), bytes: m.len(), modified_ns }
    }
}

/// One open weight file.
#[derive(Debug)]
pub struct SourceFile {
    path: PathBuf,
    file: File,
    direct: bool,
    identity: Identity,
}

impl SourceFile {
    /// Opens a file that had `bytes` bytes when its header was read.
    ///
    /// # Errors
    /// No regular file, unreadable, of another length; O_DIRECT demanded and refused.
    pub fn open(path: &Path, bytes: u64, direct: DirectMode) -> Result<Self, StoreError> {
        let open_error = |source| StoreError::Open { path: path.to_owned(), source };
        // Asked before opening: to open a FIFO would wait for a writer.
        if !std::fs::metadata(path).map_err(open_error)?.is_file() {
            return Err(StoreError::NotARegularFile { path: path.to_owned() });
        }
        let (file, direct) = match direct {
            DirectMode::Off => (File::open(path).map_err(open_error)?, false),
            DirectMode::On | DirectMode::Auto => match open_direct(path) {
                Ok(file) => (file, true),
                Err(source) if direct == DirectMode::On => {
                    return Err(StoreError::DirectUnavailable { path: path.to_owned(), source });
                }
                Err(_) => (File::open(path).map_err(open_error)?, false),
            },
        };
        let identity = Identity::of(&file.metadata().map_err(open_error)?);
        if identity.bytes != bytes {
            return Err(changed(path, "length", bytes, identity.bytes));
        }
        Ok(Self { path: path.to_owned(), file, direct, identity })
    }

    /// Where it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// True when reads bypass the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Number of the device it lies on.
    #[must_use]
    pub fn device(&self) -> u64 {
        self.identity.device
    }

    /// Bytes at `offset`, as many as the system gives at once.
    ///
    /// # Errors
    /// The system's.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.file.read_at(buf, offset)
    }

    /// The descriptor, for I/O rings.
    #[must_use]
    pub fn raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// An error when the open file was truncated, extended or written since it was opened.
    ///
    /// # Errors
    /// What changed.
    pub fn check_unchanged(&self) -> Result<(), StoreError> {
        let now = self.file.metadata();
        let now = now.map_err(|source| StoreError::Open { path: self.path.clone(), source })?;
        self.compare(Identity::of(&now))
    }

    /// As [`Self::check_unchanged`], and an error when another file stands at its path now.
    ///
    /// # Errors
    /// What changed.
    pub fn check_in_place(&self) -> Result<(), StoreError> {
        let now = std::fs::metadata(&self.path);
        let now = now.map_err(|source| StoreError::Open { path: self.path.clone(), source })?;
        self.compare(Identity::of(&now))
    }

    fn compare(&self, now: Identity) -> Result<(), StoreError> {
        let was = self.identity;
        for (what, expected, got) in [
            ("device", was.device, now.device),
            ("inode", was.inode, now.inode),
            ("length", was.bytes, now.bytes),
            ("modification time", was.modified_ns, now.modified_ns),
        ] {
            if expected != got {
                return Err(changed(&self.path, what, expected, got));
            }
        }
        Ok(())
    }
}

fn changed(path: &Path, what: &'static str, expected: u64, got: u64) -> StoreError {
    StoreError::FileChanged { path: path.to_owned(), what, expected, got }
}

/// Opens with O_DIRECT and proves it by a read.
fn open_direct(path: &Path) -> io::Result<File> {
    let flag = rustix::fs::OFlags::DIRECT.bits();
    let file = OpenOptions::new().read(true).custom_flags(flag.cast_signed()).open(path)?;
    let slots = Arena::new("O_DIRECT probe", 1, SLOT_ALIGN).map_err(io::Error::other)?.into_slots();
    for mut slot in slots {
        file.read_at(&mut slot, 0)?;
    }
    Ok(file)
}

/// All weight files of a model.
#[derive(Debug)]
pub struct FileTable {
    files: Vec<SourceFile>,
}

impl FileTable {
    /// Opens every file.
    ///
    /// # Errors
    /// The first that cannot be opened or is not what its header was read from.
    pub fn open(files: &[WeightFile], direct: DirectMode) -> Result<Self, StoreError> {
        let files = files.iter().map(|f| SourceFile::open(&f.path, f.bytes, direct));
        Ok(Self { files: files.collect::<Result<_, _>>()? })
    }

    /// The files, by number.
    #[must_use]
    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// One file.
    ///
    /// # Errors
    /// When there is none of this number.
    pub fn get(&self, id: FileId) -> Result<&SourceFile, StoreError> {
        let unknown = StoreError::UnknownFile { file: id.0, files: self.files.len() };
        self.files.get(usize::from(id.0)).ok_or(unknown)
    }

    /// The file of an extent, when the extent lies inside it.
    ///
    /// # Errors
    /// An unknown file; an extent past its end.
    pub fn locate(&self, extent: &Extent) -> Result<&SourceFile, StoreError> {
        let file = self.get(extent.file)?;
        let length = file.identity.bytes;
        if extent.offset.checked_add(extent.bytes).is_none_or(|end| end > length) {
            let path = file.path.clone();
            return Err(StoreError::OutsideFile { path, offset: extent.offset, bytes: extent.bytes, length });
        }
        Ok(file)
    }

    /// Checks that every file still stands at its path, unchanged.
    ///
    /// # Errors
    /// The first that does not.
    pub fn check_in_place(&self) -> Result<(), StoreError> {
        self.files.iter().try_for_each(SourceFile::check_in_place)
    }
}
