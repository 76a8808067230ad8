//! Names and shapes of every tensor of the text model, from its configuration alone.
//!
//! The same tables bind a checkpoint, cut a plan without one, and make a synthetic one, so they
//! cannot disagree. Names and shapes are the release's.

use super::config::{Attention, FeedForward, LayerKind, ModelConfig};
use super::tensors::{ExpertPart, MatrixKind, VectorKind};
use crate::units::{ExpertId, LayerIndex};

/// What every tensor of the text model's body is named under.
pub const BODY_PREFIX: &str = "language_model.model.";
/// Name of the token embedding [V, E].
pub const EMBED_NAME: &str = "language_model.model.embed_tokens.weight";
/// Name of the output head [V, E].
pub const HEAD_NAME: &str = "language_model.lm_head.weight";
/// Tensors under these names belong to the image tower and are left alone.
pub const VISION_PREFIXES: [&str; 2] = ["vision_tower.", "mm_projector."];

/// Columns that share one MXFP4 scale byte.
pub const MXFP4_GROUP: usize = 32;

/// A matrix of the trunk or the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    /// Its part.
    pub kind: MatrixKind,
    /// Output width.
    pub rows: usize,
    /// Input width.
    pub cols: usize,
}

/// A small vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorShape {
    /// Its part.
    pub kind: VectorKind,
    /// Its shape as stored.
    pub dims: VectorDims,
}

/// Shape of a small vector as stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VectorDims {
    /// [n].
    Flat(usize),
    /// [1, n].
    Row(usize),
    /// [channels, 1, taps].
    Taps(usize, usize),
    /// [n] or longer: the release pads `A_log`, and only the first n values count.
    AtLeast(usize),
}

impl VectorDims {
    /// Number of elements that the model uses.
    #[must_use]
    pub fn used(self) -> usize {
        match self {
            Self::Flat(n) | Self::Row(n) | Self::AtLeast(n) => n,
            Self::Taps(channels, taps) => channels * taps,
        }
    }

    /// True when a tensor of this shape can play the part.
    #[must_use]
    pub fn accepts(self, shape: &[u64]) -> bool {
        let eq = |a: u64, b: usize| usize::try_from(a) == Ok(b);
        match (self, shape) {
            (Self::Flat(n), &[a]) => eq(a, n),
            (Self::Row(n), &[one, a]) => one == 1 && eq(a, n),
            (Self::Taps(channels, taps), &[a, one, b]) => eq(a, channels) && one == 1 && eq(b, taps),
            (Self::AtLeast(n), &[a]) => usize::try_from(a).is_ok_and(|a| (n..=A_LOG_MAX).contains(&a)),
            _ => false,
        }
    }
}

impl std::fmt::Display for VectorDims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Flat(n) => write!(f, "[{n}]"),
            Self::Row(n) => write!(f, "[1, {n}]"),
            Self::Taps(channels, taps) => write!(f, "[{channels}, 1, {taps}]"),
            Self::AtLeast(n) => write!(f, "[{n} or more]"),
        }
    }
}

/// Elements that a padded `A_log` may have.
pub const A_LOG_MAX: usize = 1 << 16;

/// One product of a routed expert, as two tensors: packed nibbles [rows, cols/2] and scale bytes
/// [rows, cols/32].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Its part.
    pub part: ExpertPart,
    /// Output width.
    pub rows: usize,
    /// Input width; a multiple of [`MXFP4_GROUP`].
    pub cols: usize,
}

impl ExpertShape {
    /// Bytes of the packed nibbles.
    #[must_use]
    pub fn packed_bytes(&self) -> u64 {
        (self.rows * self.cols / 2) as u64
    }

    /// Bytes of the scales.
    #[must_use]
    pub fn scale_bytes(&self) -> u64 {
        (self.rows * self.cols / MXFP4_GROUP) as u64
    }
}

