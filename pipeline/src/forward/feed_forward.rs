//! The feed-forward part: one wide MLP, or routed experts in a latent width beside shared ones.
//!
//! Routed experts run in their order of arrival, each once for all tokens of the pass that chose it.
//! Every (token, rank) has its output stored, and the outputs are summed in rank order at the end, so
//! the order of arrival leaves no trace.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use k3_kernel::moe::{RouterParams, router_choose};
use k3_kernel::{Columns, Mxfp4, Out, Q23, Q23_BATCH_MAX, q23_bytes};

use super::error::RunError;
use super::vectors::MoeVectors;
use super::walk::{Tools, Walk, all_finite, columns_finite};
use super::{Pass, Tap, wanted};
use crate::model::config::ModelConfig;
use crate::model::layout;
use crate::model::tensors::MatrixKind;
use crate::source::{Expert, ExpertRequest};
use crate::team::Tiles;
use crate::units::{ExpertId, LayerIndex};
use crate::workspace::{ELEMENT_COLUMNS, Routing, cut};

impl Pass<'_> {
    /// `mixed` = MLP(`normed`) of a dense layer.
    pub(super) fn dense(&mut self, walk: &mut Walk<'_>, layer: LayerIndex) -> Result<(), RunError> {
        let (tokens, width, hidden) = (self.tokens, self.config.dense_width, self.config.hidden);
        let x = Columns::packed(self.normed, hidden, tokens);
        let mut rest = &mut *self.phase;
        let [gate, up] = std::array::from_fn(|_| cut(&mut rest, tokens * width));
        walk.product(wanted(MatrixKind::MlpGate, layer, width), x, gate)?;
        walk.product(wanted(MatrixKind::MlpUp, layer, width), x, up)?;
        activate(&mut walk.tools, self.config, gate, up, width)?;
        walk.product(
            wanted(MatrixKind::MlpDown, layer, hidden),
            Columns::packed(gate, width, tokens),
            self.mixed,
        )
    }

    /// `mixed` = routed and shared experts of `normed`.
    pub(super) fn experts(
        &mut self,
        walk: &mut Walk<'_>,
        layer: LayerIndex,
        vectors: &MoeVectors,
        tap: &mut Option<&mut dyn Tap>,
    ) -> Result<(), RunError> {
        let (config, tokens, hidden) = (self.config, self.tokens, self.config.hidden);
        let (io, shared, k) = (config.expert_io_width(), config.shared_width(), config.moe.experts_per_token);
        let x = Columns::packed(self.normed, hidden, tokens);
        let mut rest = &mut *self.phase;
        let scores = cut(&mut rest, tokens * config.moe.experts);
        let [z, sum] = std::array::from_fn(|_| cut(&mut rest, tokens * io));
        let shared_out = cut(&mut rest, tokens * hidden);
        let batch = Batch::cut(config, &mut rest);

        walk.product(wanted(MatrixKind::Router, layer, config.moe.experts), x, scores)?;
        route(walk, config, vectors, scores, (tokens, self.routing))?;
        if let Some(tap) = tap {
            let choices = tokens * k;
            tap.router(layer, &self.routing.ids[..choices], &self.routing.weights[..choices], k);
        }
        walk.experts.request(layer, &self.routing.requests)?;

        // While experts arrive: their input, and the shared experts.
        match config.moe.latent {
            Some(latent) => walk.product(wanted(MatrixKind::LatentDown, layer, latent), x, z)?,
            None => z.copy_from_slice(self.normed),
        }
        {
            let mut rest = &mut *rest;
            let [gate, up] = std::array::from_fn(|_| cut(&mut rest, tokens * shared));
            walk.product(wanted(MatrixKind::SharedGate, layer, shared), x, gate)?;
            walk.product(wanted(MatrixKind::SharedUp, layer, shared), x, up)?;
            activate(&mut walk.tools, config, gate, up, shared)?;
            let x = Columns::packed(gate, shared, tokens);
            walk.product(wanted(MatrixKind::SharedDown, layer, hidden), x, shared_out)?;
        }

        let outputs = cut(&mut rest, tokens * k * io);
        run_experts(walk, config, layer, (z, self.routing), batch, outputs)?;
        combine(walk, config, vectors, (outputs, &self.routing.weights), sum)?;
        match config.moe.latent {
            Some(latent) => {
                let x = Columns::packed(sum, latent, tokens);
                walk.product(wanted(MatrixKind::LatentUp, layer, hidden), x, self.mixed)?;
            }
            None => self.mixed.copy_from_slice(sum),
        }
        walk.tools.kernels.add(shared_out, self.mixed);
        Ok(())
    }
}

