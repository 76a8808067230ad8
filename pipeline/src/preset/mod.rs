//! Presets: what a user asks for, as a TOML file with a schema version. A [`Preset`] has passed every
//! check that needs no model; the plan makes the others.
//!
//! The keys, their meaning and what they allow stand once, in `keys.rs`: reading, `--set` overrides,
//! explanations and writing all go through that table.

mod builtin;
mod error;
mod keys;
mod read;
#[cfg(test)]
mod tests;
mod value;
mod write;

use std::path::PathBuf;

pub use builtin::{BUILTIN_NAMES, Builtin, LADDER, builtin};
pub use error::{Place, PresetError, Problem};
pub use keys::{KeyInfo, PASS_TOKENS_MAX, key_infos};

use crate::plan::{CachePolicy, DirectMode, IoEngine};
use crate::units::Bytes;

/// Version of the preset format that this program reads and writes.
pub const SCHEMA_VERSION: u64 = 1;

/// A user's wishes, each within its allowed range.
#[derive(Clone, Debug, PartialEq)]
pub struct Preset {
    /// Name: the built-in's, or the file's without its ending.
    pub name: String,
    /// One line for lists.
    pub about: String,
    /// Model directory, relative to the working directory.
    pub model: Option<PathBuf>,
    /// Memory of the whole process.
    pub budget: MemoryBudget,
    /// The trunk and head.
    pub trunk: TrunkPreset,
    /// The routed experts.
    pub experts: ExpertsPreset,
    /// What a session may hold.
    pub context: ContextPreset,
    /// What one pass may hold.
    pub pass: PassPreset,
    /// Disk reads.
    pub reader: ReaderPreset,
    /// Compute threads.
    pub compute: ComputePreset,
}

/// Memory that the whole process may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryBudget {
    /// What the machine has free when the plan is made, less head-room.
    Auto,
    /// At most this.
    Limit(Bytes),
}

/// Which layers stay in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pinned {
    /// This many, spread evenly through the stack, so that the disk always has work.
    Spread(u16),
    /// The first layers.
    Prefix(u16),
    /// Exactly these, by zero-based number, ascending.
    List(Vec<u16>),
    /// Every layer.
    All,
    /// As many as the budget allows, spread evenly, but never fewer than this.
    Fit {
        /// Fewest layers to accept; all, where the model has fewer.
        at_least: u16,
    },
}

/// Whether the output head stays in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadPlace {
    /// In memory.
    Pinned,
    /// Through the ring, every pass.
    Streamed,
    /// In memory if room is left once every layer is pinned.
    Fit,
}

/// Memory for cached experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheBudget {
    /// At most this many bytes.
    Limit(Bytes),
    /// What the budget leaves after everything else.
    Fit,
}

/// Number type of the latent KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvStorage {
    /// float32: what the exact engine computes with.
    F32,
}

/// How the trunk is held.
#[derive(Clone, Debug, PartialEq)]
pub struct TrunkPreset {
    /// Layers in memory.
    pub pinned: Pinned,
    /// The head.
    pub head: HeadPlace,
    /// Slots that streamed blocks pass through.
    pub ring_slots: usize,
    /// Size of a block.
    pub block: Bytes,
    /// A packed trunk to read instead of the checkpoint's tensors.
    pub pack: Option<PathBuf>,
}

/// How experts are held.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsPreset {
    /// Memory for the caches of all layers together.
    pub cache: CacheBudget,
    /// Slots for experts on their way through.
    pub staging_slots: usize,
    /// Who is evicted.
    pub policy: CachePolicy,
}

/// What sessions may hold.
#[derive(Clone, Debug, PartialEq)]
pub struct ContextPreset {
    /// Positions of a sequence, prompt and answer together.
    pub tokens: usize,
    /// Number type of the latent KV cache.
    pub kv: KvStorage,
    /// Sequences open at once.
    pub sequences: usize,
    /// Positions that each can go back to.
    pub snapshots: usize,
}

/// Tokens of one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassTokens {
    /// So many.
    Fixed(usize),
    /// As many as a small part of the memory holds, at most [`PASS_TOKENS_MAX`].
    Fit,
}

/// What a pass may hold.
#[derive(Clone, Debug, PartialEq)]
pub struct PassPreset {
    /// Tokens of one pass: the prefill chunk.
    pub tokens: PassTokens,
    /// Drafted tokens that a pass may verify.
    pub draft_tokens: usize,
}

/// How the disk is read.
#[derive(Clone, Debug, PartialEq)]
pub struct ReaderPreset {
    /// Which way reads are issued.
    pub engine: IoEngine,
    /// Whether reads bypass the page cache.
    pub direct: DirectMode,
    /// Requests under way at once, per disk.
    pub depth: usize,
}

/// Compute threads.
#[derive(Clone, Debug, PartialEq)]
pub struct ComputePreset {
    /// Threads; `None`: one per usable core.
    pub threads: Option<usize>,
    /// Pin each to a core of its own.
    pub pin_threads: bool,
    /// Instruction set; `None`: the best this CPU has.
    pub isa: Option<String>,
}

impl Preset {
    /// The value that reading starts from; every required key overwrites its field.
    fn unset(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            about: String::new(),
            model: None,
            budget: MemoryBudget::Auto,
            trunk: TrunkPreset {
                pinned: Pinned::Spread(0),
                head: HeadPlace::Streamed,
                ring_slots: 0,
                block: Bytes(0),
                pack: None,
            },
            experts: ExpertsPreset {
                cache: CacheBudget::Limit(Bytes(0)),
                staging_slots: 0,
                policy: CachePolicy::LayerRank,
            },
            context: ContextPreset { tokens: 0, kv: KvStorage::F32, sequences: 0, snapshots: 0 },
            pass: PassPreset { tokens: PassTokens::Fit, draft_tokens: 0 },
            reader: ReaderPreset { engine: IoEngine::Auto, direct: DirectMode::Auto, depth: 0 },
            compute: ComputePreset { threads: None, pin_threads: false, isa: None },
        }
    }
}
