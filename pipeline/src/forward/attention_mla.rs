//! Latent attention in the absorbed form: the query is taken into the latent space by `kv_b`'s key rows,
//! scores and weighted sums run over the latent cache, and `kv_b`'s value rows take the sum back. The
//! same form serves prefill and decode.

use std::sync::atomic::{AtomicBool, Ordering};

use k3_kernel::mla::mla_scratch;
use k3_kernel::{Columns, Kernels, Matrix, Out};

use super::error::RunError;
use super::vectors::AttentionVectors;
use super::walk::{Walk, all_finite, explain};
use super::{Pass, SequenceRun, wanted, with_columns};
use crate::model::config::{MLA_LOW_RANK_EPS, MlaConfig};
use crate::model::tensors::MatrixKind;
use crate::state::{LatentCache, LayerState};
use crate::team::{Tile, Tiles};
use crate::units::LayerIndex;
use crate::workspace::{ELEMENT_COLUMNS, MLA_HEAD_GROUP, MLA_TOKEN_GROUP, cut};

impl Pass<'_> {
    /// `mixed` = MLA(`normed`).
    pub(super) fn attention_mla(
        &mut self,
        walk: &mut Walk<'_>,
        layer: LayerIndex,
        vectors: &AttentionVectors,
        runs: &mut [SequenceRun<'_>],
    ) -> Result<(), RunError> {
        let AttentionVectors::Mla { q_norm, kv_norm } = vectors else {
            return Err(RunError::ForeignState { layer });
        };
        let (c, hidden, tokens) = (&self.config.mla, self.config.hidden, self.tokens);
        let x = Columns::packed(self.normed, hidden, tokens);
        let mut rest = &mut *self.phase;
        let (query_width, value_width) = (c.heads * c.query_width(), c.heads * c.v_dim);
        let q = cut(&mut rest, tokens * query_width);
        let latent = cut(&mut rest, tokens * c.latent_width());
        let gate = cut(&mut rest, tokens * value_width);
        let o = cut(&mut rest, tokens * value_width);

        match (c.q_rank, q_norm) {
            (Some(rank), Some(norm)) => {
                let low = cut(&mut rest, tokens * rank);
                walk.product(wanted(MatrixKind::MlaQA, layer, rank), x, low)?;
                norm_in_place(walk, norm, low)?;
                walk.product(
                    wanted(MatrixKind::MlaQB, layer, query_width),
                    Columns::packed(low, rank, tokens),
                    q,
                )?;
            }
            _ => walk.product(wanted(MatrixKind::MlaQ, layer, query_width), x, q)?,
        }
        walk.product(wanted(MatrixKind::MlaKvA, layer, c.latent_width()), x, latent)?;
        remember(walk.tools.kernels, c, kv_norm, (layer, runs), latent)?;
        attend(walk, c, (layer, runs), q, o)?;
        if c.output_gate {
            walk.product(wanted(MatrixKind::MlaGate, layer, value_width), x, gate)?;
            let (kernels, gate) = (walk.tools.kernels, &*gate);
            let tiles = Tiles::new(o, value_width, 0..value_width, 1, ELEMENT_COLUMNS);
            walk.tools.parts(tiles, |_, _, mut o| {
                let (t, cols) = (o.rows().start, o.cols());
                kernels.sigmoid_mul(o.row(t), &gate[t * value_width..][cols]);
            })?;
        }
        walk.product(
            wanted(MatrixKind::MlaOut, layer, hidden),
            Columns::packed(o, value_width, tokens),
            self.mixed,
        )
    }
}

/// The low-rank norm of every row of `x`.
fn norm_in_place(walk: &mut Walk<'_>, weight: &[f32], x: &mut [f32]) -> Result<(), RunError> {
    let kernels = walk.tools.kernels;
    walk.tools.parts(Tiles::chunks(x, weight.len()), |scratch, t, mut x| {
        let y = &mut scratch[..weight.len()];
        kernels.rmsnorm(x.row(t), weight, MLA_LOW_RANK_EPS, y);
        x.row(t).copy_from_slice(y);
    })?;
    Ok(())
}

