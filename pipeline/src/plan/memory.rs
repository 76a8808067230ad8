//! The arithmetic of memory: what each part of the engine takes, from shapes alone.

use crate::model::config::{Attention, FeedForward, ModelConfig};
use crate::preset::{PASS_TOKENS_MAX, PassTokens, Preset};
use crate::schedule::{BlockShape, Partition};
use crate::state::{history_len, mark_bytes, state_bytes};
use crate::workspace::{WorkspaceSize, workspace_bytes};

use super::shape::{ModelShape, PackSizes};
use super::{LedgerLine, READ_ALIGN, read_slot_bytes};

/// The process before the engine: code, allocator, runtime, and the transient text of the shard
/// headers while the index is built.
const PROCESS_BYTES: u64 = 32 << 20;
/// Stack and bookkeeping of one thread, compute or reader.
const THREAD_BYTES: u64 = 512 << 10;
/// Memory of a tokenizer per vocabulary entry: the bytes of the rank, two maps, their slack.
const TOKENIZER_ENTRY_BYTES: u64 = 256;

/// Memory of one sequence's sampler per vocabulary entry: the adjusted row, the filters' weights, keys
/// and candidates, the penalties' counts, the log-probabilities' scratch.
const SAMPLER_ENTRY_BYTES: usize = 4 + (4 + 8 + 8) + (4 + 1 + 4) + 4;
/// Part of the budget that the workspace of a pass may take where the preset leaves its size open.
const FIT_SHARE: u64 = 16;
/// Tokens of a pass that nobody has to do without.
const FIT_TOKENS_MIN: usize = 8;

/// Tokens of a pass: the preset's, or those worth trying, the most first: as many as a small part of
/// `budget_bytes` holds, and fewer.
pub(super) fn pass_tokens(
    preset: &Preset,
    config: &ModelConfig,
    shape: &ModelShape,
    threads: usize,
    budget_bytes: u64,
) -> Vec<usize> {
    let (sequences, drafts) = (preset.context.sequences, preset.pass.draft_tokens);
    let least = match preset.pass.tokens {
        PassTokens::Fixed(n) => return vec![n],
        PassTokens::Fit => FIT_TOKENS_MIN.max(drafts + 1),
    };
    let fits = |tokens: &usize| {
        let size = WorkspaceSize::new(*tokens, sequences, drafts, threads);
        workspace_bytes(config, &size) + embed_rows_bytes(shape, *tokens) <= budget_bytes / FIT_SHARE
    };
    let halves = std::iter::successors(Some(PASS_TOKENS_MAX), |n| Some(n / 2));
    // More than a whole sequence is of no use.
    let useful = halves.skip_while(|n| n / 2 >= preset.context.tokens).take_while(|n| *n > least);
    useful.filter(fits).chain([least]).collect()
}

fn embed_rows_bytes(shape: &ModelShape, tokens: usize) -> u64 {
    tokens as u64 * read_slot_bytes(shape.embed_row_bytes)
}

