//! A pack under way: it grows as `FILE.partial` beside a journal of its finished blocks, so that a run that
//! was killed goes on where it was; it takes its name when it is whole.

use std::ffi::OsString;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::blocks::{Coding, StoredBlock};
use super::pack::{
    Entry, HEAD_BYTES, Manifest, PackError, PackIdentity, Preamble, check_entry, checksum, head, next_offset,
    seed,
};
use crate::memory::arena::SLOT_ALIGN;
use crate::model::layout::matrix_name;
use crate::model::tensors::FileId;
use crate::temporary::directory_of;

/// Bytes written between two syncs; a kill loses at most so much work.
const SYNC_BYTES: u64 = 256 << 20;
/// The first line of a journal is shorter.
const PREAMBLE_BYTES_MAX: u64 = 4096;

/// A pack that is not whole yet.
pub(super) struct Partial {
    out: PathBuf,
    path: PathBuf,
    file: File,
    journal_path: PathBuf,
    journal: File,
    entries: Vec<Entry>,
    /// Entries in the journal: their blocks are on the disk for certain.
    journaled: usize,
    /// Where the next block goes.
    offset: u64,
    unsynced: u64,
}

fn with_suffix(out: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(out.as_os_str());
    name.push(suffix);
    PathBuf::from(name)
}

impl Partial {
    /// Opens what a killed run of the same pack left, or begins.
    ///
    /// # Errors
    /// Files in its places that no such run left; another run at work on them; a disk that refuses.
    pub(super) fn resume(
        out: &Path,
        identity: PackIdentity,
        blocks: &[StoredBlock],
    ) -> Result<Self, PackError> {
        let (path, journal_path) = (with_suffix(out, ".partial"), with_suffix(out, ".journal"));
        keep_what_is_not_ours(&path, &journal_path)?;
        let written = |path: &Path, source| PackError::Write { path: path.to_owned(), source };
        let open = |path: &Path| {
            let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
            options.map_err(|e| written(path, e))
        };
        let mut journal = open(&journal_path)?;
        if is_of_another_run(&journal).map_err(|e| written(&journal_path, e))? {
            return Err(PackError::Busy { path: out.to_owned() });
        }
        let file = open(&path)?;
        let text = std::fs::read_to_string(&journal_path).unwrap_or_default();
        let (entries, kept) = read_journal(&path, &file, &text, identity, blocks);
        let offset = entries.last().map_or(HEAD_BYTES, |e| next_offset(e.offset, e.bytes));
        // Whatever a killed run wrote past its last finished block must not shine through a hole. While
        // there is no journal, there is nothing in the file either: else it would not be known as ours.
        file.set_len(if kept == 0 { 0 } else { offset }).map_err(|e| written(&path, e))?;
        journal.set_len(kept as u64).map_err(|e| written(&journal_path, e))?;
        io::Seek::seek(&mut journal, io::SeekFrom::End(0)).map_err(|e| written(&journal_path, e))?;
        if kept == 0 {
            write_line(&mut journal, &Preamble::from(identity))
                .and_then(|()| journal.sync_data())
                .map_err(|e| written(&journal_path, e))?;
        }
        let journaled = entries.len();
        Ok(Self {
            out: out.to_owned(),
            path,
            file,
            journal_path,
            journal,
            entries,
            journaled,
            offset,
            unsynced: 0,
        })
    }

    /// The finished blocks.
    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Adds a block.
    pub(super) fn append(
        &mut self,
        block: &StoredBlock,
        coding: Coding,
        bytes: &[u8],
    ) -> Result<(), PackError> {
        let id = &block.shape.id;
        write_with_holes(&self.file, self.offset, bytes).map_err(|e| self.failed(e))?;
        self.entries.push(Entry {
            tensor: matrix_name(id.layer, id.kind),
            rows: [id.rows.start, id.rows.end],
            coding: coding.into(),
            offset: self.offset,
            bytes: bytes.len() as u64,
            checksum: format!("{:016x}", checksum(seed(self.entries.len(), id), bytes)),
        });
        self.offset = next_offset(self.offset, bytes.len() as u64);
        self.unsynced += bytes.len() as u64;
        if self.unsynced >= SYNC_BYTES { self.sync() } else { Ok(()) }
    }

    fn failed(&self, source: io::Error) -> PackError {
        PackError::Write { path: self.path.clone(), source }
    }

    /// Blocks first, then the lines that say they are there.
    fn sync(&mut self) -> Result<(), PackError> {
        self.file.set_len(self.offset).and_then(|()| self.file.sync_data()).map_err(|e| self.failed(e))?;
        for entry in &self.entries[self.journaled..] {
            let path = &self.journal_path;
            write_line(&mut self.journal, entry)
                .map_err(|source| PackError::Write { path: path.clone(), source })?;
        }
        self.journaled = self.entries.len();
        self.unsynced = 0;
        Ok(())
    }

