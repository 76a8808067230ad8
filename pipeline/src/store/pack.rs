//! A packed trunk: every block of a pass in one file, in order of execution, in the form the kernels
//! like best, each at a multiple of [`SLOT_ALIGN`] and with a checksum.
//!
//! | bytes | what |
//! | --- | --- |
//! | 4096 | head: `K3PACK` and a version, place and length of the manifest, its checksum, the head's own |
//! | … | the blocks, in order, each padded to a multiple of 4096 |
//! | … | the manifest, JSON: fingerprint of the checkpoint, block size, and a line for each block |
//!
//! A pack is opened for one checkpoint and one partition into blocks, and every place, size and coding in
//! it must be the one that these lead to. A block's checksum covers its number and its tensor, too, so
//! that blocks that changed places are seen.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::blocks::{Coding, StoredBlock, checkpoint_blocks};
use super::error::StoreError;
use crate::memory::arena::SLOT_ALIGN;
use crate::model::config::ModelConfig;
use crate::model::layout::matrix_name;
use crate::model::tensors::{Extent, FileId, Fingerprint, ModelTensors, WeightFile};
use crate::plan::PackSizes;
use crate::schedule::{BlockId, Partition};

const MAGIC: [u8; 8] = *b"K3PACK\0\x01";
/// Bytes of the head, and where the first block lies.
pub(crate) const HEAD_BYTES: u64 = SLOT_ALIGN as u64;
/// Of those, the bytes in use.
const HEAD_WORDS_BYTES: u64 = 40;
/// Manifests are a few hundred bytes per block; more than this is no manifest.
const MANIFEST_BYTES_MAX: u64 = 256 << 20;

/// A packed trunk cannot be made or used.
#[derive(Debug, Error)]
pub enum PackError {
    /// The file is not a pack, or not a whole one.
    #[error("{} is not a whole pack: {detail}; make it again with k3 pack", path.display())]
    NotAPack {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// What lies where the pack is to be written is something else: it is left as it is.
    #[error("{} exists and is {what}; give another name, or remove it first", path.display())]
    WouldReplace {
        /// The file.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// Two runs at once would write over each other's blocks.
    #[error("{} is being written by another k3 pack; wait for it, or give another name", path.display())]
    Busy {
        /// The pack.
        path: PathBuf,
    },
    /// The pack was made from another checkpoint or with another block size.
    #[error("{} was made for another {what}: expected {expected}, found {got}; make it again with k3 pack", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// Of the checkpoint and plan at hand.
        expected: String,
        /// Of the pack.
        got: String,
    },
    /// An entry of the manifest is not the one that the checkpoint leads to.
    #[error("{}: {what} of block {block} is {got}, expected {expected}; the pack was altered", path.display())]
    Entry {
        /// The file.
        path: PathBuf,
        /// Number of the block.
        block: usize,
        /// What differs.
        what: &'static str,
        /// As it must be.
        expected: String,
        /// As it stands there.
        got: String,
    },
    /// The disk has too little room.
    #[error("{} needs up to {needed} bytes more, its disk has {free}", path.display())]
    NoSpace {
        /// The pack.
        path: PathBuf,
        /// Bytes that may be written.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The system refused to write.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The pack is not there, or the system refused to read it.
    #[error("cannot open the pack {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The path leads to a directory, a pipe or a device.
    #[error("{}: not a regular file, expected a pack", path.display())]
    NotARegularFile {
        /// The path.
        path: PathBuf,
    },
    /// The checkpoint or the pack cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What a pack is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackIdentity {
    /// The checkpoint.
    pub fingerprint: Fingerprint,
    /// Block size of the partition.
    pub block_bytes: u64,
}

/// One block in the manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    pub(crate) tensor: String,
    pub(crate) rows: [usize; 2],
    pub(crate) coding: PackCoding,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// Hexadecimal: JSON numbers do not hold 64 bits everywhere.
    pub(crate) checksum: String,
}

/// [`Coding`] under its name in manifests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PackCoding {
    Bf16Rows,
    F32Rows,
    Bf16Tiled,
    Hn,
}