/// Lines of a preset that do not depend on the budget. `None` where a size leaves 64 bits.
pub(super) fn fixed_lines(
    preset: &Preset,
    config: &ModelConfig,
    shape: &ModelShape,
    sizes: &BlockSizes,
    (threads, pass_tokens): (usize, usize),
) -> Option<Vec<LedgerLine>> {
    let (context, pass) = (&preset.context, &preset.pass);
    let sequences = context.sequences as u64;
    let latent = latent_bytes_per_position(config).checked_mul(context.tokens as u64)?;
    let drafts = state_bytes(config, 0, pass.draft_tokens) - state_bytes(config, 0, 0);
    let workspace = WorkspaceSize::new(pass_tokens, context.sequences, pass.draft_tokens, threads);
    let line = |name: &str, bytes: u64| LedgerLine { name: name.to_owned(), bytes };
    Some(vec![
        line("ring", sizes.slot_bytes.checked_mul(preset.trunk.ring_slots as u64)?),
        line("expert staging", expert_slot_bytes(shape).checked_mul(preset.experts.staging_slots as u64)?),
        line("KDA state", kda_state_bytes(config).checked_mul(sequences)?),
        line("convolution history", conv_history_bytes(config).checked_mul(sequences)?),
        line("latent KV cache", latent.checked_mul(sequences)?),
        line("drafts", drafts.checked_mul(sequences)?),
        line("snapshots", mark_bytes(config).checked_mul(context.snapshots as u64)?.checked_mul(sequences)?),
        line("samplers", (config.vocab * SAMPLER_ENTRY_BYTES) as u64 * sequences),
        line("activations and logits", workspace_bytes(config, &workspace)),
        line("embedding rows", embed_rows_bytes(shape, pass_tokens)),
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
    /// The same two of each block of the layers, in order of the pass.
    pub(super) layer_blocks: Vec<(u64, u64)>,
    /// Bytes that the head takes when pinned.
    pub(super) head_resident: u64,
    /// Bytes that the head costs per pass when streamed.
    pub(super) head_stored: u64,
}

impl BlockSizes {
    /// Blocks as the checkpoint has them.
    pub(super) fn stored(config: &ModelConfig, shape: &ModelShape, block_bytes: u64) -> Self {
        let mut sizes = Self::none(config);
        for block in blocks(config, shape, block_bytes) {
            let resident = read_slot_bytes(block.resident_bytes);
            sizes.add(&block, block.stored_bytes, read_slot_bytes(block.stored_bytes), resident);
        }
        sizes
    }

    /// Blocks as a pack has them: whole sectors each, and in memory as in the file. `None` when the pack
    /// was cut otherwise.
    pub(super) fn packed(
        config: &ModelConfig,
        shape: &ModelShape,
        block_bytes: u64,
        pack: &PackSizes,
    ) -> Option<Self> {
        let blocks = blocks(config, shape, block_bytes);
        if pack.block_bytes != block_bytes || pack.blocks.len() != blocks.len() {
            return None;
        }
        let mut sizes = Self::none(config);
        for (block, &coded) in blocks.iter().zip(&pack.blocks) {
            let sectors = coded.next_multiple_of(READ_ALIGN);
            sizes.add(block, coded, sectors, sectors);
        }
        Some(sizes)
    }

    fn none(config: &ModelConfig) -> Self {
        let layers = config.layers.len();
        Self {
            slot_bytes: 0,
            layer_resident: vec![0; layers],
            layer_stored: vec![0; layers],
            layer_blocks: Vec::new(),
            head_resident: 0,
            head_stored: 0,
        }
    }

    fn add(&mut self, block: &BlockShape, stored: u64, slot: u64, resident: u64) {
        self.slot_bytes = self.slot_bytes.max(slot);
        let (resident_sum, stored_sum) = match block.id.layer {
            None => (&mut self.head_resident, &mut self.head_stored),
            Some(layer) => {
                let at = layer.index();
                self.layer_blocks.push((resident, stored));
                match (self.layer_resident.get_mut(at), self.layer_stored.get_mut(at)) {
                    (Some(resident), Some(stored)) => (resident, stored),
                    _ => return,
                }
            }
        };
        *resident_sum += resident;
        *stored_sum += stored;
    }
}

fn blocks(config: &ModelConfig, shape: &ModelShape, block_bytes: u64) -> Vec<BlockShape> {
    Partition::new(config, block_bytes).blocks(shape.matrices.iter().copied())
}

/// Bytes of an expert slot: the six tensors, with room to align every read of its own.
pub(super) fn expert_slot_bytes(shape: &ModelShape) -> u64 {
    let slack = read_slot_bytes(0) * (shape.expert_reads - 1);
    read_slot_bytes(shape.expert_bytes) + slack
}

/// Layers with routed experts.
pub(super) fn moe_layers(config: &ModelConfig) -> usize {
    config.layers.iter().filter(|l| l.feed_forward == FeedForward::Moe).count()
}

/// Recurrent state of one sequence, all KDA layers.
pub(super) fn kda_state_bytes(config: &ModelConfig) -> u64 {
    state_bytes(config, 0, 0) - conv_history_bytes(config)
}

/// Convolution history of one sequence, all KDA layers.
pub(super) fn conv_history_bytes(config: &ModelConfig) -> u64 {
    let layers = config.layers.iter().filter(|l| l.attention == Attention::Kda).count();
    (4 * layers * config.kda.heads * history_len(&config.kda)) as u64
}

/// Latent KV of one position, all MLA layers.
pub(super) fn latent_bytes_per_position(config: &ModelConfig) -> u64 {
    state_bytes(config, 1, 0) - state_bytes(config, 0, 0)
}