    /// Writes manifest and head, and gives the pack its name.
    pub(super) fn finish(mut self, identity: PackIdentity) -> Result<(), PackError> {
        self.sync()?;
        let manifest = Manifest { made_for: identity.into(), blocks: std::mem::take(&mut self.entries) };
        let result = (|| {
            let text = serde_json::to_vec(&manifest)?;
            self.file.write_all_at(&text, self.offset)?;
            self.file.write_all_at(&head(self.offset, &text), 0)?;
            self.file.set_len(self.offset + text.len() as u64)?;
            self.file.sync_all()?;
            std::fs::rename(&self.path, &self.out)?;
            std::fs::remove_file(&self.journal_path)?;
            File::open(directory_of(&self.out))?.sync_all()
        })();
        result.map_err(|source| PackError::Write { path: self.out.clone(), source })
    }
}

fn write_line(journal: &mut File, value: &impl serde::Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    journal.write_all(&line)
}

/// Takes the journal for this run, until it is closed; whether another run has it, or had it when it was
/// opened here and has finished since. File systems without locks tell nothing.
pub(super) fn is_of_another_run(journal: &File) -> io::Result<bool> {
    let taken = matches!(journal.try_lock(), Err(TryLockError::WouldBlock));
    Ok(taken || journal.metadata()?.nlink() == 0)
}

/// What the first line of a journal says.
fn preamble(text: &str) -> Option<Preamble> {
    serde_json::from_str(text.split_inclusive('\n').next()?.strip_suffix('\n')?).ok()
}

/// Refuses to go on with what no run of this program left: a slip in a name must not cost a file.
fn keep_what_is_not_ours(partial: &Path, journal: &Path) -> Result<(), PackError> {
    let kept = |path: &Path, what| Err(PackError::WouldReplace { path: path.to_owned(), what });
    let there = |path: &Path| path.symlink_metadata().ok();
    let mut begins = Vec::new();
    if let Some(meta) = there(journal) {
        let read = |file: File| file.take(PREAMBLE_BYTES_MAX).read_to_end(&mut begins);
        if !meta.is_file() || File::open(journal).and_then(read).is_err() {
            return kept(journal, "no journal of a pack");
        }
    }
    let is_ours = preamble(&String::from_utf8_lossy(&begins)).is_some();
    if !is_ours && !begins.is_empty() {
        return kept(journal, "no journal of a pack");
    }
    match there(partial) {
        Some(meta) if !meta.is_file() || meta.len() > 0 && !is_ours => {
            kept(partial, "no pack that this program began")
        }
        _ => Ok(()),
    }
}

/// The finished blocks of a journal and the length of the text that tells of them; nothing when it is of
/// another pack.
fn read_journal(
    path: &Path,
    file: &File,
    text: &str,
    identity: PackIdentity,
    blocks: &[StoredBlock],
) -> (Vec<Entry>, usize) {
    let mut lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let first = lines.next().unwrap_or_default();
    if preamble(first) != Some(identity.into()) {
        return (Vec::new(), 0);
    }
    let mut kept = first.len();
    let (mut entries, mut offset) = (Vec::new(), HEAD_BYTES);
    let mut lengths = Vec::new();
    for (number, (line, block)) in lines.zip(blocks).enumerate() {
        let Ok(entry) = serde_json::from_str::<Entry>(line) else { break };
        if check_entry(path, number, block, &entry, offset, FileId(0)).is_err() {
            break;
        }
        offset = next_offset(offset, entry.bytes);
        lengths.push(line.len());
        entries.push(entry);
    }
    // The blocks were synced before their lines were written; the last one is looked at all the same.
    while let Some(last) = entries.last() {
        let number = entries.len() - 1;
        let mut bytes = vec![0; usize::try_from(last.bytes).unwrap_or(0)];
        let sum = file.read_exact_at(&mut bytes, last.offset);
        let sum = sum.map(|()| checksum(seed(number, &blocks[number].shape.id), &bytes));
        if sum.is_ok_and(|sum| format!("{sum:016x}") == last.checksum) {
            break;
        }
        entries.pop();
        lengths.pop();
    }
    kept += lengths.iter().sum::<usize>();
    (entries, kept)
}

/// Writes all but whole pages of zeros, which the file has as holes.
fn write_with_holes(file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    let is_zero = |page: &[u8]| page.iter().all(|&b| b == 0);
    let mut at = 0;
    while at < bytes.len() {
        let pages = bytes[at..].chunks(SLOT_ALIGN);
        let zero = is_zero(&bytes[at..(at + SLOT_ALIGN).min(bytes.len())]);
        let run: usize = pages.take_while(|page| is_zero(page) == zero).map(<[u8]>::len).sum();
        if !zero {
            file.write_all_at(&bytes[at..at + run], offset + at as u64)?;
        }
        at += run;
    }
    Ok(())
}