/// Matrices of one layer in order of execution; none past the last layer.
#[must_use]
pub fn matrices(config: &ModelConfig, layer: LayerIndex) -> Vec<MatrixShape> {
    let Some(kind) = config.layers.get(layer.index()) else { return Vec::new() };
    let mut out = attention_matrices(config, kind.attention);
    out.extend(feed_forward_matrices(config, kind.feed_forward));
    out
}

fn shape(kind: MatrixKind, rows: usize, cols: usize) -> MatrixShape {
    MatrixShape { kind, rows, cols }
}

fn attention_matrices(config: &ModelConfig, attention: Attention) -> Vec<MatrixShape> {
    use MatrixKind as M;
    let e = config.hidden;
    match attention {
        Attention::Kda => {
            let (p, d) = (config.kda.width(), config.kda.head_dim);
            let mut out = vec![
                shape(M::KdaQ, p, e),
                shape(M::KdaK, p, e),
                shape(M::KdaV, p, e),
                shape(M::KdaDecayA, d, e),
                shape(M::KdaDecayB, p, d),
                shape(M::KdaBeta, config.kda.heads, e),
            ];
            if config.kda.full_rank_gate {
                out.push(shape(M::KdaGate, p, e));
            } else {
                out.extend([shape(M::KdaGateA, d, e), shape(M::KdaGateB, p, d)]);
            }
            out.push(shape(M::KdaOut, e, p));
            out
        }
        Attention::Mla => {
            let mla = &config.mla;
            let (queries, values) = (mla.heads * mla.query_width(), mla.heads * mla.v_dim);
            let mut out = match mla.q_rank {
                Some(rank) => vec![shape(M::MlaQA, rank, e), shape(M::MlaQB, queries, rank)],
                None => vec![shape(M::MlaQ, queries, e)],
            };
            out.push(shape(M::MlaKvA, mla.latent_width(), e));
            out.push(shape(M::MlaKvB, mla.heads * (mla.nope_dim + mla.v_dim), mla.kv_rank));
            if mla.output_gate {
                out.push(shape(M::MlaGate, values, e));
            }
            out.push(shape(M::MlaOut, e, values));
            out
        }
    }
}

fn feed_forward_matrices(config: &ModelConfig, feed_forward: FeedForward) -> Vec<MatrixShape> {
    use MatrixKind as M;
    let e = config.hidden;
    match feed_forward {
        FeedForward::Dense => {
            let w = config.dense_width;
            vec![shape(M::MlpGate, w, e), shape(M::MlpUp, w, e), shape(M::MlpDown, e, w)]
        }
        FeedForward::Moe => {
            let shared = config.shared_width();
            let mut out = vec![shape(M::Router, config.moe.experts, e)];
            out.extend(config.moe.latent.map(|latent| shape(M::LatentDown, latent, e)));
            out.extend([
                shape(M::SharedGate, shared, e),
                shape(M::SharedUp, shared, e),
                shape(M::SharedDown, e, shared),
            ]);
            out.extend(config.moe.latent.map(|latent| shape(M::LatentUp, e, latent)));
            out
        }
    }
}

/// The head [V, E].
#[must_use]
pub fn head(config: &ModelConfig) -> MatrixShape {
    shape(MatrixKind::Head, config.vocab, config.hidden)
}

