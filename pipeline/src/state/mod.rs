//! What a sequence carries from one pass to the next: the recurrent state and convolution history of
//! every KDA layer, the latent cache of every MLA layer.
//!
//! A draft (tokens that may be rejected) leaves the recurrent state as it was; what its tokens would have
//! done is kept raw, and committing the first n of them replays just those. The latent cache is written
//! ahead and simply not counted until then.

mod kda;
mod latent;
mod marks;

pub use kda::{KdaHeadParams, KdaRaw, KdaState, history_len, kda_head_scratch, recurrent_len, run_head};
pub use latent::LatentCache;

use crate::model::config::{Attention, ModelConfig};
use crate::units::LayerIndex;
use marks::Marks;

/// State of one sequence. All memory is allocated by [`SequenceState::new`].
#[derive(Debug)]
pub struct SequenceState {
    layers: Vec<LayerState>,
    context: usize,
    len: usize,
    draft_max: usize,
    draft: usize,
    damaged: bool,
    marks: Marks,
}

/// State of one layer.
#[derive(Debug)]
pub enum LayerState {
    /// Linear attention.
    Kda(KdaState),
    /// Latent attention.
    Mla(LatentCache),
}

/// Bytes of a [`SequenceState`] for sequences of `context` tokens and drafts of `draft_tokens`.
#[must_use]
pub fn state_bytes(config: &ModelConfig, context: usize, draft_tokens: usize) -> u64 {
    let floats = |kind| match kind {
        Attention::Kda => KdaState::floats(&config.kda, draft_tokens),
        Attention::Mla => LatentCache::floats(&config.mla, context),
    };
    config.layers.iter().map(|layer| 4 * floats(layer.attention) as u64).sum()
}

/// Bytes of one copy of a sequence's recurrent state and convolution history.
#[must_use]
pub fn mark_bytes(config: &ModelConfig) -> u64 {
    let layers = config.layers.iter().filter(|layer| layer.attention == Attention::Kda).count();
    4 * (layers * KdaState::mark_floats(&config.kda)) as u64
}

impl SequenceState {
    /// An empty sequence with room for `context` tokens, of which drafts may hold `draft_tokens`, and
    /// for going back to `marks` positions.
    #[must_use]
    pub fn new(config: &ModelConfig, context: usize, draft_tokens: usize, marks: usize) -> Self {
        let layers = config
            .layers
            .iter()
            .map(|layer| match layer.attention {
                Attention::Kda => LayerState::Kda(KdaState::new(&config.kda, draft_tokens, marks)),
                Attention::Mla => LayerState::Mla(LatentCache::new(&config.mla, context)),
            })
            .collect();
        let marks = Marks::new(marks);
        Self { layers, context, len: 0, draft_max: draft_tokens, draft: 0, damaged: false, marks }
    }

    /// Tokens that the state stands for, an uncommitted draft not counted.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True before the first token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens the sequence may hold.
    #[must_use]
    pub fn context(&self) -> usize {
        self.context
    }

    /// Longest draft.
    #[must_use]
    pub fn draft_max(&self) -> usize {
        self.draft_max
    }

    /// Tokens of the draft that waits to be committed.
    #[must_use]
    pub fn draft(&self) -> usize {
        self.draft
    }

    /// True after a pass that ended in the middle: some layers have seen its tokens, some have not. Only
    /// [`SequenceState::clear`], [`SequenceState::restore`] or [`SequenceState::go_back`] makes the state
    /// usable again.
    #[must_use]
    pub fn is_damaged(&self) -> bool {
        self.damaged
    }

    /// Back to the empty sequence.
    pub fn clear(&mut self) {
        for layer in &mut self.layers {
            if let LayerState::Kda(kda) = layer {
                kda.clear();
            }
        }
        self.len = 0;
        self.draft = 0;
        self.damaged = false;
        self.marks.cut_back(0);
    }

    /// Keeps what is needed to go back to `position` later: at once if that is where the sequence
    /// stands, else when a pass that commits comes by it. Of too many marks the first stays and the
    /// oldest other gives way.
    pub fn mark(&mut self, position: usize) {
        let is_here = position == self.len && !self.damaged && self.draft == 0;
        if position == 0 || position < self.len || (position == self.len && !is_here) {
            return;
        }
        if let Some(slot) = self.marks.want(position).filter(|_| is_here) {
            self.kda_layers().for_each(|kda| kda.keep_mark(slot));
            self.marks.reached(position);
        }
    }

    /// The last position up to `limit` that the sequence can go back to.
    #[must_use]
    pub fn last_mark(&self, limit: usize) -> Option<usize> {
        self.marks.last(limit).map(|(position, _)| position)
    }

    /// Every position that the sequence can go back to, ascending.
    #[must_use]
    pub fn marked(&self) -> Vec<usize> {
        let mut positions: Vec<usize> = self.marks.kept().map(|(position, _)| position).collect();
        positions.sort_unstable();
        positions
    }

    /// Most positions that it can go back to.
    #[must_use]
    pub fn marks_max(&self) -> usize {
        self.marks.slots()
    }

    /// Floats of a mark.
    #[must_use]
    pub fn mark_floats(&self) -> usize {
        let floats = |layer: &LayerState| match layer {
            LayerState::Kda(kda) => kda.recurrent().len() + kda.history().len(),
            LayerState::Mla(_) => 0,
        };
        self.layers.iter().map(floats).sum()
    }

