//! The text model's configuration. Nothing here is defaulted: a value that is not in `config.json`
//! is an error of its reader.

use crate::units::{LayerIndex, TokenId};

/// Dimensions and options of one text model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Width of the residual stream, `hidden_size` (E).
    pub hidden: usize,
    /// Number of token ids, `vocab_size` (V).
    pub vocab: usize,
    /// `rms_norm_eps`. The two low-rank norms of MLA do not use it: see [`MLA_LOW_RANK_EPS`].
    pub rms_eps: f32,
    /// Linear attention (KDA).
    pub kda: KdaConfig,
    /// Full attention (latent MLA).
    pub mla: MlaConfig,
    /// Routed experts.
    pub moe: MoeConfig,
    /// `intermediate_size`: width of the MLP of dense layers.
    pub dense_width: usize,
    /// `activation_situ_beta`.
    pub situ_beta: f32,
    /// `activation_situ_linear_beta`.
    pub situ_linear_beta: f32,
    /// `attn_res_block_size`: layers per attention-residual block; `None` is a plain residual network.
    pub attn_res_block: Option<usize>,
    /// Kind of each layer, in order; its length is the number of layers.
    pub layers: Vec<LayerKind>,
    /// `bos_token_id`.
    pub bos: TokenId,
    /// `eos_token_id`: generation stops on it.
    pub eos: TokenId,
    /// `pad_token_id`.
    pub pad: TokenId,
}

/// Epsilon of `q_a_layernorm` and `kv_a_layernorm`: the released code builds these two norms with its
/// default, not with `rms_norm_eps`.
pub const MLA_LOW_RANK_EPS: f32 = 1e-6;
/// Epsilon inside the root of the length normalisation of KDA queries and keys.
pub const KDA_L2_EPS: f32 = 1e-6;

/// Linear attention.
#[derive(Clone, Debug, PartialEq)]
pub struct KdaConfig {
    /// `num_heads` (H).
    pub heads: usize,
    /// `head_dim` (d): width of keys and values of one head.
    pub head_dim: usize,
    /// `short_conv_kernel_size` (K).
    pub conv_kernel: usize,
    /// `gate_lower_bound`; `None` is the softplus decay.
    pub lower_bound: Option<f32>,
    /// `use_full_rank_gate`: `g_proj` instead of `g_a_proj`, `g_b_proj`.
    pub full_rank_gate: bool,
}

impl KdaConfig {
    /// Width of all heads together, P = H·d.
    #[must_use]
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }
}

/// Latent full attention.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaConfig {
    /// `num_attention_heads` (N).
    pub heads: usize,
    /// `q_lora_rank`; `None` is a single `q_proj`.
    pub q_rank: Option<usize>,
    /// `kv_lora_rank`.
    pub kv_rank: usize,
    /// `qk_nope_head_dim`.
    pub nope_dim: usize,
    /// `qk_rope_head_dim`; never rotated in this model (`mla_use_nope`).
    pub rope_dim: usize,
    /// `v_head_dim`.
    pub v_dim: usize,
    /// `mla_use_output_gate`.
    pub output_gate: bool,
}

impl MlaConfig {
    /// Floats kept per position and layer: the normed latent and the shared rope columns.
    #[must_use]
    pub fn latent_width(&self) -> usize {
        self.kv_rank + self.rope_dim
    }

    /// Width of one head's query: the nope columns, then the rope columns.
    #[must_use]
    pub fn query_width(&self) -> usize {
        self.nope_dim + self.rope_dim
    }
}

/// Routed and shared experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// `num_experts`.
    pub experts: usize,
    /// `num_experts_per_token`.
    pub experts_per_token: usize,
    /// `num_shared_experts`, fused into one MLP.
    pub shared_experts: usize,
    /// `routed_expert_hidden_size` (Λ); `None`: experts work on the full width.
    pub latent: Option<usize>,
    /// `moe_intermediate_size` (I).
    pub expert_width: usize,
    /// `latent_moe_use_norm`.
    pub latent_norm: bool,
    /// `moe_renormalize`.
    pub renormalize: bool,
    /// `routed_scaling_factor`.
    pub scaling: f32,
    /// `num_expert_group`.
    pub groups: usize,
    /// `topk_group`.
    pub groups_kept: usize,
}

/// What one layer is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKind {
    /// Its attention.
    pub attention: Attention,
    /// Its feed-forward part.
    pub feed_forward: FeedForward,
}

/// Kind of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// Linear attention with a recurrent state.
    Kda,
    /// Latent full attention over a cache.
    Mla,
}

/// Kind of feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedForward {
    /// One wide MLP.
    Dense,
    /// Routed experts in a latent width, and shared experts.
    Moe,
}

impl ModelConfig {
    /// Width that routed experts read and write: Λ, or E where there is no latent.
    #[must_use]
    pub fn expert_io_width(&self) -> usize {
        self.moe.latent.unwrap_or(self.hidden)
    }

    /// Width of the fused shared experts.
    #[must_use]
    pub fn shared_width(&self) -> usize {
        self.moe.shared_experts * self.moe.expert_width
    }

    /// All layers with their numbers.
    pub fn numbered_layers(&self) -> impl Iterator<Item = (LayerIndex, LayerKind)> + '_ {
        (0u16..).map(LayerIndex).zip(self.layers.iter().copied())
    }

    /// True where the snapshot of the running residual is taken: at the first layer of each block.
    #[must_use]
    pub fn starts_residual_block(&self, layer: LayerIndex) -> bool {
        self.attn_res_block.is_some_and(|n| layer.index().is_multiple_of(n))
    }
}
