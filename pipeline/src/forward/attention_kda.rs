//! Linear attention: projections of all tokens, then every head through its tokens, one after the
//! other.

use k3_kernel::Columns;

use super::error::RunError;
use super::vectors::{AttentionVectors, ModelVectors};
use super::walk::{Tools, Walk};
use super::{Commit, Pass, SequenceRun, wanted};
use crate::model::config::KdaConfig;
use crate::model::tensors::MatrixKind;
use crate::state::{KdaHeadParams, KdaRaw, LayerState, SequenceState, history_len, recurrent_len, run_head};
use crate::team::Tiles;
use crate::units::LayerIndex;
use crate::workspace::cut;

impl Pass<'_> {
    /// `mixed` = KDA(`normed`).
    pub(super) fn attention_kda(
        &mut self,
        walk: &mut Walk<'_>,
        layer: LayerIndex,
        vectors: &AttentionVectors,
        runs: &mut [SequenceRun<'_>],
    ) -> Result<(), RunError> {
        let AttentionVectors::Kda { head: params, out_norm } = vectors else {
            return Err(RunError::ForeignState { layer });
        };
        let c = &self.config.kda;
        let (tokens, d, width) = (self.tokens, c.head_dim, c.width());
        let x = Columns::packed(self.normed, self.config.hidden, tokens);
        let mut rest = &mut *self.phase;
        let [q, k, v, z, gate, o] = std::array::from_fn(|_| cut(&mut rest, tokens * width));
        let low = cut(&mut rest, tokens * d);
        let beta = cut(&mut rest, tokens * c.heads);

        walk.product(wanted(MatrixKind::KdaQ, layer, width), x, q)?;
        walk.product(wanted(MatrixKind::KdaK, layer, width), x, k)?;
        walk.product(wanted(MatrixKind::KdaV, layer, width), x, v)?;
        walk.product(wanted(MatrixKind::KdaDecayA, layer, d), x, low)?;
        walk.product(wanted(MatrixKind::KdaDecayB, layer, width), Columns::packed(low, d, tokens), z)?;
        walk.product(wanted(MatrixKind::KdaBeta, layer, c.heads), x, beta)?;
        walk.tools.kernels.sigmoid(beta);
        if c.full_rank_gate {
            walk.product(wanted(MatrixKind::KdaGate, layer, width), x, gate)?;
        } else {
            walk.product(wanted(MatrixKind::KdaGateA, layer, d), x, low)?;
            walk.product(wanted(MatrixKind::KdaGateB, layer, width), Columns::packed(low, d, tokens), gate)?;
        }

        let heads = Heads { config: c, eps: self.config.rms_eps, params, out_norm };
        let mut first = 0;
        for run in runs.iter_mut() {
            let wide = first * width..(first + run.tokens.len()) * width;
            let narrow = first * c.heads..(first + run.tokens.len()) * c.heads;
            first += run.tokens.len();
            let raw = KdaRaw {
                q: &q[wide.clone()],
                k: &k[wide.clone()],
                v: &v[wide.clone()],
                z: &z[wide.clone()],
                beta: &beta[narrow],
            };
            heads.sequence(walk, (layer, run), &raw, &gate[wide.clone()], &mut o[wide])?;
        }
        walk.product(
            wanted(MatrixKind::KdaOut, layer, self.config.hidden),
            Columns::packed(o, width, tokens),
            self.mixed,
        )
    }
}

/// All heads of one layer.
struct Heads<'a> {
    config: &'a KdaConfig,
    eps: f32,
    params: &'a KdaHeadParams,
    out_norm: &'a [f32],
}

impl Heads<'_> {
    /// Takes one sequence through its tokens, stretch by stretch where copies of its state are wanted on
    /// the way.
    fn sequence(
        &self,
        walk: &mut Walk<'_>,
        (layer, run): (LayerIndex, &mut SequenceRun<'_>),
        raw: &KdaRaw<'_>,
        gate: &[f32],
        o: &mut [f32],
    ) -> Result<(), RunError> {
        let (width, tokens) = (self.config.width(), run.tokens.len());
        let mut done = 0;
        while done < tokens {
            let (end, slot) = match run.commit {
                Commit::All => run.state.stretch(done, tokens),
                Commit::Deferred => (tokens, None),
            };
            let Some(LayerState::Kda(state)) = run.state.layer_mut(layer.index()) else {
                return Err(RunError::ForeignState { layer });
            };
            let raw = raw.tokens(self.config, done..end);
            if run.commit == Commit::Deferred {
                state.keep_draft(&raw);
            }
            let wide = done * width..end * width;
            let parts = (run.commit, state.advance_parts());
            self.run(walk, &raw, parts, &gate[wide.clone()], &mut o[wide])?;
            if let Some(slot) = slot {
                state.keep_mark(slot);
            }
            done = end;
        }
        Ok(())
    }

    /// Takes every head through the tokens of one sequence: `o` [tokens, P] after norm and gate. A
    /// deferred run works on a copy of each head's state.
    fn run(
        &self,
        walk: &mut Walk<'_>,
        raw: &KdaRaw<'_>,
        (commit, (recurrent, history)): (Commit, (&mut [f32], &mut [f32])),
        gate: &[f32],
        o: &mut [f32],
    ) -> Result<(), RunError> {
        let (c, kernels) = (self.config, walk.tools.kernels);
        let (d, width) = (c.head_dim, c.width());
        let parts = (
            Tiles::chunks(recurrent, recurrent_len(c)),
            Tiles::chunks(history, history_len(c)),
            Tiles::strips(o, width, d),
        );
        walk.tools.long_parts(walk.cancel, parts, |scratch, head, (mut recurrent, mut history, mut o)| {
            let emit = |t: usize, value: &[f32]| {
                let gate = &gate[t * width + head * d..][..d];
                kernels.rmsnorm_gated(value, self.out_norm, self.eps, gate, o.row(t));
            };
            let (recurrent, history) = (recurrent.row(head), history.row(head));
            let which = (self.params, head);
            match commit {
                Commit::All => run_head(kernels, c, which, raw, (recurrent, history), scratch, emit),
                Commit::Deferred => {
                    let mut rest = &mut scratch[..];
                    let recurrent_copy = cut(&mut rest, recurrent.len());
                    let history_copy = cut(&mut rest, history.len());
                    recurrent_copy.copy_from_slice(recurrent);
                    history_copy.copy_from_slice(history);
                    run_head(kernels, c, which, raw, (recurrent_copy, history_copy), rest, emit);
                }
            }
        })
    }
}

/// Advances all recurrent states by the first `tokens` tokens of the draft.
pub(super) fn replay(
    tools: &mut Tools<'_>,
    config: &KdaConfig,
    vectors: &ModelVectors,
    state: &mut SequenceState,
    tokens: usize,
) -> Result<(), RunError> {
    let kernels = tools.kernels;
    for (layer, vectors) in state.layers_mut().iter_mut().zip(&vectors.layers) {
        let (LayerState::Kda(kda), AttentionVectors::Kda { head: params, .. }) = (layer, &vectors.attention)
        else {
            continue;
        };
        let (recurrent, history, raw) = kda.replay_parts(config, tokens);
        let parts =
            (Tiles::chunks(recurrent, recurrent_len(config)), Tiles::chunks(history, history_len(config)));
        tools.parts(parts, |scratch, head, (mut recurrent, mut history)| {
            let state = (recurrent.row(head), history.row(head));
            run_head(kernels, config, (params, head), &raw, state, scratch, |_, _| ());
        })?;
    }
    Ok(())
}