    /// Makes the state what it was at the last mark up to `limit`, or empty where there is none. What
    /// came after is forgotten, a draft and marks too. Gives the position.
    pub fn go_back(&mut self, limit: usize) -> usize {
        let Some((position, slot)) = self.marks.last(limit) else {
            self.clear();
            return 0;
        };
        self.kda_layers().for_each(|kda| kda.go_back(slot));
        self.marks.cut_back(position);
        self.len = position;
        self.draft = 0;
        self.damaged = false;
        position
    }

    /// What a copy of the mark at `position` needs, in a fixed order; nothing where there is no mark.
    pub fn mark_slices(&self, position: usize) -> impl Iterator<Item = &[f32]> {
        let slot = self.marks.kept().find(|(at, _)| *at == position).map(|(_, slot)| slot);
        self.layers.iter().filter_map(move |layer| match (layer, slot) {
            (LayerState::Kda(kda), Some(slot)) => Some(kda.mark(slot)),
            _ => None,
        })
    }

    /// Makes `position` a mark whose [`SequenceState::mark_slices`] `fill` writes.
    ///
    /// # Errors
    /// What `fill` returns; there is no such mark then.
    pub fn restore_mark<E>(
        &mut self,
        position: usize,
        mut fill: impl FnMut(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(slot) = self.marks.want(position) else { return Ok(()) };
        self.kda_layers().try_for_each(|kda| fill(kda.mark_mut(slot)))?;
        self.marks.reached(position);
        Ok(())
    }

    fn kda_layers(&mut self) -> impl Iterator<Item = &mut KdaState> {
        self.layers.iter_mut().filter_map(|layer| match layer {
            LayerState::Kda(kda) => Some(kda),
            LayerState::Mla(_) => None,
        })
    }

    /// Drops the draft: the state is what it was before it.
    pub fn reject_draft(&mut self) {
        self.draft = 0;
    }

    /// Everything a copy of the state needs, in a fixed order: recurrent states, histories, and the
    /// latent positions in use.
    pub fn slices(&self) -> impl Iterator<Item = &[f32]> {
        let len = self.len;
        self.layers.iter().flat_map(move |layer| match layer {
            LayerState::Kda(kda) => [kda.recurrent(), kda.history()],
            LayerState::Mla(latent) => [latent.filled(len), &[]],
        })
    }

    /// Makes the state that of a sequence of `len` tokens whose [`SequenceState::slices`] `fill` writes.
    ///
    /// # Errors
    /// What `fill` returns; the state is damaged then.
    ///
    /// # Panics
    /// When `len` is more than the context.
    pub fn restore<E>(
        &mut self,
        len: usize,
        mut fill: impl FnMut(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        assert!(len <= self.context, "{len} tokens in a context of {}", self.context);
        self.damaged = true;
        self.draft = 0;
        self.len = len;
        self.marks.cut_back(0);
        for layer in &mut self.layers {
            match layer {
                LayerState::Kda(kda) => {
                    fill(kda.recurrent_mut())?;
                    fill(kda.history_mut())?;
                }
                LayerState::Mla(latent) => {
                    fill(latent.filled_mut(len))?;
                    fill(&mut [])?;
                }
            }
        }
        self.damaged = false;
        Ok(())
    }

    /// The state of layer `index`.
    pub(crate) fn layer(&self, index: usize) -> Option<&LayerState> {
        self.layers.get(index)
    }

    /// The state of layer `index`, to be changed.
    pub(crate) fn layer_mut(&mut self, index: usize) -> Option<&mut LayerState> {
        self.layers.get_mut(index)
    }

    /// All layers.
    pub(crate) fn layers_mut(&mut self) -> &mut [LayerState] {
        &mut self.layers
    }

    /// The first layer that is not of the sizes of `config`: the state was made for another model then.
    pub(crate) fn misfit(&self, config: &ModelConfig) -> Option<LayerIndex> {
        let fits = |layer: LayerIndex, attention| match (self.layer(layer.index()), attention) {
            (Some(LayerState::Kda(state)), Attention::Kda) => state.fits(&config.kda),
            (Some(LayerState::Mla(cache)), Attention::Mla) => cache.fits(&config.mla, self.context),
            _ => false,
        };
        config.numbered_layers().find(|(layer, kind)| !fits(*layer, kind.attention)).map(|(layer, _)| layer)
    }

    /// A pass begins to change the state.
    pub(crate) fn begin(&mut self) {
        self.damaged = true;
    }

    /// A pass has run to its end: `tokens` are part of the sequence, and the copies wanted on the way
    /// have been taken.
    pub(crate) fn finish(&mut self, tokens: usize) {
        self.advance(tokens);
        self.marks.reached(self.len);
    }

    /// The first `tokens` of a draft are part of the sequence.
    pub(crate) fn finish_commit(&mut self, tokens: usize) {
        self.advance(tokens);
        self.marks.missed(self.len);
    }

    fn advance(&mut self, tokens: usize) {
        self.len += tokens;
        self.draft = 0;
        self.damaged = false;
    }

    /// The end of the stretch that begins after `done` of `tokens` new tokens, and the slot of the mark
    /// that is wanted there.
    pub(crate) fn stretch(&self, done: usize, tokens: usize) -> (usize, Option<usize>) {
        match self.marks.wanted_within(self.len + done, self.len + tokens) {
            Some((position, slot)) => (position - self.len, Some(slot)),
            None => (tokens, None),
        }
    }

    /// A pass has run to its end: `tokens` wait to be committed. The state before them is whole.
    pub(crate) fn finish_draft(&mut self, tokens: usize) {
        self.draft = tokens;
        self.damaged = false;
    }
}
