//! The plan: every size, count and byte of a run, computed before anything is allocated.
//!
//! `Preset x ModelConfig x tensors x Machine -> Plan`, a pure function. All refusals happen here,
//! together.

mod choose;
mod error;
mod memory;
mod predict;
mod shape;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

pub use choose::{machine_budget_bytes, plan};
pub use error::{MemoryShortage, PlanError, Refusal};
pub use predict::{Prediction, Rates};
pub use shape::{ModelShape, PackSizes};

use crate::units::LayerIndex;

/// What direct reads are aligned to: file offset, length and memory.
pub const READ_ALIGN: u64 = 4096;

/// Bytes of a slot that any extent of `bytes` bytes can be read into with aligned reads, wherever in
/// the file it starts.
#[must_use]
pub const fn read_slot_bytes(bytes: u64) -> u64 {
    bytes.next_multiple_of(READ_ALIGN) + 2 * READ_ALIGN
}

/// Everything the engine needs to allocate and run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Name of the preset.
    pub preset: String,
    /// Positions a sequence may hold.
    pub context_tokens: usize,
    /// Sequences that may be open at once.
    pub sequences_max: usize,
    /// Positions that a sequence can go back to.
    pub snapshots_max: usize,
    /// Tokens in one pass: the prefill chunk.
    pub pass_tokens_max: usize,
    /// Tokens of a pass that may be left uncommitted (a draft to verify); 0 switches drafts off.
    pub draft_tokens_max: usize,
    /// The trunk and head.
    pub trunk: TrunkPlan,
    /// The routed experts.
    pub experts: ExpertPlan,
    /// Disk reads.
    pub reader: ReaderPlan,
    /// Compute threads.
    pub compute: ComputePlan,
    /// Memory, line by line.
    pub ledger: Ledger,
    /// Bytes read per decoded token.
    pub traffic: Traffic,
    /// Sizes of the model itself, whatever the preset.
    pub model: ModelSizes,
}

/// Sizes of a model as stored, and of what it carries from token to token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelSizes {
    /// Layers.
    pub layers: usize,
    /// One routed expert.
    pub expert_bytes: u64,
    /// All routed experts.
    pub experts_bytes: u64,
    /// Trunk of all layers: matrices and small vectors.
    pub trunk_bytes: u64,
    /// Matrices of the largest layer.
    pub layer_bytes_max: u64,
    /// Token embedding.
    pub embed_bytes: u64,
    /// Output head.
    pub head_bytes: u64,
    /// Recurrent state of a sequence.
    pub state_bytes: u64,
    /// Convolution history of a sequence.
    pub history_bytes: u64,
    /// Latent KV cache per position.
    pub latent_bytes_per_token: u64,
}

/// How the trunk is held.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrunkPlan {
    /// Block size that the trunk is cut with: `schedule::Partition::new(config, block_bytes)`.
    pub block_bytes: u64,
    /// Slots that streamed blocks pass through, and pinned blocks while they are loaded; at least 1.
    pub ring_slots: usize,
    /// Bytes of a ring slot: the largest block with room for alignment ([`read_slot_bytes`]).
    pub slot_bytes: u64,
    /// Layers that stay in memory, ascending; or, where blocks are dealt out, as many bytes as these have.
    pub pinned_layers: Vec<LayerIndex>,
    /// For each block of the layers, in order of the pass, whether it stays in memory: what the pinned
    /// layers take, dealt out evenly over all of them. Empty where layers are pinned whole.
    #[serde(skip)]
    pub dealt_blocks: Vec<bool>,
    /// True when the head stays in memory.
    pub pinned_head: bool,
    /// Bytes of the pinned blocks, layers and head, each with room for alignment.
    pub pinned_bytes: u64,
    /// A packed trunk to read instead of the checkpoint's own tensors.
    pub pack: Option<PathBuf>,
}

