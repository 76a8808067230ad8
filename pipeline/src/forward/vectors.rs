//! The small vectors, resident as f32.

use std::collections::HashMap;

use k3_kernel::conv::conv_taps;
use k3_kernel::math::exp;

use crate::model::config::{Attention, FeedForward, ModelConfig};
use crate::model::tensors::{ModelTensors, VectorKind, VectorRef};
use crate::state::KdaHeadParams;
use crate::units::LayerIndex;

/// All small vectors of a model.
#[derive(Clone, Debug)]
pub struct ModelVectors {
    /// By layer.
    pub layers: Vec<LayerVectors>,
    /// `norm` [E].
    pub final_norm: Vec<f32>,
    /// Key of the last residual mix; `None` in a plain residual network.
    pub output_mix: Option<Vec<f32>>,
}

/// Small vectors of one layer.
#[derive(Clone, Debug)]
pub struct LayerVectors {
    /// `input_layernorm` [E].
    pub input_norm: Vec<f32>,
    /// `post_attention_layernorm` [E].
    pub post_attention_norm: Vec<f32>,
    /// Key of the mix before attention: norm weight times projection, [E].
    pub attention_mix: Option<Vec<f32>>,
    /// Key of the mix before the feed-forward part.
    pub mlp_mix: Option<Vec<f32>>,
    /// Those of its attention.
    pub attention: AttentionVectors,
    /// Those of its experts.
    pub moe: Option<MoeVectors>,
}

/// Small vectors of an attention.
#[derive(Clone, Debug)]
pub enum AttentionVectors {
    /// Linear attention.
    Kda {
        /// Convolutions and decay.
        head: KdaHeadParams,
        /// `o_norm` [d].
        out_norm: Vec<f32>,
    },
    /// Latent attention.
    Mla {
        /// `q_a_layernorm`, where queries are low-rank.
        q_norm: Option<Vec<f32>>,
        /// `kv_a_layernorm`.
        kv_norm: Vec<f32>,
    },
}

/// Small vectors of routed experts.
#[derive(Clone, Debug)]
pub struct MoeVectors {
    /// `e_score_correction_bias`.
    pub router_bias: Vec<f32>,
    /// `routed_expert_norm` [Λ].
    pub routed_norm: Option<Vec<f32>>,
}

/// A part without its vector: [`ModelTensors`] and [`ModelConfig`] do not belong together.
#[derive(Debug, thiserror::Error)]
#[error("the model has no {kind:?} vector in layer {layer:?}, which its configuration asks for")]
pub struct MissingVector {
    /// The part.
    pub kind: VectorKind,
    /// Its layer; `None` for the model's own.
    pub layer: Option<LayerIndex>,
}

type Loaded = HashMap<VectorKind, Vec<f32>>;

impl ModelVectors {
    /// Reads every vector with `read`, which gives the elements as f32.
    ///
    /// # Errors
    /// What `read` returns, or [`MissingVector`].
    pub fn load<E: From<MissingVector>>(
        config: &ModelConfig,
        tensors: &ModelTensors,
        mut read: impl FnMut(&VectorRef) -> Result<Vec<f32>, E>,
    ) -> Result<Self, E> {
        let mut all = |refs: &[VectorRef]| -> Result<Loaded, E> {
            refs.iter().map(|vector| Ok((vector.kind, read(vector)?))).collect()
        };
        let mut layers = Vec::with_capacity(config.layers.len());
        for ((layer, kind), bound) in config.numbered_layers().zip(&tensors.layers) {
            let mut take = Taker { loaded: all(&bound.vectors)?, layer: Some(layer) };
            layers.push(LayerVectors {
                input_norm: take.one(VectorKind::InputNorm)?,
                post_attention_norm: take.one(VectorKind::PostAttentionNorm)?,
                attention_mix: take.mix(
                    config,
                    VectorKind::AttentionResNorm,
                    VectorKind::AttentionResProj,
                )?,
                mlp_mix: take.mix(config, VectorKind::MlpResNorm, VectorKind::MlpResProj)?,
                attention: take.attention(config, kind.attention)?,
                moe: match kind.feed_forward {
                    FeedForward::Dense => None,
                    FeedForward::Moe => Some(take.moe(config)?),
                },
            });
        }
        let mut take = Taker { loaded: all(&tensors.vectors)?, layer: None };
        Ok(Self {
            layers,
            final_norm: take.one(VectorKind::FinalNorm)?,
            output_mix: take.mix(config, VectorKind::OutputResNorm, VectorKind::OutputResProj)?,
        })
    }