impl From<PackCoding> for Coding {
    fn from(c: PackCoding) -> Self {
        match c {
            PackCoding::Bf16Rows => Self::Bf16Rows,
            PackCoding::F32Rows => Self::F32Rows,
            PackCoding::Bf16Tiled => Self::Bf16Tiled,
            PackCoding::Hn => Self::Hn,
        }
    }
}

impl From<Coding> for PackCoding {
    fn from(c: Coding) -> Self {
        match c {
            Coding::Bf16Rows => Self::Bf16Rows,
            Coding::F32Rows => Self::F32Rows,
            Coding::Bf16Tiled => Self::Bf16Tiled,
            Coding::Hn => Self::Hn,
        }
    }
}

/// The first line of a journal, and the manifest but for its blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Preamble {
    pub(crate) fingerprint: String,
    pub(crate) block_bytes: u64,
}

impl From<PackIdentity> for Preamble {
    fn from(id: PackIdentity) -> Self {
        Self { fingerprint: id.fingerprint.to_string(), block_bytes: id.block_bytes }
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    pub(crate) made_for: Preamble,
    pub(crate) blocks: Vec<Entry>,
}

/// What a block's checksum starts from: its number, its tensor and its rows.
pub(crate) fn seed(number: usize, id: &BlockId) -> u64 {
    let name = matrix_name(id.layer, id.kind);
    xxh3_64(format!("{number} {name} {}..{}", id.rows.start, id.rows.end).as_bytes())
}

pub(crate) fn checksum(seed: u64, bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(bytes, seed)
}

/// Where the block after one of `bytes` bytes at `offset` lies.
pub(crate) fn next_offset(offset: u64, bytes: u64) -> u64 {
    (offset + bytes).next_multiple_of(SLOT_ALIGN as u64)
}

/// The head page of a finished pack.
pub(crate) fn head(manifest_offset: u64, manifest: &[u8]) -> Vec<u8> {
    let mut head = Vec::with_capacity(SLOT_ALIGN);
    head.extend_from_slice(&MAGIC);
    for word in [manifest_offset, manifest.len() as u64, xxh3_64(manifest)] {
        head.extend_from_slice(&word.to_le_bytes());
    }
    let own = xxh3_64(&head);
    head.extend_from_slice(&own.to_le_bytes());
    head.resize(SLOT_ALIGN, 0);
    head
}

/// Opens a pack: its file, and the blocks as they lie in it. `file` is the number it gets among the
/// weight files; `blocks` are the checkpoint's.
///
/// # Errors
/// A file that is no whole pack, or one that was made for something else or altered.
pub fn open_pack(
    path: &Path,
    identity: PackIdentity,
    blocks: &[StoredBlock],
    file: FileId,
) -> Result<(WeightFile, Vec<StoredBlock>), PackError> {
    let (manifest, manifest_offset, bytes) = read_manifest(path)?;
    let foreign = |what, expected: String, got: String| {
        Err(PackError::Foreign { path: path.to_owned(), what, expected, got })
    };
    let made_for = Preamble::from(identity);
    if manifest.made_for.fingerprint != made_for.fingerprint {
        return foreign("checkpoint", made_for.fingerprint, manifest.made_for.fingerprint);
    }
    if manifest.made_for.block_bytes != made_for.block_bytes {
        let (expected, got) = (made_for.block_bytes, manifest.made_for.block_bytes);
        return foreign("block size", expected.to_string(), got.to_string());
    }
    if manifest.blocks.len() != blocks.len() {
        return foreign("number of blocks", blocks.len().to_string(), manifest.blocks.len().to_string());
    }
    let mut offset = HEAD_BYTES;
    let mut packed = Vec::with_capacity(blocks.len());
    for (number, (block, entry)) in blocks.iter().zip(&manifest.blocks).enumerate() {
        packed.push(check_entry(path, number, block, entry, offset, file)?);
        offset = next_offset(offset, entry.bytes);
    }
    if offset != manifest_offset {
        let detail = format!("its blocks end at {offset}, its manifest begins at {manifest_offset}");
        return Err(PackError::NotAPack { path: path.to_owned(), detail });
    }
    Ok((WeightFile { path: path.to_owned(), bytes }, packed))
}

/// Refuses a target that holds anything but a pack, or one of another version, checkpoint or block size: a
/// slip in its name must not cost a weight file, nor the work of another pack.
pub(super) fn keep_what_is_another(out: &Path, identity: PackIdentity) -> Result<(), PackError> {
    let replaced = |what| Err(PackError::WouldReplace { path: out.to_owned(), what });
    let Ok(meta) = std::fs::metadata(out) else {
        return if out.is_symlink() { replaced("a link that leads nowhere") } else { Ok(()) };
    };
    if !meta.is_file() {
        return replaced("no pack");
    }
    let open = |source| PackError::Open { path: out.to_owned(), source };
    let mut begins = [0; MAGIC.len()];
    let read = File::open(out).map_err(open)?.read_exact_at(&mut begins, 0);
    if read.is_err() || begins[..6] != MAGIC[..6] {
        return replaced("no pack");
    }
    if begins != MAGIC {
        return replaced("a pack of another version");
    }
    let (made_for, wanted) = match read_manifest(out) {
        Ok((manifest, ..)) => (manifest.made_for, Preamble::from(identity)),
        // A damaged one is of no use to anybody.
        Err(_) => return Ok(()),
    };
    if made_for.fingerprint != wanted.fingerprint {
        return replaced("the pack of another checkpoint");
    }
    if made_for.block_bytes != wanted.block_bytes {
        return replaced("a pack with another block size");
    }
    Ok(())
}

/// Checks that what lies between the blocks of an opened pack is still zeros, and in the rest of its head.
///
/// # Errors
/// Names the first place that is not.
pub(super) fn check_padding(path: &Path, blocks: &[StoredBlock]) -> Result<(), PackError> {
    let not = |detail: String| PackError::NotAPack { path: path.to_owned(), detail };
    let file = File::open(path).map_err(|source| PackError::Open { path: path.to_owned(), source })?;
    let blocks = blocks.iter().map(|b| (b.extent.offset + b.extent.bytes, b.extent.offset, b.extent.bytes));
    let gaps = blocks.map(|(from, offset, bytes)| from..next_offset(offset, bytes));
    let mut bytes = [0; SLOT_ALIGN];
    for gap in std::iter::once(HEAD_WORDS_BYTES..HEAD_BYTES).chain(gaps) {
        let bytes = &mut bytes[..(gap.end - gap.start) as usize];
        file.read_exact_at(bytes, gap.start)
            .map_err(|e| not(format!("its padding at {} cannot be read: {e}", gap.start)))?;
        if let Some(at) = bytes.iter().position(|byte| *byte != 0) {
            return Err(not(format!("byte {} of its padding is not zero", gap.start + at as u64)));
        }
    }
    Ok(())
}

/// Sizes of the blocks in the pack at `path`, for a plan; the pack is checked as [`open_pack`] does.
///
/// # Errors
/// As [`open_pack`].
pub fn pack_sizes(
    path: &Path,
    (config, tensors): (&ModelConfig, &ModelTensors),
    block_bytes: u64,
) -> Result<PackSizes, PackError> {
    let blocks = checkpoint_blocks(tensors, Partition::new(config, block_bytes));
    let identity = PackIdentity { fingerprint: tensors.fingerprint, block_bytes };
    let (_, packed) = open_pack(path, identity, &blocks, FileId(0))?;
    Ok(PackSizes { block_bytes, blocks: packed.iter().map(|b| b.extent.bytes).collect() })
}

/// The manifest, where it lies, and the length of the file.
fn read_manifest(path: &Path) -> Result<(Manifest, u64, u64), PackError> {
    let not = |detail: String| PackError::NotAPack { path: path.to_owned(), detail };
    let open = |source| PackError::Open { path: path.to_owned(), source };
    let meta = std::fs::metadata(path).map_err(open)?;
    if !meta.is_file() {
        return Err(PackError::NotARegularFile { path: path.to_owned() });
    }
    let file = File::open(path).map_err(open)?;
    let mut page = [0; HEAD_WORDS_BYTES as usize];
    file.read_exact_at(&mut page, 0).map_err(|e| not(format!("its head cannot be read: {e}")))?;
    let word = |n: usize| u64::from_le_bytes(std::array::from_fn(|i| page[8 * n + i]));
    if page[..8] != MAGIC {
        return Err(not("it does not begin as a pack of this version does".to_owned()));
    }
    if xxh3_64(&page[..32]) != word(4) {
        return Err(not("its head does not match its checksum".to_owned()));
    }
    let (offset, bytes, sum) = (word(1), word(2), word(3));
    if offset.checked_add(bytes) != Some(meta.len()) || bytes > MANIFEST_BYTES_MAX {
        return Err(not(format!("it has {} bytes, its head says {offset} and {bytes}", meta.len())));
    }
    let mut text = vec![0; bytes as usize];
    file.read_exact_at(&mut text, offset).map_err(|e| not(format!("its manifest cannot be read: {e}")))?;
    if xxh3_64(&text) != sum {
        return Err(not("its manifest does not match its checksum".to_owned()));
    }
    let manifest = serde_json::from_slice(&text).map_err(|e| not(format!("its manifest: {e}")))?;
    Ok((manifest, offset, meta.len()))
}

/// The block as it lies in the pack, when the entry is the one it must have.
pub(crate) fn check_entry(
    path: &Path,
    number: usize,
    block: &StoredBlock,
    entry: &Entry,
    offset: u64,
    file: FileId,
) -> Result<StoredBlock, PackError> {
    let wrong = |what, expected: String, got: String| {
        Err(PackError::Entry { path: path.to_owned(), block: number, what, expected, got })
    };
    let id = &block.shape.id;
    let name = matrix_name(id.layer, id.kind);
    if entry.tensor != name {
        return wrong("tensor", name, entry.tensor.clone());
    }
    let rows = [id.rows.start, id.rows.end];
    if entry.rows != rows {
        return wrong("row range", format!("{rows:?}"), format!("{:?}", entry.rows));
    }
    if entry.offset != offset {
        return wrong("offset", offset.to_string(), entry.offset.to_string());
    }
    let coding = Coding::from(entry.coding);
    if coding != block.resident_coding()
        && !(coding == Coding::Hn && block.resident_coding() == Coding::Bf16Tiled)
    {
        return wrong("coding", format!("{:?}", block.resident_coding()), format!("{coding:?}"));
    }
    let whole = block.resident_bytes();
    let fits = if coding == Coding::Hn { entry.bytes < whole } else { entry.bytes == whole };
    if !fits {
        return wrong("size", whole.to_string(), entry.bytes.to_string());
    }
    let Ok(sum) = u64::from_str_radix(&entry.checksum, 16) else {
        return wrong("checksum", "16 hexadecimal digits".to_owned(), entry.checksum.clone());
    };
    Ok(StoredBlock {
        shape: block.shape.clone(),
        coding,
        extent: Extent { file, offset, bytes: entry.bytes },
        checksum: Some(BlockChecksum { number, seed: seed(number, id), sum }),
    })
}

/// What a block's bytes must hash to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockChecksum {
    /// Number of the block in its pack.
    pub(crate) number: usize,
    pub(crate) seed: u64,
    pub(crate) sum: u64,
}

impl BlockChecksum {
    /// Compares.
    ///
    /// # Errors
    /// Names the block when its bytes are not what was packed.
    pub(crate) fn check(&self, path: &Path, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let got = checksum(self.seed, bytes);
        if got == self.sum {
            return Ok(());
        }
        let (path, block, expected) = (path.to_owned(), self.number, self.sum);
        Err(StoreError::Checksum { path, block, offset, expected, got })
    }
}

/// Bytes that packing these blocks takes at most, with their lines in the manifest.
pub(crate) fn bytes_max(blocks: &[StoredBlock]) -> u64 {
    const ENTRY_BYTES: u64 = 512;
    HEAD_BYTES + blocks.iter().map(|b| next_offset(0, b.resident_bytes()) + ENTRY_BYTES).sum::<u64>()
}
