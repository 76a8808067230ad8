//! Memory of a pass: activations of every token of the largest pass, and each thread's scratch.
//! Allocated once; [`workspace_bytes`] is what the plan counts for it.

use k3_kernel::mla::mla_scratch;
use k3_kernel::{Q23_BATCH_MAX, q23_bytes};

use crate::model::config::{Attention, FeedForward, ModelConfig};
use crate::source::ExpertRequest;
use crate::state::kda_head_scratch;
use crate::team::PerWorker;

/// Heads of latent attention that one thread takes at a time, so that the cache is read once for all of
/// them.
pub const MLA_HEAD_GROUP: usize = 16;
/// Tokens of a prefill that one thread takes at a time, so that `kv_b` is read once for all of them.
pub const MLA_TOKEN_GROUP: usize = 8;
/// Columns of an elementwise operation that one thread takes at a time.
pub const ELEMENT_COLUMNS: usize = 1024;
/// Tokens of a pass that can have logits in any plan; passes that want more are cut smaller.
const LOGITS_ROWS: usize = 16;

/// Sizes that a workspace depends on, besides the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceSize {
    /// Tokens of the largest pass.
    pub pass_tokens: usize,
    /// Tokens of a pass that may have logits.
    pub logits_rows: usize,
    /// Compute threads.
    pub threads: usize,
}

impl WorkspaceSize {
    /// The sizes of a plan: `sequences` may decode together, each with a draft of `draft_tokens`.
    #[must_use]
    pub fn new(pass_tokens: usize, sequences: usize, draft_tokens: usize, threads: usize) -> Self {
        let logits_rows = LOGITS_ROWS.max(sequences * (draft_tokens + 1)).min(pass_tokens);
        Self { pass_tokens, logits_rows, threads }
    }
}

/// Bytes of a [`Workspace`].
#[must_use]
pub fn workspace_bytes(config: &ModelConfig, size: &WorkspaceSize) -> u64 {
    let c = Counts::new(config, size);
    let moe = c.moe.bytes();
    let floats = c.residual * (3 + c.snapshots) + c.phase + c.head_rows + c.logits + c.scratch * size.threads;
    (4 * floats + moe) as u64
}

/// Elements of every buffer: one place for allocation and ledger.
struct Counts {
    residual: usize,
    snapshots: usize,
    phase: usize,
    head_rows: usize,
    logits: usize,
    scratch: usize,
    moe: MoeCounts,
}

struct MoeCounts {
    choices: usize,
    latent_codes: usize,
    width_codes: usize,
    experts: usize,
}

impl MoeCounts {
    fn bytes(&self) -> usize {
        self.choices * (2 + 4 + 4)
            + self.latent_codes
            + self.width_codes
            + self.experts * (2 * 4 + size_of::<ExpertRequest>())
    }
}

impl Counts {
    fn new(config: &ModelConfig, size: &WorkspaceSize) -> Self {
        let tokens = size.pass_tokens;
        Self {
            residual: tokens * config.hidden,
            snapshots: snapshots(config),
            phase: phase_floats(config, tokens),
            head_rows: size.logits_rows * config.hidden,
            logits: size.logits_rows * config.vocab,
            scratch: scratch_floats(config, size),
            moe: MoeCounts {
                choices: tokens * config.moe.experts_per_token,
                latent_codes: tokens * q23_bytes(config.expert_io_width()),
                width_codes: Q23_BATCH_MAX * q23_bytes(config.moe.expert_width),
                experts: config.moe.experts,
            },
        }
    }
}

/// Snapshots of the running residual that the last layer sees.
#[must_use]
pub fn snapshots(config: &ModelConfig) -> usize {
    config.attn_res_block.map_or(0, |n| config.layers.len().div_ceil(n))
}

/// Floats of the largest part of a layer for `tokens` tokens: attention and feed-forward use the same
/// memory one after the other.
fn phase_floats(config: &ModelConfig, tokens: usize) -> usize {
    let parts = config.layers.iter().flat_map(|layer| {
        let attention = match layer.attention {
            Attention::Kda => kda_floats(config) * tokens,
            Attention::Mla => mla_floats(config) * tokens,
        };
        let feed_forward = match layer.feed_forward {
            FeedForward::Dense => 2 * config.dense_width * tokens,
            FeedForward::Moe => moe_floats(config) * tokens + moe_batch_floats(config),
        };
        [attention, feed_forward]
    });
    parts.max().unwrap_or(0)
}

/// q, k, v, decay gate, output gate, o; the low-rank halves of the gates; beta.
fn kda_floats(config: &ModelConfig) -> usize {
    let c = &config.kda;
    6 * c.width() + 2 * c.head_dim + c.heads
}

