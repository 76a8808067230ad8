//! A file to read where no weight file lies yet.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, fadvise};

use crate::model::tensors::WeightFile;

/// Bytes written at once.
const PART_BYTES: usize = 4 << 20;

/// Noise on the disk of a directory, in a file without a name: however the process ends, nothing stays.
#[derive(Debug)]
pub struct ProbeFile {
    file: File,
    bytes: u64,
}

impl ProbeFile {
    /// Writes `bytes` bytes, rounded up to whole parts of 4 MiB, to the disk of `dir`. `progress` is told
    /// bytes written.
    ///
    /// # Errors
    /// The system's: no directory, no right to write, no room.
    pub fn write(dir: &Path, bytes: u64, progress: &mut dyn FnMut(u64)) -> io::Result<Self> {
        let mut file = tempfile::tempfile_in(dir)?;
        let parts = bytes.div_ceil(PART_BYTES as u64).max(1);
        let mut part = vec![0u8; PART_BYTES];
        let mut noise = 0u64;
        for done in 1..=parts {
            for word in part.chunks_exact_mut(8) {
                noise = noise.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
                // The upper bits are the good ones; disks that compress find nothing in them.
                word.copy_from_slice(&(noise ^ (noise >> 32)).to_le_bytes());
            }
            file.write_all(&part)?;
            progress(done * PART_BYTES as u64);
        }
        file.sync_all()?;
        // Reads that cannot bypass the page cache shall at least find it empty.
        fadvise(&file, 0, None, Advice::DontNeed)?;
        Ok(Self { file, bytes: parts * PART_BYTES as u64 })
    }

    /// The file as the readers open one.
    #[must_use]
    pub fn as_weight_file(&self) -> WeightFile {
        let path = PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        WeightFile { path, bytes: self.bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_can_be_read_and_has_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let probe = ProbeFile::write(dir.path(), 1, &mut |_| {}).unwrap();
        let file = probe.as_weight_file();
        let bytes = std::fs::read(&file.path).unwrap();
        assert_eq!((bytes.len(), file.bytes), (PART_BYTES, PART_BYTES as u64));
        assert_ne!(bytes[..4096], bytes[4096..8192]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(ProbeFile::write(&dir.path().join("absent"), 1, &mut |_| {}).is_err());
    }
}
