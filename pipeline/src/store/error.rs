//! What can go wrong between a weight file and a leased block.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::memory::arena::ArenaError;
use crate::units::{ExpertId, LayerIndex, TokenId};

/// Reading weights failed. Every variant about a file names it, and where in it.
#[derive(Debug, Error)]
pub enum StoreError {
    /// A weight file cannot be opened.
    #[error("cannot open weight file {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A weight file is a directory, FIFO, device or socket.
    #[error("{} is not a regular file", path.display())]
    NotARegularFile {
        /// The file.
        path: PathBuf,
    },
    /// A weight file has another length, date or identity than when its header was read.
    #[error(
        "weight file {} changed while in use: {what} was {expected}, is {got}; restore the file and start again",
        path.display()
    )]
    FileChanged {
        /// The file.
        path: PathBuf,
        /// What differs: "length", "modification time", "inode".
        what: &'static str,
        /// The value when the file was opened.
        expected: u64,
        /// The value now.
        got: u64,
    },
    /// The system refused a read.
    #[error("cannot read {bytes} bytes at offset {offset} of {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        bytes: u64,
        /// The system's answer.
        source: io::Error,
    },
    /// A read ended before its last byte.
    #[error(
        "short read at offset {offset} of {}: expected {expected} bytes, got {got}; the file may be truncated",
        path.display()
    )]
    ShortRead {
        /// The file.
        path: PathBuf,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        expected: u64,
        /// Bytes that came.
        got: u64,
    },
    /// A tensor's bytes are said to lie past the end of its file.
    #[error(
        "{bytes} bytes at offset {offset} lie outside {}, which has {length} bytes",
        path.display()
    )]
    OutsideFile {
        /// The file.
        path: PathBuf,
        /// First byte.
        offset: u64,
        /// Bytes.
        bytes: u64,
        /// Length of the file.
        length: u64,
    },
    /// A weight file number that the model does not have.
    #[error("weight file number {file} is unknown: the model has {files}")]
    UnknownFile {
        /// The number.
        file: u16,
        /// Number of files.
        files: usize,
    },
    /// The reader asked for is not to be had on this system.
    #[error("the {engine} reader is not available here: {source}; set reader.engine = \"auto\" or \"pread\"")]
    EngineUnavailable {
        /// The engine asked for.
        engine: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// O_DIRECT was demanded and does not work for a file.
    #[error(
        "O_DIRECT does not work for {}: {source}; set reader.direct = \"auto\" or \"off\"",
        path.display()
    )]
    DirectUnavailable {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Memory for slots was refused.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// A planned slot does not hold what has to go into it.
    #[error("a slot for {purpose} has {got} bytes, {expected} are needed")]
    SlotTooSmall {
        /// What the slot is for.
        purpose: &'static str,
        /// Bytes needed.
        expected: u64,
        /// Bytes planned.
        got: u64,
    },
    /// The plan gives no slot at all where one is needed.
    #[error("the plan has no slot for {purpose}; at least one is needed")]
    NoSlot {
        /// What the slot is for.
        purpose: &'static str,
    },
    /// More reads were issued than the queue was built for.
    #[error("more than {capacity} reads outstanding at once")]
    QueueFull {
        /// Reads the queue holds.
        capacity: usize,
    },
    /// The reader threads are gone.
    #[error("the disk queue of {} has stopped", path.display())]
    QueueStopped {
        /// Directory of the disk.
        path: PathBuf,
    },
    /// A read was withdrawn before it was done.
    #[error("a read was cancelled")]
    Cancelled,
    /// A reader thread cannot be started.
    #[error("cannot start a reader thread: {source}")]
    Thread {
        /// The system's answer.
        source: io::Error,
    },
    /// A block was asked for after the last one of the pass.
    #[error("the pass has no block after its {blocks}")]
    PassEnded {
        /// Blocks of the pass.
        blocks: usize,
    },
    /// The plan and the schedule speak of different blocks.
    #[error("schedule and tensors disagree on {what}: expected {expected}, got {got}")]
    Schedule {
        /// What differs.
        what: &'static str,
        /// As the tensors have it.
        expected: u64,
        /// As the schedule has it.
        got: u64,
    },
    /// A token id past the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab}")]
    UnknownToken {
        /// The id.
        id: TokenId,
        /// Rows of the embedding.
        vocab: usize,
    },
    /// The output of an embedding lookup has the wrong size.
    #[error("embedding output has {got} floats, {expected} are needed")]
    EmbedOutput {
        /// Floats needed.
        expected: usize,
        /// Floats given.
        got: usize,
    },
    /// An expert that the layer does not have.
    #[error("layer {layer} has no expert {expert}: it has {experts}")]
    UnknownExpert {
        /// The layer.
        layer: LayerIndex,
        /// The expert.
        expert: ExpertId,
        /// Experts of the layer.
        experts: usize,
    },
    /// The same expert twice in one request.
    #[error("expert {expert} of layer {layer} is requested twice")]
    DuplicateExpert {
        /// The layer.
        layer: LayerIndex,
        /// The expert.
        expert: ExpertId,
    },
    /// A request before the one before it was used up.
    #[error("{left} experts of layer {layer} are still to be handed out")]
    RequestPending {
        /// The layer of the unfinished request.
        layer: LayerIndex,
        /// Experts left.
        left: usize,
    },
    /// Stored bytes do not form a weight of the stated shape.
    #[error("{what}: {detail}")]
    Malformed {
        /// Which weight.
        what: String,
        /// What the kernel's checks say.
        detail: String,
    },
    /// A packed block is not what was packed.
    #[error(
        "block {block} at offset {offset} of {} is damaged: checksum {expected:016x} expected, {got:016x} found; make the pack again with k3 pack",
        path.display()
    )]
    Checksum {
        /// The pack.
        path: PathBuf,
        /// Number of the block.
        block: usize,
        /// Where it lies.
        offset: u64,
        /// As packed.
        expected: u64,
        /// Of the bytes read.
        got: u64,
    },
    /// The packed trunk cannot be used.
    #[error(transparent)]
    Pack(Box<super::pack::PackError>),
    /// A small vector holds a value that is not finite.
    #[error("{tensor}: element {index} is {value}, which no weight may be")]
    NonFinite {
        /// Which vector.
        tensor: String,
        /// Element.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// The trace of expert requests cannot be written.
    #[error("cannot write trace {}: {source}", path.display())]
    Trace {
        /// The trace file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}
