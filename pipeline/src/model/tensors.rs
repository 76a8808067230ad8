//! The tensors of a model, bound to their parts: what to read, where it lies, and in which order a
//! pass needs it. Holding a [`ModelTensors`] is the proof that every tensor is present with the right
//! shape and type.

use std::path::PathBuf;

use crate::units::{ExpertId, LayerIndex};

/// Number of a weight file in [`ModelTensors::files`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u16);

/// A weight file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightFile {
    /// Where it lies.
    pub path: PathBuf,
    /// Its length in bytes when the header was read; a change later is an error.
    pub bytes: u64,
}

/// A run of bytes in a weight file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The file.
    pub file: FileId,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Number type of a dense tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// bfloat16, as released.
    Bf16,
    /// float32.
    F32,
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// The part a matrix plays. The order of the variants is not the order of execution: that is the
/// order of [`LayerTensors::matrices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MatrixKind {
    /// `self_attn.q_proj` of a KDA layer.
    KdaQ,
    /// `self_attn.k_proj`.
    KdaK,
    /// `self_attn.v_proj`.
    KdaV,
    /// `self_attn.f_a_proj`: first half of the decay gate.
    KdaDecayA,
    /// `self_attn.f_b_proj`: second half of the decay gate.
    KdaDecayB,
    /// `self_attn.b_proj`: beta.
    KdaBeta,
    /// `self_attn.g_proj` of a KDA layer: full-rank output gate.
    KdaGate,
    /// `self_attn.g_a_proj`.
    KdaGateA,
    /// `self_attn.g_b_proj`.
    KdaGateB,
    /// `self_attn.o_proj` of a KDA layer.
    KdaOut,
    /// `self_attn.q_a_proj`.
    MlaQA,
    /// `self_attn.q_b_proj`.
    MlaQB,
    /// `self_attn.q_proj` of an MLA layer without a query rank.
    MlaQ,
    /// `self_attn.kv_a_proj_with_mqa`.
    MlaKvA,
    /// `self_attn.kv_b_proj`: read by whole heads, never tiled.
    MlaKvB,
    /// `self_attn.g_proj` of an MLA layer.
    MlaGate,
    /// `self_attn.o_proj` of an MLA layer.
    MlaOut,
    /// `mlp.gate_proj`.
    MlpGate,
    /// `mlp.up_proj`.
    MlpUp,
    /// `mlp.down_proj`.
    MlpDown,
    /// `block_sparse_moe.gate.weight`.
    Router,
    /// `block_sparse_moe.routed_expert_down_proj`; absent where experts have no latent width.
    LatentDown,
    /// `block_sparse_moe.routed_expert_up_proj`.
    LatentUp,
    /// `block_sparse_moe.shared_experts.gate_proj`.
    SharedGate,
    /// `block_sparse_moe.shared_experts.up_proj`.
    SharedUp,
    /// `block_sparse_moe.shared_experts.down_proj`.
    SharedDown,
    /// `lm_head`.
    Head,
}

/// The part a small vector plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum VectorKind {
    /// `input_layernorm` [E].
    InputNorm,
    /// `post_attention_layernorm` [E].
    PostAttentionNorm,
    /// `self_attention_res_norm` [E].
    AttentionResNorm,
    /// `self_attention_res_proj` [1, E].
    AttentionResProj,
    /// `mlp_res_norm` [E].
    MlpResNorm,
    /// `mlp_res_proj` [1, E].
    MlpResProj,
    /// `q_conv1d` [P, 1, K].
    QConv,
    /// `k_conv1d` [P, 1, K].
    KConv,
    /// `v_conv1d` [P, 1, K].
    VConv,
    /// `A_log`: at least H values, of which the first H count.
    ALog,
    /// `dt_bias` [P].
    DtBias,
    /// `o_norm` [d].
    OutNorm,
    /// `q_a_layernorm`.
    QANorm,
    /// `kv_a_layernorm`.
    KvANorm,
    /// `gate.e_score_correction_bias`.
    RouterBias,
    /// `routed_expert_norm` [Λ].
    RoutedNorm,
    /// `norm` [E], after the last layer.
    FinalNorm,
    /// `output_attn_res_norm` [E].
    OutputResNorm,
    /// `output_attn_res_proj` [1, E].
    OutputResProj,
}

