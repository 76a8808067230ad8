//! The arithmetic of memory: what each part of the engine takes, from shapes alone.

use crate::model::config::{Attention, FeedForward, ModelConfig};
use crate::preset::Preset;
use crate::schedule::{BlockShape, Partition};

use super::shape::ModelShape;
use super::{LedgerLine, read_slot_bytes};

/// The process before the engine: code, allocator, runtime, and the transient text of the shard
/// headers while the index is built.
const PROCESS_BYTES: u64 = 32 << 20;
/// Stack and bookkeeping of one thread, compute or reader.
const THREAD_BYTES: u64 = 512 << 10;
/// Memory of a tokenizer per vocabulary entry: the bytes of the rank, two maps, their slack.
const TOKENIZER_ENTRY_BYTES: u64 = 256;

/// Lines of a preset that do not depend on the budget. `None` where a size leaves 64 bits.
pub(super) fn fixed_lines(
    preset: &Preset,
    config: &ModelConfig,
    shape: &ModelShape,
    sizes: &BlockSizes,
    threads: usize,
) -> Option<Vec<LedgerLine>> {
    let sequences = preset.context.sequences as u64;
    let tokens = preset.pass.tokens as u64;
    let state = kda_state_bytes(config);
    let conv = conv_history_bytes(config);
    let rollback = if preset.pass.draft_tokens > 0 { state + conv } else { 0 };
    let latent = latent_bytes_per_position(config).checked_mul(preset.context.tokens as u64)?;
    let line = |name: &str, bytes: u64| LedgerLine { name: name.to_owned(), bytes };
    Some(vec![
        line("ring", sizes.slot_bytes.checked_mul(preset.trunk.ring_slots as u64)?),
        line("expert staging", expert_slot_bytes(shape).checked_mul(preset.experts.staging_slots as u64)?),
        line("KDA state", state.checked_mul(sequences)?),
        line("convolution history", conv.checked_mul(sequences)?),
        line("latent KV cache", latent.checked_mul(sequences)?),
        line("draft rollback", rollback.checked_mul(sequences)?),
        line("activations", activation_bytes(config, preset, threads)?),
        line("logits", tokens * config.vocab as u64 * 4),
        line("embedding rows", tokens * read_slot_bytes(shape.embed_row_bytes)),
        line("small vectors", shape.vector_elements * 4),
        line("tensor index", shape.index_bytes),
        line("tokenizer", config.vocab as u64 * TOKENIZER_ENTRY_BYTES),
        line("process", PROCESS_BYTES + (threads + preset.reader.depth) as u64 * THREAD_BYTES),
    ])
}

/// Sizes of the blocks of one partition.
pub(super) struct BlockSizes {
    /// Bytes of a ring slot.
    pub(super) slot_bytes: u64,
    /// Bytes that each layer takes when pinned.
    pub(super) layer_resident: Vec<u64>,
    /// Bytes that each layer costs per pass when streamed.
    pub(super) layer_stored: Vec<u64>,
    /// Bytes that the head takes when pinned.
    pub(super) head_resident: u64,
    /// Bytes that the head costs per pass when streamed.
    pub(super) head_stored: u64,
}

impl BlockSizes {
    pub(super) fn new(config: &ModelConfig, shape: &ModelShape, block_bytes: u64) -> Self {
        let layers = config.layers.len();
        let mut sizes = Self {
            slot_bytes: 0,
            layer_resident: vec![0; layers],
            layer_stored: vec![0; layers],
            head_resident: 0,
            head_stored: 0,
        };
        let partition = Partition::new(config, block_bytes);
        for block in partition.blocks(shape.matrices.iter().copied()) {
            sizes.add(&block);
        }
        sizes
    }

    fn add(&mut self, block: &BlockShape) {
        let resident = read_slot_bytes(block.resident_bytes);
        self.slot_bytes = self.slot_bytes.max(read_slot_bytes(block.stored_bytes));
        let (resident_sum, stored_sum) = match block.id.layer {
            None => (&mut self.head_resident, &mut self.head_stored),
            Some(layer) => {
                let at = layer.index();
                match (self.layer_resident.get_mut(at), self.layer_stored.get_mut(at)) {
                    (Some(resident), Some(stored)) => (resident, stored),
                    _ => return,
                }
            }
        };
        *resident_sum += resident;
        *stored_sum += block.stored_bytes;
    }
}

/// Bytes of an expert slot: the six tensors, with room to align every read of its own.
pub(super) fn expert_slot_bytes(shape: &ModelShape) -> u64 {
    let slack = read_slot_bytes(0) * (shape.expert_reads - 1);
    read_slot_bytes(shape.expert_bytes) + slack
}

/// Layers of one kind of attention.
fn attention_layers(config: &ModelConfig, kind: Attention) -> u64 {
    config.layers.iter().filter(|l| l.attention == kind).count() as u64
}

/// Layers with routed experts.
pub(super) fn moe_layers(config: &ModelConfig) -> usize {
    config.layers.iter().filter(|l| l.feed_forward == FeedForward::Moe).count()
}

/// Recurrent state of one sequence: [H, d, d] f32 in every KDA layer.
pub(super) fn kda_state_bytes(config: &ModelConfig) -> u64 {
    let d = config.kda.head_dim as u64;
    attention_layers(config, Attention::Kda) * config.kda.heads as u64 * d * d * 4
}

/// Convolution history of one sequence: [K-1, P] f32 for q, k and v of every KDA layer.
pub(super) fn conv_history_bytes(config: &ModelConfig) -> u64 {
    let history = config.kda.conv_kernel.saturating_sub(1) as u64 * config.kda.width() as u64;
    attention_layers(config, Attention::Kda) * 3 * history * 4
}

/// Latent KV of one position: f32 in every MLA layer.
pub(super) fn latent_bytes_per_position(config: &ModelConfig) -> u64 {
    attention_layers(config, Attention::Mla) * config.mla.latent_width() as u64 * 4
}

/// Activations of a pass: the residual sources and the widest intermediate values of each token, and
/// each thread's attention scores. `None` where the size leaves 64 bits.
fn activation_bytes(config: &ModelConfig, preset: &Preset, threads: usize) -> Option<u64> {
    let sources = match config.attn_res_block {
        Some(n) => config.layers.len().div_ceil(n.max(1)) + 1,
        None => 1,
    };
    let kda = 6 * config.kda.width() + 2 * config.kda.head_dim + config.kda.heads;
    let mla = &config.mla;
    let queries = mla.heads * mla.query_width() + mla.heads * mla.latent_width();
    let mla_width = queries + mla.heads * (mla.kv_rank + 2 * mla.v_dim) + mla.q_rank.unwrap_or(0);
    let moe = &config.moe;
    let routed = moe.experts_per_token * (2 * moe.expert_width + config.expert_io_width());
    let experts = moe.experts + 2 * config.expert_io_width() + routed;
    let mlp = 3 * config.dense_width.max(config.shared_width());
    let per_token = (sources + 5) * config.hidden + kda.max(mla_width) + experts.max(mlp);
    let scores = (threads as u64).checked_mul(preset.context.tokens as u64)?;
    (per_token as u64 * preset.pass.tokens as u64).checked_add(scores)?.checked_mul(4)
}