/// `gate` = situ(`gate`, `up`), both [tokens, width].
fn activate(
    tools: &mut Tools<'_>,
    config: &ModelConfig,
    gate: &mut [f32],
    up: &[f32],
    width: usize,
) -> Result<(), RunError> {
    let kernels = tools.kernels;
    let (beta, linear_beta) = (config.situ_beta, config.situ_linear_beta);
    let tiles = Tiles::new(gate, width, 0..width, 1, ELEMENT_COLUMNS);
    tools.parts(tiles, |scratch, _, mut gate| {
        let (t, cols) = (gate.rows().start, gate.cols());
        let y = &mut scratch[..cols.len()];
        kernels.situ(gate.row(t), &up[t * width..][cols], beta, linear_beta, y);
        gate.row(t).copy_from_slice(y);
    })?;
    Ok(())
}

/// Chooses the experts of every token from the router's `scores` and groups the choices by expert.
fn route(
    walk: &mut Walk<'_>,
    config: &ModelConfig,
    vectors: &MoeVectors,
    scores: &mut [f32],
    (tokens, routing): (usize, &mut Routing),
) -> Result<(), RunError> {
    let (kernels, k, experts) = (walk.tools.kernels, config.moe.experts_per_token, config.moe.experts);
    let params = RouterParams {
        top_k: k,
        groups: config.moe.groups,
        groups_kept: config.moe.groups_kept,
        renormalize: config.moe.renormalize,
        scaling: config.moe.scaling,
    };
    let parts = (
        Tiles::chunks(scores, experts),
        Tiles::chunks(&mut routing.ids[..tokens * k], k),
        Tiles::chunks(&mut routing.weights[..tokens * k], k),
    );
    walk.tools.parts(parts, |scratch, t, (mut scores, mut ids, mut weights)| {
        let scores = scores.row(t);
        kernels.sigmoid(scores);
        let group_scores = &mut scratch[..params.groups];
        router_choose(scores, &vectors.router_bias, &params, ids.row(t), weights.row(t), group_scores);
    })?;
    group_by_expert(routing, tokens * k, k);
    Ok(())
}

/// Counting sort of the choices by expert, and the list of distinct experts in order of their best rank.
fn group_by_expert(routing: &mut Routing, choices: usize, k: usize) {
    let Routing { ids, entries, starts, ends, requests, .. } = routing;
    ends.fill(0);
    for &id in &ids[..choices] {
        ends[usize::from(id)] += 1;
    }
    let mut next = 0;
    for (start, end) in starts.iter_mut().zip(ends.iter_mut()) {
        *start = next;
        next += *end;
        *end = *start;
    }
    requests.clear();
    // Rank by rank, so that the first mention of an expert is its best rank.
    for rank in 0..k {
        for choice in (rank..choices).step_by(k) {
            let id = ids[choice];
            let (start, end) = (starts[usize::from(id)], &mut ends[usize::from(id)]);
            if *end == start {
                requests.push(ExpertRequest {
                    expert: ExpertId(id),
                    rank: u8::try_from(rank).unwrap_or(u8::MAX),
                });
            }
            entries[*end as usize] = u32::try_from(choice).unwrap_or(u32::MAX);
            *end += 1;
        }
    }
}

/// Buffers of one batch of one expert.
struct Batch<'b> {
    /// [batch, I].
    gate: &'b mut [f32],
    /// [batch, I].
    up: &'b mut [f32],
    /// [batch, Λ].
    down: &'b mut [f32],
}

impl<'b> Batch<'b> {
    fn cut(config: &ModelConfig, rest: &mut &'b mut [f32]) -> Self {
        let width = Q23_BATCH_MAX * config.moe.expert_width;
        Self {
            gate: cut(rest, width),
            up: cut(rest, width),
            down: cut(rest, Q23_BATCH_MAX * config.expert_io_width()),
        }
    }
}

