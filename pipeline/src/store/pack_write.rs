//! Makes and verifies packs. A pack grows as `FILE.partial` beside a journal of its finished blocks, so
//! that a run that was killed goes on where it was; it takes its name when it is whole.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use k3_kernel::hn::hn_encode;
use k3_kernel::{Kernels, Matrix};

use super::blocks::{Coding, StoredBlock, checkpoint_blocks};
use super::disks::{Client, DiskOptions, Disks};
use super::embed::EmbedReader;
use super::error::StoreError;
use super::gather::read_each;
use super::pack::{
    Entry, HEAD_BYTES, Manifest, PackError, PackIdentity, Preamble, bytes_max, check_entry, checksum, head,
    keep_what_is_no_pack, next_offset, open_pack, seed,
};
use super::request::{Class, span};
use super::stats::StoreCounters;
use super::trunk::{TrunkMemory, TrunkSource};
use crate::memory::arena::{Arena, SLOT_ALIGN};
use crate::model::config::ModelConfig;
use crate::model::layout::matrix_name;
use crate::model::tensors::{FileId, ModelTensors, WeightFile};
use crate::plan::ReaderPlan;
use crate::schedule::Partition;
use crate::source::WeightSource;

/// Blocks read ahead while one is coded.
const RING_SLOTS: usize = 4;
/// Bytes written between two syncs; a kill loses at most so much work.
const SYNC_BYTES: u64 = 256 << 20;

/// How a pack is made.
#[derive(Clone, Debug)]
pub struct PackOptions {
    /// Block size of the partition: that of the preset that will use the pack.
    pub block_bytes: u64,
    /// How the checkpoint is read.
    pub reader: ReaderPlan,
}

/// What a pack holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct PackSummary {
    /// Blocks.
    pub blocks: usize,
    /// Blocks that an earlier run had finished.
    pub resumed: usize,
    /// Blocks in the "hn" code.
    pub coded: usize,
    /// Bytes of the blocks in the checkpoint.
    pub stored_bytes: u64,
    /// Bytes of the blocks in the pack.
    pub packed_bytes: u64,
}

impl PackSummary {
    fn new(blocks: &[StoredBlock], entries: &[Entry], resumed: usize) -> Self {
        Self {
            blocks: entries.len(),
            resumed,
            coded: entries.iter().filter(|e| Coding::from(e.coding) == Coding::Hn).count(),
            stored_bytes: blocks.iter().map(|b| b.extent.bytes).sum(),
            packed_bytes: entries.iter().map(|e| e.bytes).sum(),
        }
    }
}

/// Packs the trunk and the head of a checkpoint into `out`, going on where a killed run was. `progress`
/// is told bytes of the checkpoint packed and in all.
///
/// # Errors
/// Too little disk space; a failed read or write; tensors that are not what they should be.
pub fn pack_trunk(
    (config, tensors): (&ModelConfig, &ModelTensors),
    options: &PackOptions,
    kernels: Kernels,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<PackSummary, PackError> {
    keep_what_is_no_pack(out)?;
    let blocks = checkpoint_blocks(tensors, Partition::new(config, options.block_bytes));
    let identity = PackIdentity { fingerprint: tensors.fingerprint, block_bytes: options.block_bytes };
    let mut partial = Partial::resume(out, identity, &blocks)?;
    let resumed = partial.entries.len();
    let rest = &blocks[resumed..];
    check_space(out, rest, &tensors.files)?;
    let total = blocks.iter().map(|b| b.extent.bytes).sum();
    let mut done: u64 = blocks[..resumed].iter().map(|b| b.extent.bytes).sum();
    progress(done, total);
    if !rest.is_empty() {
        let mut source = open_source(tensors, rest, options, kernels)?;
        source.begin_pass(true)?;
        let largest = rest.iter().map(StoredBlock::resident_bytes).max().unwrap_or(0);
        let mut buffer = vec![0; usize::try_from(largest).unwrap_or(usize::MAX)];
        for block in rest {
            let lease = source.next_block()?;
            let (coding, bytes) = encode(block, &lease.matrix, kernels, &mut buffer)?;
            partial.append(block, coding, &buffer[..bytes])?;
            done += block.extent.bytes;
            progress(done, total);
        }
    }
    let summary = PackSummary::new(&blocks, &partial.entries, resumed);
    partial.finish(identity)?;
    Ok(summary)
}

/// Reads every block of a pack and compares its checksum.
///
/// # Errors
/// A pack that was made for something else or altered; the first damaged block.
pub fn verify_pack(
    (config, tensors): (&ModelConfig, &ModelTensors),
    options: &PackOptions,
    pack: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), PackError> {
    let blocks = checkpoint_blocks(tensors, Partition::new(config, options.block_bytes));
    let identity = PackIdentity { fingerprint: tensors.fingerprint, block_bytes: options.block_bytes };
    let (file, packed) = open_pack(pack, identity, &blocks, FileId(0))?;
    let slot_bytes = packed.iter().map(|b| span(&b.extent)).max().unwrap_or(0);
    let arena = Arena::new("pack blocks", RING_SLOTS, slot_bytes).map_err(StoreError::from)?;
    let mut slots = arena.into_slots();
    let disks = open_disks(&[file], options, slot_bytes)?;
    let mut client = Client::new(&disks, RING_SLOTS);
    let total = packed.iter().map(|b| b.extent.bytes).sum();
    let mut done = 0;
    let reads = (packed.len(), |i: usize| (packed[i].extent, packed[i].checksum));
    read_each(&mut client, Class::Trunk, &mut slots, reads, |i, bytes| {
        packed[i].matrix(packed[i].coding, bytes)?;
        done += packed[i].extent.bytes;
        progress(done, total);
        Ok(())
    })?;
    Ok(())
}

fn open_disks(
    files: &[WeightFile],
    options: &PackOptions,
    slot_bytes_max: usize,
) -> Result<Arc<Disks>, StoreError> {
    let requests_max = RING_SLOTS + 1;
    let plan = &options.reader;
    Disks::open(files, &DiskOptions { plan, requests_max, slot_bytes_max, regions: &[], reader: None })
}

fn open_source(
    tensors: &ModelTensors,
    blocks: &[StoredBlock],
    options: &PackOptions,
    kernels: Kernels,
) -> Result<TrunkSource, StoreError> {
    let slot_bytes = blocks.iter().map(|b| span(&b.extent)).max().unwrap_or(0);
    let streamed = vec![false; blocks.len()];
    let memory = TrunkMemory::allocate(blocks, &streamed, RING_SLOTS, slot_bytes as u64)?;
    let disks = open_disks(&tensors.files, options, slot_bytes)?;
    let counters = Arc::new(StoreCounters::default());
    let embed = EmbedReader::new(&disks, Vec::new(), tensors.embed.clone(), Arc::clone(&counters));
    let blocks = (blocks.to_vec(), &streamed[..]);
    TrunkSource::open(&disks, embed, blocks, memory, kernels, counters, &mut |_, _| {})
}

/// Codes a block into `out`: its coding and its bytes.
fn encode(
    block: &StoredBlock,
    matrix: &Matrix<'_>,
    kernels: Kernels,
    out: &mut [u8],
) -> Result<(Coding, usize), StoreError> {
    let bytes = block.resident_bytes() as usize;
    match (block.resident_coding(), matrix) {
        (Coding::Bf16Tiled, Matrix::Bf16Rows(rows)) => {
            if let Some(coded) = hn_encode(*rows, &mut out[..bytes.saturating_sub(1)]) {
                return Ok((Coding::Hn, coded));
            }
            kernels.tile_rows(*rows, &mut out[..bytes]);
        }
        (_, Matrix::Bf16Rows(w)) => copy_rows(&mut out[..bytes], (0..w.rows()).map(|r| w.row(r))),
        (_, Matrix::F32Rows(w)) => copy_rows(&mut out[..bytes], (0..w.rows()).map(|r| w.row(r))),
        (coding, other) => {
            let what = matrix_name(block.shape.id.layer, block.shape.id.kind);
            let detail = format!("{other:?} cannot be packed as {coding:?}");
            return Err(StoreError::Malformed { what, detail });
        }
    }
    Ok((block.resident_coding(), bytes))
}

fn copy_rows<'a>(out: &mut [u8], rows: impl Iterator<Item = &'a [u8]>) {
    let mut rest = out;
    for row in rows {
        let (to, after) = rest.split_at_mut(row.len());
        to.copy_from_slice(row);
        rest = after;
    }
}