/// Writes `[norm(c) | r]` of every token into its sequence's cache.
fn remember(
    kernels: Kernels,
    c: &MlaConfig,
    kv_norm: &[f32],
    (layer, runs): (LayerIndex, &mut [SequenceRun<'_>]),
    latent: &[f32],
) -> Result<(), RunError> {
    let mut rows = latent.chunks_exact(c.latent_width());
    for run in runs {
        let (first, count) = (run.state.len(), run.tokens.len());
        let Some(LayerState::Mla(cache)) = run.state.layer_mut(layer.index()) else {
            return Err(RunError::ForeignState { layer });
        };
        for (position, row) in (first..first + count).zip(&mut rows) {
            let (compressed, rope) = row.split_at(c.kv_rank);
            let (to_compressed, to_rope) = cache.position_mut(position).split_at_mut(c.kv_rank);
            kernels.rmsnorm(compressed, kv_norm, MLA_LOW_RANK_EPS, to_compressed);
            to_rope.copy_from_slice(rope);
        }
    }
    Ok(())
}

/// `o` [T, N·v]: attention of every head of every token over its sequence's cache.
fn attend(
    walk: &mut Walk<'_>,
    c: &MlaConfig,
    (layer, runs): (LayerIndex, &[SequenceRun<'_>]),
    q: &[f32],
    o: &mut [f32],
) -> Result<(), RunError> {
    let head_rows = c.nope_dim + c.v_dim;
    let (query_width, value_width) = (c.heads * c.query_width(), c.heads * c.v_dim);
    let kv_b = wanted(MatrixKind::MlaKvB, layer, c.heads * head_rows);
    let cancel = walk.cancel;
    walk.each_block(kv_b, |block, tools| {
        let kernels = tools.kernels;
        let heads = block.id.rows.start / head_rows..block.id.rows.end / head_rows;
        let finite = AtomicBool::new(true);
        for (run, columns) in with_columns(runs) {
            let Some(LayerState::Mla(cache)) = run.state.layer(layer.index()) else {
                return Err(RunError::ForeignState { layer });
            };
            let group = Group {
                kernels,
                config: c,
                kv_b: block.matrix,
                first_head: heads.start,
                cache,
                past: run.state.len(),
                q: &q[columns.start * query_width..columns.end * query_width],
            };
            let o = &mut o[columns.start * value_width..columns.end * value_width];
            let cols = heads.start * c.v_dim..heads.end * c.v_dim;
            let tiles = Tiles::new(o, value_width, cols, MLA_TOKEN_GROUP, MLA_HEAD_GROUP * c.v_dim);
            tools.long_parts(cancel, tiles, |scratch, _, tile| {
                if !group.attend(tile, scratch) {
                    finite.store(false, Ordering::Relaxed);
                }
            })?;
        }
        if finite.into_inner() { Ok(()) } else { Err(explain(kernels, block, 1, &[])) }
    })
}

/// What the threads share while they attend for the heads of one block and one sequence.
struct Group<'a> {
    kernels: Kernels,
    config: &'a MlaConfig,
    /// Whole heads: nope key rows, then value rows.
    kv_b: Matrix<'a>,
    first_head: usize,
    cache: &'a LatentCache,
    /// Positions before the first token of the run.
    past: usize,
    /// Queries of the run's tokens.
    q: &'a [f32],
}

impl Group<'_> {
    /// Fills `tile` (some tokens, some heads). False when something is not finite.
    fn attend(&self, mut tile: Tile<'_>, scratch: &mut [f32]) -> bool {
        let c = self.config;
        let (rank, latent_width) = (c.kv_rank, c.latent_width());
        let heads = tile.cols().start / c.v_dim..tile.cols().end / c.v_dim;
        let (tokens, count) = (tile.rows(), heads.len());
        let mut rest = scratch;
        let queries = cut(&mut rest, tokens.len() * count * latent_width);
        let sums = cut(&mut rest, tokens.len() * count * rank);
        let values = cut(&mut rest, tokens.len() * c.v_dim);
        let attend_scratch = cut(&mut rest, mla_scratch(count, rank, c.rope_dim));

        for (i, head) in heads.clone().enumerate() {
            for (j, t) in tokens.clone().enumerate() {
                self.absorb(head, t, &mut queries[(j * count + i) * latent_width..][..latent_width]);
            }
        }
        let scale = (c.query_width() as f32).sqrt().recip();
        for (j, t) in tokens.clone().enumerate() {
            let queries = &queries[j * count * latent_width..][..count * latent_width];
            let sums = &mut sums[j * count * rank..][..count * rank];
            let latent = self.cache.view(self.past + t + 1);
            self.kernels.mla_attend(queries, latent, scale, sums, attend_scratch);
        }
        let mut finite = all_finite(sums);
        for (i, head) in heads.enumerate() {
            let first = (head - self.first_head) * (c.nope_dim + c.v_dim) + c.nope_dim;
            let x = Columns { data: &sums[i * rank..], stride: count * rank, count: tokens.len(), len: rank };
            let out = Out::new(values, c.v_dim, c.v_dim, tokens.len());
            self.kernels.matmul(self.kv_b, first..first + c.v_dim, x, out);
            finite &= all_finite(values);
            for (t, value) in tokens.clone().zip(values.chunks_exact(c.v_dim)) {
                tile.row(t)[i * c.v_dim..][..c.v_dim].copy_from_slice(value);
            }
        }
        finite
    }

    /// The query of one head and token in the latent space: `[W_kᵀ q_nope | q_rope]`.
    fn absorb(&self, head: usize, t: usize, out: &mut [f32]) {
        let c = self.config;
        let q = &self.q[(t * c.heads + head) * c.query_width()..][..c.query_width()];
        let (nope, rope) = q.split_at(c.nope_dim);
        let (compressed, out_rope) = out.split_at_mut(c.kv_rank);
        let first = (head - self.first_head) * (c.nope_dim + c.v_dim);
        self.kernels.matmul_t(self.kv_b, first..first + c.nope_dim, nope, compressed);
        out_rope.copy_from_slice(rope);
    }
}