/// Runs every requested expert as it arrives: `outputs` [T, k, Λ].
fn run_experts(
    walk: &mut Walk<'_>,
    config: &ModelConfig,
    layer: LayerIndex,
    (z, routing): (&[f32], &mut Routing),
    mut batch: Batch<'_>,
    outputs: &mut [f32],
) -> Result<(), RunError> {
    let (io, kernels) = (config.expert_io_width(), walk.tools.kernels);
    let code_bytes = q23_bytes(io);
    let codes = &mut routing.latent_codes[..z.len() / io * code_bytes];
    walk.tools.parts(Tiles::chunks(codes, code_bytes), |_, t, mut codes| {
        kernels.q23_quantize(&z[t * io..(t + 1) * io], codes.row(t));
    })?;
    loop {
        walk.check_cancelled()?;
        let started = Instant::now();
        let expert = walk.experts.next_expert()?;
        walk.waited += started.elapsed();
        let Some(expert) = expert else { return Ok(()) };
        let index = expert.id.index();
        let entries = routing.starts[index] as usize..routing.ends[index] as usize;
        let run = ExpertRun { config, layer, expert: &expert, latent_codes: &routing.latent_codes };
        for entries in routing.entries[entries].chunks(Q23_BATCH_MAX) {
            run.batch(&mut walk.tools, entries, &mut batch, &mut routing.width_codes)?;
            for (&entry, y) in entries.iter().zip(batch.down.chunks_exact(io)) {
                outputs[entry as usize * io..][..io].copy_from_slice(y);
            }
        }
    }
}

/// One expert and the inputs it may be wanted for.
struct ExpertRun<'e> {
    config: &'e ModelConfig,
    layer: LayerIndex,
    expert: &'e Expert<'e>,
    latent_codes: &'e [u8],
}