impl TrunkPlan {
    /// Whether the block of this number in the pass, of a layer or of the head (`None`), stays in memory.
    #[must_use]
    pub fn is_pinned(&self, block: usize, layer: Option<LayerIndex>) -> bool {
        match (layer, self.dealt_blocks.get(block)) {
            (None, _) => self.pinned_head,
            (Some(_), Some(&dealt)) => dealt,
            (Some(layer), None) => self.pinned_layers.binary_search(&layer).is_ok(),
        }
    }
}

/// How routed experts are held.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExpertPlan {
    /// Bytes of a slot: one expert with room for alignment.
    pub slot_bytes: u64,
    /// Cache slots of each layer, by layer number; 0 for dense layers.
    pub arena_slots: Vec<usize>,
    /// Slots for experts on their way through.
    pub staging_slots: usize,
    /// Who is evicted.
    pub policy: CachePolicy,
}

/// Named cache policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CachePolicy {
    /// One global LRU, for comparison.
    Lru,
    /// LRU per layer.
    LayerLru,
    /// Per layer, by recency and decayed frequency weighted by router rank.
    LayerRank,
}

/// How the disk is read.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReaderPlan {
    /// Engine asked for.
    pub engine: IoEngine,
    /// O_DIRECT asked for.
    pub direct: DirectMode,
    /// Requests under way at once, per disk.
    pub depth: usize,
}

/// Which way reads are issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IoEngine {
    /// io_uring where a probe works, else threads.
    Auto,
    /// io_uring or refuse.
    Uring,
    /// Threads calling pread.
    Pread,
}

/// Whether reads bypass the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DirectMode {
    /// O_DIRECT where a probe read works.
    Auto,
    /// O_DIRECT or refuse.
    On,
    /// Buffered.
    Off,
}

/// Compute threads.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComputePlan {
    /// Threads in the team, the caller's included.
    pub threads: usize,
    /// Pin each to a core of its own.
    pub pin_threads: bool,
    /// `None`: the best this CPU has.
    pub isa: Option<String>,
}

/// Memory of the whole process.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ledger {
    /// Named lines; their sum is the planned peak.
    pub lines: Vec<LedgerLine>,
    /// The budget the plan was made for.
    pub budget_bytes: u64,
    /// Who set the budget.
    pub budget_from: BudgetSource,
}

/// Who set the budget of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BudgetSource {
    /// The preset or an override.
    Preset,
    /// Free memory of the machine, less head-room.
    Machine,
    /// A memory limit of a control group, less head-room.
    Cgroup {
        /// Its directory.
        path: PathBuf,
    },
}

impl fmt::Display for BudgetSource {
    /// As the subject of a sentence that goes on with a size.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Preset => f.write_str("the budget is"),
            Self::Machine => f.write_str("this machine's free memory, less head-room, is"),
            Self::Cgroup { path } => {
                write!(f, "the memory limit of {}, less head-room, leaves", path.display())
            }
        }
    }
}

/// One line of the ledger.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LedgerLine {
    /// What the memory is for.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
}

impl Ledger {
    /// Sum of all lines.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.lines.iter().map(|l| l.bytes).sum()
    }
}

/// Bytes read per decoded token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Traffic {
    /// Trunk blocks of layers that are not pinned.
    pub trunk_bytes: u64,
    /// The head, unless pinned.
    pub head_bytes: u64,
    /// Experts without a single hit.
    pub expert_bytes_max: u64,
    /// One embedding row.
    pub embed_bytes: u64,
    /// Trunk matrices that a token goes through, pinned or not.
    pub touched_trunk_bytes: u64,
    /// Weights that the kernels read from memory, wherever they came from, and state they read and
    /// write.
    pub touched_bytes: u64,
}

impl Traffic {
    /// Bytes read from disk per token without a single cache hit.
    #[must_use]
    pub fn disk_bytes_max(&self) -> u64 {
        self.trunk_bytes + self.head_bytes + self.expert_bytes_max + self.embed_bytes
    }
}
