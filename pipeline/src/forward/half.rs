//! The two halves of a layer, and a way to run one alone.

use super::error::RunError;
use super::vectors::LayerVectors;
use super::walk::Walk;
use super::{Executor, Parts, Pass, SequenceRun, Tap};
use crate::model::config::{Attention, FeedForward, LayerKind};
use crate::units::LayerIndex;

/// A half of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerHalf {
    /// Attention.
    Attention,
    /// MLP or experts.
    FeedForward,
}

impl Executor {
    /// One half of `layer` on inputs of its own: `x` [tokens, E] is what its norm would hand on, the result
    /// [tokens, E] what the half gives back. For verification against operations that were computed
    /// alone: the weights must begin with the half's first block. `run` is advanced.
    ///
    /// # Errors
    /// As [`Executor::pass`].
    pub fn half(
        &mut self,
        (layer, half): (LayerIndex, LayerHalf),
        x: &[f32],
        run: SequenceRun<'_>,
    ) -> Result<&[f32], RunError> {
        let mut runs = [run];
        let tokens = self.admit(&runs)?;
        runs[0].state.begin();
        let kind = self.config.layers[layer.index()];
        let Parts { mut pass, mut walk, vectors, .. } = self.parts(tokens, 0);
        let vectors = &vectors.layers[layer.index()];
        pass.normed.copy_from_slice(x);
        walk.weights.begin_pass(false)?;
        match half {
            LayerHalf::Attention => pass.attention(&mut walk, (layer, kind), vectors, &mut runs)?,
            LayerHalf::FeedForward => pass.feed_forward(&mut walk, (layer, kind), vectors, &mut None)?,
        }
        runs[0].state.finish(tokens);
        Ok(&self.workspace.mixed[..tokens * self.config.hidden])
    }
}

impl Pass<'_> {
    /// `mixed` = attention(`normed`).
    pub(super) fn attention(
        &mut self,
        walk: &mut Walk<'_>,
        (layer, kind): (LayerIndex, LayerKind),
        vectors: &LayerVectors,
        runs: &mut [SequenceRun<'_>],
    ) -> Result<(), RunError> {
        match kind.attention {
            Attention::Kda => self.attention_kda(walk, layer, &vectors.attention, runs),
            Attention::Mla => self.attention_mla(walk, layer, &vectors.attention, runs),
        }
    }

    /// `mixed` = MLP or experts of `normed`.
    pub(super) fn feed_forward(
        &mut self,
        walk: &mut Walk<'_>,
        (layer, kind): (LayerIndex, LayerKind),
        vectors: &LayerVectors,
        tap: &mut Option<&mut dyn Tap>,
    ) -> Result<(), RunError> {
        match (kind.feed_forward, &vectors.moe) {
            (FeedForward::Moe, Some(moe)) => self.experts(walk, layer, moe, tap),
            _ => self.dense(walk, layer),
        }
    }
}