impl ExpertRun<'_> {
    /// `batch.down` = w2 · situ(w1 z, w3 z) for the tokens of up to a batch of choices.
    fn batch(
        &self,
        tools: &mut Tools<'_>,
        entries: &[u32],
        batch: &mut Batch<'_>,
        width_codes: &mut [u8],
    ) -> Result<(), RunError> {
        let (kernels, config, count) = (tools.kernels, self.config, entries.len());
        let (io, width, k) =
            (config.expert_io_width(), config.moe.expert_width, config.moe.experts_per_token);
        let (gate, up) = (&mut batch.gate[..count * width], &mut batch.up[..count * width]);
        let tokens = entries.iter().map(|&choice| choice as usize / k);
        let latent = Codes { bytes: self.latent_codes, cols: io };
        latent.batch(tokens.clone(), |xs| self.activation(tools, xs, gate, up))?;
        let code_bytes = q23_bytes(width);
        let codes = Tiles::chunks(&mut width_codes[..count * code_bytes], code_bytes);
        let activation = &*gate;
        tools.parts(codes, |_, i, mut codes| {
            kernels.q23_quantize(&activation[i * width..(i + 1) * width], codes.row(i));
        })?;
        Codes { bytes: width_codes, cols: width }
            .batch(0..count, |xs| self.product(tools, (self.expert.w2, 2), xs, &mut batch.down[..count * io]))
    }

    /// `gate` [xs.len(), I] = situ(w1 x, w3 x), with `up` for the other product: a thread does all three for
    /// its rows.
    fn activation(
        &self,
        tools: &mut Tools<'_>,
        xs: &[Q23<'_>],
        gate: &mut [f32],
        up: &mut [f32],
    ) -> Result<(), RunError> {
        let (kernels, w1, w3) = (tools.kernels, self.expert.w1, self.expert.w3);
        let (beta, linear_beta) = (self.config.situ_beta, self.config.situ_linear_beta);
        let finite = AtomicBool::new(true);
        let outs = [&mut *gate, &mut *up].map(|out| Out::new(out, w1.rows(), w1.rows(), xs.len()));
        tools.team.rows(tools.scratch, outs, |scratch, rows, [mut gate, mut up]| {
            kernels.mxfp4_matmul(w1, rows.clone(), xs, gate.reborrow());
            kernels.mxfp4_matmul(w3, rows.clone(), xs, up.reborrow());
            // What is not finite must stay so until it is explained.
            if !(columns_finite(&mut gate) && columns_finite(&mut up)) {
                finite.store(false, Ordering::Relaxed);
                return;
            }
            let y = &mut scratch[..rows.len()];
            for t in 0..xs.len() {
                kernels.situ(gate.column(t), up.column(t), beta, linear_beta, y);
                gate.column(t).copy_from_slice(y);
            }
        })?;
        match finite.into_inner() {
            true => Ok(()),
            false if all_finite(gate) => Err(self.explain(w3, 4, up)),
            false => Err(self.explain(w1, 0, gate)),
        }
    }

    /// `out` [xs.len(), rows] = W x; `slot` numbers the tensor's codes among the six of an expert.
    fn product(
        &self,
        tools: &mut Tools<'_>,
        (w, slot): (Mxfp4<'_>, usize),
        xs: &[Q23<'_>],
        out: &mut [f32],
    ) -> Result<(), RunError> {
        let kernels = tools.kernels;
        let whole = Out::new(out, w.rows(), w.rows(), xs.len());
        let finite = tools.rows(whole, |rows, out| kernels.mxfp4_matmul(w, rows, xs, out))?;
        if finite { Ok(()) } else { Err(self.explain(w, slot, out)) }
    }

    /// Names what made the output of a product non-finite.
    fn explain(&self, w: Mxfp4<'_>, slot: usize, out: &[f32]) -> RunError {
        let name = |slot| layout::expert_name(self.layer, self.expert.id, slot);
        for row in 0..w.rows() {
            if let Some(group) = w.scale_row(row).iter().position(|&scale| scale == u8::MAX) {
                let what = format!("scale byte 255 in group {group}, which is not a number");
                return RunError::BadWeight { tensor: name(slot + 1), row, what };
            }
        }
        let bad = out.iter().position(|v| !v.is_finite()).unwrap_or(0);
        RunError::BadActivation { tensor: name(slot), row: bad % w.rows(), column: bad / w.rows() }
    }
}

/// Quantised vectors of `cols` values, one after the other.
struct Codes<'c> {
    bytes: &'c [u8],
    cols: usize,
}

impl Codes<'_> {
    /// Calls `job` with views of the vectors numbered `which`, at most a batch of them.
    fn batch(
        &self,
        which: impl ExactSizeIterator<Item = usize>,
        job: impl FnOnce(&[Q23<'_>]) -> Result<(), RunError>,
    ) -> Result<(), RunError> {
        let view = |i: usize| {
            let bytes = q23_bytes(self.cols);
            Q23::new(&self.bytes[i * bytes..(i + 1) * bytes], self.cols)
        };
        let count = which.len();
        let mut views = [view(0)?; Q23_BATCH_MAX];
        for (place, i) in views.iter_mut().zip(which) {
            *place = view(i)?;
        }
        job(&views[..count])
    }
}

/// `sum` [T, Λ]: outputs in rank order by their weights, then the norm of the sum.
fn combine(
    walk: &mut Walk<'_>,
    config: &ModelConfig,
    vectors: &MoeVectors,
    (outputs, weights): (&[f32], &[f32]),
    sum: &mut [f32],
) -> Result<(), RunError> {
    let (kernels, io, k) = (walk.tools.kernels, config.expert_io_width(), config.moe.experts_per_token);
    let tools = &mut walk.tools;
    tools.parts(Tiles::chunks(sum, io), |scratch, t, mut sum| {
        let (outputs, weights) = (&outputs[t * k * io..][..k * io], &weights[t * k..][..k]);
        let Some(norm) = &vectors.routed_norm else {
            kernels.moe_combine(outputs, weights, sum.row(t));
            return;
        };
        let raw = &mut scratch[..io];
        kernels.moe_combine(outputs, weights, raw);
        kernels.rmsnorm(raw, norm, config.rms_eps, sum.row(t));
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_grouped_by_expert_and_requested_by_best_rank() {
        let ids = vec![3, 1, 1, 0, 3, 4];
        let mut routing = Routing {
            entries: vec![0; ids.len()],
            ids,
            weights: Vec::new(),
            starts: vec![0; 5],
            ends: vec![0; 5],
            requests: Vec::new(),
            latent_codes: Vec::new(),
            width_codes: Vec::new(),
        };
        group_by_expert(&mut routing, 6, 2);
        let of = |e: usize| &routing.entries[routing.starts[e] as usize..routing.ends[e] as usize];
        assert_eq!(
            (of(0), of(1), of(2), of(3), of(4)),
            (&[3][..], &[2, 1][..], &[][..], &[0, 4][..], &[5][..])
        );
        let request = |expert, rank| ExpertRequest { expert: ExpertId(expert), rank };
        let wanted = [request(3, 0), request(1, 0), request(0, 1), request(4, 1)];
        assert_eq!(routing.requests, wanted);
    }
}