    /// Bytes of the vectors of `config`.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let mut floats = self.final_norm.len() + len(self.output_mix.as_ref());
        for layer in &self.layers {
            floats += layer.input_norm.len()
                + layer.post_attention_norm.len()
                + len(layer.attention_mix.as_ref())
                + len(layer.mlp_mix.as_ref());
            floats += match &layer.attention {
                AttentionVectors::Kda { head, out_norm } => {
                    3 * head.q_conv.len() + head.decay.len() + head.dt_bias.len() + out_norm.len()
                }
                AttentionVectors::Mla { q_norm, kv_norm } => len(q_norm.as_ref()) + kv_norm.len(),
            };
            if let Some(moe) = &layer.moe {
                floats += moe.router_bias.len() + len(moe.routed_norm.as_ref());
            }
        }
        4 * floats as u64
    }
}

fn len(vector: Option<&Vec<f32>>) -> usize {
    vector.map_or(0, Vec::len)
}

struct Taker {
    loaded: Loaded,
    layer: Option<LayerIndex>,
}

impl Taker {
    fn one(&mut self, kind: VectorKind) -> Result<Vec<f32>, MissingVector> {
        self.loaded.remove(&kind).ok_or(MissingVector { kind, layer: self.layer })
    }

    /// Norm weight times projection: the two only ever meet as a product.
    fn mix(
        &mut self,
        config: &ModelConfig,
        norm: VectorKind,
        projection: VectorKind,
    ) -> Result<Option<Vec<f32>>, MissingVector> {
        if config.attn_res_block.is_none() {
            return Ok(None);
        }
        let mut key = self.one(norm)?;
        for (key, projection) in key.iter_mut().zip(self.one(projection)?) {
            *key *= projection;
        }
        Ok(Some(key))
    }

    /// Convolution weights [P, K], head by head in the order of the kernel.
    fn taps(&mut self, config: &ModelConfig, kind: VectorKind) -> Result<Vec<f32>, MissingVector> {
        let weights = self.one(kind)?;
        let mut taps = vec![0.0; weights.len()];
        let head = config.kda.head_dim * config.kda.conv_kernel;
        for (weights, taps) in weights.chunks_exact(head).zip(taps.chunks_exact_mut(head)) {
            conv_taps(weights, config.kda.conv_kernel, taps);
        }
        Ok(taps)
    }

    fn attention(
        &mut self,
        config: &ModelConfig,
        attention: Attention,
    ) -> Result<AttentionVectors, MissingVector> {
        match attention {
            Attention::Kda => Ok(AttentionVectors::Kda {
                head: KdaHeadParams {
                    q_conv: self.taps(config, VectorKind::QConv)?,
                    k_conv: self.taps(config, VectorKind::KConv)?,
                    v_conv: self.taps(config, VectorKind::VConv)?,
                    // One value a head; what follows is padding.
                    decay: self
                        .one(VectorKind::ALog)?
                        .iter()
                        .take(config.kda.heads)
                        .map(|&a| exp(a))
                        .collect(),
                    dt_bias: self.one(VectorKind::DtBias)?,
                },
                out_norm: self.one(VectorKind::OutNorm)?,
            }),
            Attention::Mla => Ok(AttentionVectors::Mla {
                q_norm: match config.mla.q_rank {
                    Some(_) => Some(self.one(VectorKind::QANorm)?),
                    None => None,
                },
                kv_norm: self.one(VectorKind::KvANorm)?,
            }),
        }
    }

    fn moe(&mut self, config: &ModelConfig) -> Result<MoeVectors, MissingVector> {
        let routed_norm = if config.moe.latent.is_some() && config.moe.latent_norm {
            Some(self.one(VectorKind::RoutedNorm)?)
        } else {
            None
        };
        Ok(MoeVectors { router_bias: self.one(VectorKind::RouterBias)?, routed_norm })
    }
}
