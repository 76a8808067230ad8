//! The residual stream: the running sum, the snapshots at block borders, and the mix over both.

use k3_kernel::Kernels;
use k3_kernel::residual::RESIDUAL_SOURCES_MAX;

use super::error::RunError;
use super::walk::Walk;
use crate::model::config::ModelConfig;
use crate::team::Tiles;

/// The stream of all tokens of a pass.
pub(super) struct Residual<'e> {
    prefix: &'e mut [f32],
    snapshots: &'e mut [Vec<f32>],
    hidden: usize,
    floats: usize,
    taken: usize,
    /// The running sum starts afresh with the next addition.
    restart: bool,
}

impl<'e> Residual<'e> {
    pub(super) fn new(
        prefix: &'e mut [f32],
        snapshots: &'e mut [Vec<f32>],
        hidden: usize,
        tokens: usize,
    ) -> Self {
        let floats = hidden * tokens;
        Self { prefix: &mut prefix[..floats], snapshots, hidden, floats, taken: 0, restart: false }
    }

    /// The running sum [T, E].
    pub(super) fn prefix(&self) -> &[f32] {
        self.prefix
    }

    /// The running sum is the embedding.
    pub(super) fn start(&mut self, embedding: &[f32]) {
        self.prefix.copy_from_slice(embedding);
        self.taken = 0;
        self.restart = false;
    }

    /// Keeps the running sum as a source of later mixes and starts a new one.
    pub(super) fn snapshot(&mut self) {
        self.snapshots[self.taken][..self.floats].copy_from_slice(self.prefix);
        self.taken += 1;
        self.restart = true;
    }

    /// Adds what attention or feed-forward gave back.
    pub(super) fn add(&mut self, walk: &mut Walk<'_>, out: &[f32]) -> Result<(), RunError> {
        if self.restart {
            self.prefix.copy_from_slice(out);
            self.restart = false;
            return Ok(());
        }
        let (kernels, hidden) = (walk.tools.kernels, self.hidden);
        walk.tools.parts(Tiles::chunks(self.prefix, hidden), |_, t, mut prefix| {
            kernels.add(&out[t * hidden..(t + 1) * hidden], prefix.row(t));
        })?;
        Ok(())
    }

    /// `mixed` [T, E]: the mix of all snapshots and the running sum by `key`; the running sum itself
    /// while there is no snapshot, or without a key.
    pub(super) fn mix(
        &self,
        walk: &mut Walk<'_>,
        config: &ModelConfig,
        key: Option<&[f32]>,
        mixed: &mut [f32],
    ) -> Result<(), RunError> {
        let Some(key) = key.filter(|_| self.taken > 0) else {
            mixed.copy_from_slice(self.prefix);
            return Ok(());
        };
        let (kernels, hidden, eps) = (walk.tools.kernels, self.hidden, config.rms_eps);
        walk.tools.parts(Tiles::chunks(mixed, hidden), |_, t, mut out| {
            self.mix_token(kernels, (key, eps), t, out.row(t));
        })?;
        Ok(())
    }

    /// The mix for one token.
    pub(super) fn mix_token(&self, kernels: Kernels, (key, eps): (&[f32], f32), t: usize, out: &mut [f32]) {
        let token = t * self.hidden..(t + 1) * self.hidden;
        let mut sources: [&[f32]; RESIDUAL_SOURCES_MAX] = [&[]; RESIDUAL_SOURCES_MAX];
        for (source, snapshot) in sources.iter_mut().zip(&self.snapshots[..self.taken]) {
            *source = &snapshot[token.clone()];
        }
        sources[self.taken] = &self.prefix[token];
        kernels.residual_mix(&sources[..=self.taken], key, eps, out);
    }

    /// True when the mix is more than a copy.
    pub(super) fn has_snapshots(&self) -> bool {
        self.taken > 0
    }
}

/// `y` = rmsnorm(`x`), both [tokens, E].
pub(super) fn norm(
    walk: &mut Walk<'_>,
    config: &ModelConfig,
    x: &[f32],
    weight: &[f32],
    y: &mut [f32],
) -> Result<(), RunError> {
    let (kernels, hidden, eps) = (walk.tools.kernels, config.hidden, config.rms_eps);
    walk.tools.parts(Tiles::chunks(y, hidden), |_, t, mut y| {
        kernels.rmsnorm(&x[t * hidden..(t + 1) * hidden], weight, eps, y.row(t));
    })?;
    Ok(())
}
