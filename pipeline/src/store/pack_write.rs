//! Makes and verifies packs.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use k3_kernel::hn::hn_encode;
use k3_kernel::{Kernels, Matrix};

use super::blocks::{Coding, StoredBlock, checkpoint_blocks};
use super::disks::{Client, DiskOptions, Disks};
use super::embed::EmbedReader;
use super::error::StoreError;
use super::gather::read_each;
use super::pack::{
    Entry, PackError, PackIdentity, bytes_max, check_padding, keep_what_is_another, open_pack,
};
use super::pack_partial::Partial;
use super::request::{Class, span};
use super::stats::StoreCounters;
use super::trunk::{TrunkMemory, TrunkSource};
use crate::memory::arena::Arena;
use crate::model::config::ModelConfig;
use crate::model::layout::matrix_name;
use crate::model::tensors::{FileId, ModelTensors, WeightFile};
use crate::plan::ReaderPlan;
use crate::schedule::Partition;
use crate::source::WeightSource;
use crate::temporary::directory_of;

/// Blocks read ahead while one is coded.
const RING_SLOTS: usize = 4;

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

/// Packs the trunk and the head of a checkpoint into `out`, or what it is a link to, going on where a killed
/// run was. `progress` is told bytes of the checkpoint packed and in all.
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
    let identity = PackIdentity { fingerprint: tensors.fingerprint, block_bytes: options.block_bytes };
    keep_what_is_another(out, identity)?;
    // Where the name is a link, the pack is made beside what it leads to: that is the disk that is meant.
    let out = &std::fs::canonicalize(out).unwrap_or_else(|_| out.to_owned());
    let blocks = checkpoint_blocks(tensors, Partition::new(config, options.block_bytes));
    let mut partial = Partial::resume(out, identity, &blocks)?;
    let resumed = partial.entries().len();
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
    let summary = PackSummary::new(&blocks, partial.entries(), resumed);
    partial.finish(identity)?;
    Ok(summary)
}

/// Reads every block of a pack and compares its checksum, and looks at the padding between them.
///
/// # Errors
/// A pack that was made for something else or altered anywhere; the first damaged block.
pub fn verify_pack(
    (config, tensors): (&ModelConfig, &ModelTensors),
    options: &PackOptions,
    pack: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), PackError> {
    let blocks = checkpoint_blocks(tensors, Partition::new(config, options.block_bytes));
    let identity = PackIdentity { fingerprint: tensors.fingerprint, block_bytes: options.block_bytes };
    let (file, packed) = open_pack(pack, identity, &blocks, FileId(0))?;
    check_padding(pack, &packed)?;
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
    let disk = rustix::fs::statvfs(directory_of(out)).map_err(|e| written(e.into()))?;
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
