//! What a plan needs to know of a model's tensors: sizes alone, from real headers or from the
//! configuration.

use crate::model::config::{FeedForward, ModelConfig};
use crate::model::layout;
use crate::model::tensors::{DType, ExpertExtents, MatrixRef, ModelTensors, VectorKind, VectorRef};
use crate::schedule::{PassMatrix, pass_matrices};
use crate::units::ExpertId;

/// Sizes of a model's tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// Matrices of a pass in order of execution, the head last.
    pub matrices: Vec<PassMatrix>,
    /// Elements of all small vectors as stored.
    pub vector_elements: u64,
    /// Their bytes as stored.
    pub vector_bytes: u64,
    /// Bytes of one embedding row as stored.
    pub embed_row_bytes: u64,
    /// Bytes of one routed expert: packed nibbles and scales of its three products.
    pub expert_bytes: u64,
    /// Reads that an expert takes: 1 where its six tensors lie back to back, else 6.
    pub expert_reads: u64,
    /// Memory of the tensor index.
    pub index_bytes: u64,
    /// Sizes of the blocks in the pack that the preset names, where they have been read.
    pub pack: Option<PackSizes>,
}

/// Sizes of the blocks of a packed trunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackSizes {
    /// Block size that the pack was made with.
    pub block_bytes: u64,
    /// Coded bytes of each block, in order of the pass.
    pub blocks: Vec<u64>,
}

impl ModelShape {
    /// Sizes as the release has them: matrices BF16, experts in one run each.
    #[must_use]
    pub fn from_config(config: &ModelConfig) -> Self {
        let bf16 = |layer, m: layout::MatrixShape| PassMatrix {
            kind: m.kind,
            layer,
            rows: m.rows,
            cols: m.cols,
            dtype: DType::Bf16,
        };
        let mut matrices = Vec::new();
        let mut vectors = layout::model_vectors(config);
        for (layer, _) in config.numbered_layers() {
            matrices.extend(layout::matrices(config, layer).into_iter().map(|m| bf16(Some(layer), m)));
            vectors.extend(layout::vectors(config, layer));
        }
        matrices.push(bf16(None, layout::head(config)));
        Self {
            vector_elements: vectors.iter().map(|v| v.dims.used() as u64).sum(),
            vector_bytes: vectors
                .iter()
                .map(|v| (v.dims.used() * released_dtype(v.kind).bytes()) as u64)
                .sum(),
            embed_row_bytes: (config.hidden * DType::Bf16.bytes()) as u64,
            expert_bytes: layout::expert_bytes(config),
            expert_reads: 1,
            index_bytes: index_bytes(config, matrices.len(), vectors.len()),
            matrices,
            pack: None,
        }
    }

    /// Sizes of tensors that are there.
    #[must_use]
    pub fn from_tensors(config: &ModelConfig, tensors: &ModelTensors) -> Self {
        let matrices: Vec<PassMatrix> = pass_matrices(tensors).collect();
        let vectors = || tensors.layers.iter().flat_map(|l| &l.vectors).chain(&tensors.vectors);
        Self {
            vector_elements: vectors().map(|v| v.len as u64).sum(),
            vector_bytes: vectors().map(|v| v.extent.bytes).sum(),
            embed_row_bytes: (tensors.embed.cols * tensors.embed.dtype.bytes()) as u64,
            expert_bytes: layout::expert_bytes(config),
            expert_reads: if every_expert_is_one_run(tensors) { 1 } else { 6 },
            index_bytes: index_bytes(config, matrices.len(), vectors().count()),
            matrices,
            pack: None,
        }
    }
}

/// Number type of a small vector in the release: norms are BF16, the rest is F32.
fn released_dtype(kind: VectorKind) -> DType {
    use VectorKind as V;
    match kind {
        V::QConv | V::KConv | V::VConv | V::ALog | V::DtBias | V::OutNorm | V::RouterBias => DType::F32,
        _ => DType::Bf16,
    }
}

fn index_bytes(config: &ModelConfig, matrices: usize, vectors: usize) -> u64 {
    let moe_layers = config.layers.iter().filter(|l| l.feed_forward == FeedForward::Moe).count();
    let experts = moe_layers * config.moe.experts * size_of::<ExpertExtents>();
    (experts + matrices * size_of::<MatrixRef>() + vectors * size_of::<VectorRef>()) as u64
}

fn every_expert_is_one_run(tensors: &ModelTensors) -> bool {
    tensors.layers.iter().filter_map(|l| l.experts.as_ref()).all(|table| {
        (0u16..).map_while(|n| table.extents(ExpertId(n))).all(|extents| extents.contiguous().is_some())
    })
}