/// A matrix of the trunk or the head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixRef {
    /// Its part.
    pub kind: MatrixKind,
    /// Its layer; `None` for the head.
    pub layer: Option<LayerIndex>,
    /// Output width.
    pub rows: usize,
    /// Input width.
    pub cols: usize,
    /// Number type as stored.
    pub dtype: DType,
    /// Row-major bytes.
    pub extent: Extent,
}

/// A small vector, resident as f32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VectorRef {
    /// Its part.
    pub kind: VectorKind,
    /// Its layer; `None` for the model's own.
    pub layer: Option<LayerIndex>,
    /// Elements as stored.
    pub len: usize,
    /// Number type as stored.
    pub dtype: DType,
    /// Its bytes.
    pub extent: Extent,
}

/// The three products of a routed expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertPart {
    /// Gate [I, Λ].
    W1,
    /// Down [Λ, I].
    W2,
    /// Up [I, Λ].
    W3,
}

/// Where one routed expert lies: packed nibbles and scales of w1, w2, w3, in this order
/// (w1 packed, w1 scale, w2 packed, w2 scale, w3 packed, w3 scale).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertExtents(pub [Extent; 6]);

impl ExpertExtents {
    /// The whole expert as one run, where the six tensors lie back to back in this order in one file.
    #[must_use]
    pub fn contiguous(&self) -> Option<Extent> {
        let first = self.0[0];
        let mut end = first.offset;
        for e in &self.0 {
            if e.file != first.file || e.offset != end {
                return None;
            }
            end += e.bytes;
        }
        Some(Extent { file: first.file, offset: first.offset, bytes: end - first.offset })
    }
}

/// The tensors of one layer.
#[derive(Clone, Debug)]
pub struct LayerTensors {
    /// Trunk matrices in order of execution.
    pub matrices: Vec<MatrixRef>,
    /// Small vectors.
    pub vectors: Vec<VectorRef>,
    /// The routed experts, where the layer has any.
    pub experts: Option<ExpertTable>,
}

/// Where the routed experts of one layer lie. Compact: 82,432 experts must not cost 500,000 strings.
#[derive(Clone, Debug)]
pub struct ExpertTable {
    /// Extents of each expert, by number.
    experts: Box<[ExpertExtents]>,
}

impl ExpertTable {
    /// A table over the extents of experts 0, 1, …
    #[must_use]
    pub fn new(experts: Box<[ExpertExtents]>) -> Self {
        Self { experts }
    }

    /// Number of experts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.experts.len()
    }

    /// True for a table of no experts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.experts.is_empty()
    }

    /// The extents of all experts, by number.
    pub fn iter(&self) -> impl Iterator<Item = &ExpertExtents> {
        self.experts.iter()
    }

    /// Where `expert` lies; `None` past the last.
    #[must_use]
    pub fn extents(&self, expert: ExpertId) -> Option<&ExpertExtents> {
        self.experts.get(expert.index())
    }
}

/// Every tensor the text model needs, checked for presence, shape and type.
#[derive(Clone, Debug)]
pub struct ModelTensors {
    /// The weight files.
    pub files: Vec<WeightFile>,
    /// `embed_tokens` [V, E]; rows are read singly.
    pub embed: MatrixExtent,
    /// Layers in order.
    pub layers: Vec<LayerTensors>,
    /// `lm_head` [V, E].
    pub head: MatrixRef,
    /// The model's own vectors: last norm, last residual mix.
    pub vectors: Vec<VectorRef>,
    /// Tensors of the image tower, which are left alone.
    pub vision: VisionTensors,
    /// What the directory was when it was opened.
    pub fingerprint: Fingerprint,
}

/// Tensors of the image tower.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VisionTensors {
    /// How many there are.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// A hash over the configuration's text and, file by file, its name, length and header, and so over
/// every tensor's name, type, shape and place. Packs and saved sessions carry it: they are refused
/// with another checkpoint. It does not read the weights themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(pub u128);

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// A matrix that is no part of a pass's walk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixExtent {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Number type as stored.
    pub dtype: DType,
    /// Row-major bytes.
    pub extent: Extent,
}