/// Sparse checkpoints (a rehearsal's) lead to sparse packs: no more is written than is there.
fn check_space(out: &Path, rest: &[StoredBlock], files: &[WeightFile]) -> Result<(), PackError> {
    let written = |source: io::Error| PackError::Write { path: out.to_owned(), source };
    let directory = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let disk = rustix::fs::statvfs(directory).map_err(|e| written(e.into()))?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    let mut present: u64 = 64 << 20;
    for file in files {
        present = present.saturating_add(std::fs::metadata(&file.path).map_err(written)?.blocks() * 512);
    }
    let needed = bytes_max(rest).min(present);
    if needed > free {
        return Err(PackError::NoSpace { path: out.to_owned(), needed, free });
    }
    Ok(())
}

/// A pack that is not whole yet.
struct Partial {
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

fn beside(out: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(out.as_os_str());
    name.push(suffix);
    PathBuf::from(name)
}

impl Partial {
    /// Opens what a killed run of the same pack left, or begins.
    fn resume(out: &Path, identity: PackIdentity, blocks: &[StoredBlock]) -> Result<Self, PackError> {
        let (path, journal_path) = (beside(out, ".partial"), beside(out, ".journal"));
        let written = |path: &Path, source| PackError::Write { path: path.to_owned(), source };
        let open = |path: &Path| {
            let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
            options.map_err(|e| written(path, e))
        };
        let (file, mut journal) = (open(&path)?, open(&journal_path)?);
        let text = std::fs::read_to_string(&journal_path).unwrap_or_default();
        let (entries, kept) = read_journal(&path, &file, &text, identity, blocks);
        let offset = entries.last().map_or(HEAD_BYTES, |e| next_offset(e.offset, e.bytes));
        // Whatever a killed run wrote past its last finished block must not shine through a hole.
        file.set_len(offset).map_err(|e| written(&path, e))?;
        journal.set_len(kept as u64).map_err(|e| written(&journal_path, e))?;
        io::Seek::seek(&mut journal, io::SeekFrom::End(0)).map_err(|e| written(&journal_path, e))?;
        if kept == 0 {
            write_line(&mut journal, &Preamble::from(identity)).map_err(|e| written(&journal_path, e))?;
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

    fn append(&mut self, block: &StoredBlock, coding: Coding, bytes: &[u8]) -> Result<(), PackError> {
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
    fn finish(mut self, identity: PackIdentity) -> Result<(), PackError> {
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
            let directory = self.out.parent().filter(|p| !p.as_os_str().is_empty());
            File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
        })();
        result.map_err(|source| PackError::Write { path: self.out.clone(), source })
    }
}

fn write_line(journal: &mut File, value: &impl serde::Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    journal.write_all(&line)
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
    let preamble = lines.next().map(|line| (line.len(), serde_json::from_str::<Preamble>(line)));
    let Some((mut kept, Ok(preamble))) = preamble else { return (Vec::new(), 0) };
    if preamble != identity.into() {
        return (Vec::new(), 0);
    }
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