/// Small vectors of one layer; none past the last layer.
#[must_use]
pub fn vectors(config: &ModelConfig, layer: LayerIndex) -> Vec<VectorShape> {
    let Some(&LayerKind { attention, feed_forward }) = config.layers.get(layer.index()) else {
        return Vec::new();
    };
    use VectorDims::{AtLeast, Flat, Row, Taps};
    use VectorKind as V;
    let e = config.hidden;
    let mut out = vec![(V::InputNorm, Flat(e)), (V::PostAttentionNorm, Flat(e))];
    if config.attn_res_block.is_some() {
        out.extend([
            (V::AttentionResNorm, Flat(e)),
            (V::AttentionResProj, Row(e)),
            (V::MlpResNorm, Flat(e)),
            (V::MlpResProj, Row(e)),
        ]);
    }
    match attention {
        Attention::Kda => {
            let (p, taps) = (config.kda.width(), config.kda.conv_kernel);
            out.extend([(V::QConv, Taps(p, taps)), (V::KConv, Taps(p, taps)), (V::VConv, Taps(p, taps))]);
            out.extend([
                (V::ALog, AtLeast(config.kda.heads)),
                (V::DtBias, Flat(p)),
                (V::OutNorm, Flat(config.kda.head_dim)),
            ]);
        }
        Attention::Mla => {
            out.extend(config.mla.q_rank.map(|rank| (V::QANorm, Flat(rank))));
            out.push((V::KvANorm, Flat(config.mla.kv_rank)));
        }
    }
    if feed_forward == FeedForward::Moe {
        out.push((V::RouterBias, Flat(config.moe.experts)));
        let normed = config.moe.latent.filter(|_| config.moe.latent_norm);
        out.extend(normed.map(|latent| (V::RoutedNorm, Flat(latent))));
    }
    out.into_iter().map(|(kind, dims)| VectorShape { kind, dims }).collect()
}

/// The model's own vectors: the last norm and the last residual mix.
#[must_use]
pub fn model_vectors(config: &ModelConfig) -> Vec<VectorShape> {
    let e = config.hidden;
    let mut out = vec![VectorShape { kind: VectorKind::FinalNorm, dims: VectorDims::Flat(e) }];
    if config.attn_res_block.is_some() {
        out.push(VectorShape { kind: VectorKind::OutputResNorm, dims: VectorDims::Flat(e) });
        out.push(VectorShape { kind: VectorKind::OutputResProj, dims: VectorDims::Row(e) });
    }
    out
}

/// The three products of a routed expert, in the order they are stored.
#[must_use]
pub fn expert(config: &ModelConfig) -> [ExpertShape; 3] {
    let (inner, io) = (config.moe.expert_width, config.expert_io_width());
    [
        ExpertShape { part: ExpertPart::W1, rows: inner, cols: io },
        ExpertShape { part: ExpertPart::W2, rows: io, cols: inner },
        ExpertShape { part: ExpertPart::W3, rows: inner, cols: io },
    ]
}

/// Bytes of the six tensors of a routed expert, in the order they are stored.
#[must_use]
pub fn expert_extents(config: &ModelConfig) -> [u64; 6] {
    let [w1, w2, w3] = expert(config);
    [
        w1.packed_bytes(),
        w1.scale_bytes(),
        w2.packed_bytes(),
        w2.scale_bytes(),
        w3.packed_bytes(),
        w3.scale_bytes(),
    ]
}

/// Bytes of a whole routed expert.
#[must_use]
pub fn expert_bytes(config: &ModelConfig) -> u64 {
    expert_extents(config).iter().sum()
}

/// Name of a matrix after the layer's prefix; the head's is its whole name.
#[must_use]
pub fn matrix_suffix(kind: MatrixKind) -> &'static str {
    use MatrixKind as M;
    match kind {
        M::KdaQ | M::MlaQ => "self_attn.q_proj.weight",
        M::KdaK => "self_attn.k_proj.weight",
        M::KdaV => "self_attn.v_proj.weight",
        M::KdaDecayA => "self_attn.f_a_proj.weight",
        M::KdaDecayB => "self_attn.f_b_proj.weight",
        M::KdaBeta => "self_attn.b_proj.weight",
        M::KdaGate | M::MlaGate => "self_attn.g_proj.weight",
        M::KdaGateA => "self_attn.g_a_proj.weight",
        M::KdaGateB => "self_attn.g_b_proj.weight",
        M::KdaOut | M::MlaOut => "self_attn.o_proj.weight",
        M::MlaQA => "self_attn.q_a_proj.weight",
        M::MlaQB => "self_attn.q_b_proj.weight",
        M::MlaKvA => "self_attn.kv_a_proj_with_mqa.weight",
        M::MlaKvB => "self_attn.kv_b_proj.weight",
        M::MlpGate => "mlp.gate_proj.weight",
        M::MlpUp => "mlp.up_proj.weight",
        M::MlpDown => "mlp.down_proj.weight",
        M::Router => "block_sparse_moe.gate.weight",
        M::LatentDown => "block_sparse_moe.routed_expert_down_proj.weight",
        M::LatentUp => "block_sparse_moe.routed_expert_up_proj.weight",
        M::SharedGate => "block_sparse_moe.shared_experts.gate_proj.weight",
        M::SharedUp => "block_sparse_moe.shared_experts.up_proj.weight",
        M::SharedDown => "block_sparse_moe.shared_experts.down_proj.weight",
        M::Head => HEAD_NAME,
    }
}