/// Low-rank query, query, latent, gate, o.
fn mla_floats(config: &ModelConfig) -> usize {
    let c = &config.mla;
    c.q_rank.unwrap_or(0) + c.heads * (c.query_width() + 2 * c.v_dim) + c.latent_width()
}

/// Scores, latent input, its sum, shared output, and the larger of shared activations and expert
/// outputs, which are not alive together.
fn moe_floats(config: &ModelConfig) -> usize {
    let c = &config.moe;
    let io = config.expert_io_width();
    c.experts + 2 * io + config.hidden + (2 * config.shared_width()).max(c.experts_per_token * io)
}

/// Gate, up and down outputs of one batch of one expert.
fn moe_batch_floats(config: &ModelConfig) -> usize {
    Q23_BATCH_MAX * (2 * config.moe.expert_width + config.expert_io_width())
}

/// Scratch of one thread: the largest of what its different jobs need.
fn scratch_floats(config: &ModelConfig, size: &WorkspaceSize) -> usize {
    let mla = &config.mla;
    let tokens = MLA_TOKEN_GROUP.min(size.pass_tokens);
    let attend = tokens * (MLA_HEAD_GROUP * (mla.latent_width() + mla.kv_rank) + mla.v_dim)
        + mla_scratch(MLA_HEAD_GROUP, mla.kv_rank, mla.rope_dim);
    attend
        .max(kda_head_scratch(&config.kda))
        .max(ELEMENT_COLUMNS)
        .max(mla.q_rank.unwrap_or(0))
        .max(config.moe.groups)
        .max(config.expert_io_width())
        .max(config.moe.expert_width)
}

/// Buffers of a pass.
pub struct Workspace {
    /// What it was allocated for.
    pub size: WorkspaceSize,
    /// Running residual [T, E].
    pub prefix: Vec<f32>,
    /// Snapshots of it, each [T, E].
    pub snapshots: Vec<Vec<f32>>,
    /// What goes into a norm, then what attention or feed-forward gives back: [T, E].
    pub mixed: Vec<f32>,
    /// Output of a norm [T, E].
    pub normed: Vec<f32>,
    /// Inside of attention or feed-forward.
    pub phase: Vec<f32>,
    /// Input of the head [logits rows, E].
    pub head_input: Vec<f32>,
    /// [logits rows, V].
    pub logits: Vec<f32>,
    /// Routing.
    pub routing: Routing,
    /// Per thread.
    pub scratch: PerWorker<Vec<f32>>,
}

/// Which token wants which expert.
pub struct Routing {
    /// Chosen experts [T, k], best first.
    pub ids: Vec<u16>,
    /// Their weights [T, k].
    pub weights: Vec<f32>,
    /// (token, rank) pairs as token·k + rank, grouped by expert.
    pub entries: Vec<u32>,
    /// Start of each expert's group in `entries`.
    pub starts: Vec<u32>,
    /// End of each expert's group.
    pub ends: Vec<u32>,
    /// The distinct experts of the pass; capacity for all.
    pub requests: Vec<ExpertRequest>,
    /// Expert inputs, quantised, [T].
    pub latent_codes: Vec<u8>,
    /// Activations of one batch, quantised.
    pub width_codes: Vec<u8>,
}

impl Workspace {
    /// Allocates everything.
    #[must_use]
    pub fn new(config: &ModelConfig, size: WorkspaceSize) -> Self {
        let c = Counts::new(config, &size);
        let zeros = |n: usize| vec![0.0f32; n];
        Self {
            size,
            prefix: zeros(c.residual),
            snapshots: (0..c.snapshots).map(|_| zeros(c.residual)).collect(),
            mixed: zeros(c.residual),
            normed: zeros(c.residual),
            phase: zeros(c.phase),
            head_input: zeros(c.head_rows),
            logits: zeros(c.logits),
            routing: Routing {
                ids: vec![0; c.moe.choices],
                weights: zeros(c.moe.choices),
                entries: vec![0; c.moe.choices],
                starts: vec![0; c.moe.experts],
                ends: vec![0; c.moe.experts],
                requests: Vec::with_capacity(c.moe.experts),
                latent_codes: vec![0; c.moe.latent_codes],
                width_codes: vec![0; c.moe.width_codes],
            },
            scratch: PerWorker::new(size.threads, || zeros(c.scratch)),
        }
    }
}

/// Cuts the first `n` values off `rest`.
///
/// # Panics
/// When there are fewer.
pub fn cut<'a, T>(rest: &mut &'a mut [T], n: usize) -> &'a mut [T] {
    let (first, tail) = std::mem::take(rest).split_at_mut(n);
    *rest = tail;
    first
}