/// Name of a vector after the layer's prefix, or after [`BODY_PREFIX`] for the model's own.
#[must_use]
pub fn vector_suffix(kind: VectorKind) -> &'static str {
    use VectorKind as V;
    match kind {
        V::InputNorm => "input_layernorm.weight",
        V::PostAttentionNorm => "post_attention_layernorm.weight",
        V::AttentionResNorm => "self_attention_res_norm.weight",
        V::AttentionResProj => "self_attention_res_proj.weight",
        V::MlpResNorm => "mlp_res_norm.weight",
        V::MlpResProj => "mlp_res_proj.weight",
        V::QConv => "self_attn.q_conv1d.weight",
        V::KConv => "self_attn.k_conv1d.weight",
        V::VConv => "self_attn.v_conv1d.weight",
        V::ALog => "self_attn.A_log",
        V::DtBias => "self_attn.dt_bias",
        V::OutNorm => "self_attn.o_norm.weight",
        V::QANorm => "self_attn.q_a_layernorm.weight",
        V::KvANorm => "self_attn.kv_a_layernorm.weight",
        V::RouterBias => "block_sparse_moe.gate.e_score_correction_bias",
        V::RoutedNorm => "block_sparse_moe.routed_expert_norm.weight",
        V::FinalNorm => "norm.weight",
        V::OutputResNorm => "output_attn_res_norm.weight",
        V::OutputResProj => "output_attn_res_proj.weight",
    }
}

fn full_name(layer: Option<LayerIndex>, suffix: &str) -> String {
    match layer {
        Some(layer) => format!("{BODY_PREFIX}layers.{layer}.{suffix}"),
        None => format!("{BODY_PREFIX}{suffix}"),
    }
}

/// Full name of a matrix; only the head has no layer.
#[must_use]
pub fn matrix_name(layer: Option<LayerIndex>, kind: MatrixKind) -> String {
    match kind {
        MatrixKind::Head => HEAD_NAME.to_owned(),
        _ => full_name(layer, matrix_suffix(kind)),
    }
}

/// Full name of a vector.
#[must_use]
pub fn vector_name(layer: Option<LayerIndex>, kind: VectorKind) -> String {
    full_name(layer, vector_suffix(kind))
}

/// The six tensors of an expert in the order they are stored, by their endings.
pub const EXPERT_SUFFIXES: [&str; 6] = [
    "w1.weight_packed",
    "w1.weight_scale",
    "w2.weight_packed",
    "w2.weight_scale",
    "w3.weight_packed",
    "w3.weight_scale",
];

/// Full name of one of the six tensors of an expert; `slot` indexes [`EXPERT_SUFFIXES`].
#[must_use]
pub fn expert_name(layer: LayerIndex, expert: ExpertId, slot: usize) -> String {
    let suffix = EXPERT_SUFFIXES.get(slot).copied().unwrap_or("?");
    format!("{BODY_PREFIX}layers.{layer}.block_sparse_moe.experts.{expert}.{suffix}")
}
