//! After the last layer: last mix, last norm, output head, for the tokens that have logits.

use k3_kernel::Columns;

use super::error::RunError;
use super::vectors::ModelVectors;
use super::walk::{Walk, Wanted};
use super::{LogitsWanted, Pass, SequenceRun, Tap, TapPoint, residual, with_columns};
use crate::model::tensors::MatrixKind;

/// Buffers of the head.
pub(super) struct HeadBuffers<'e> {
    /// [rows, E].
    pub(super) input: &'e mut [f32],
    /// [rows, V].
    pub(super) logits: &'e mut [f32],
}

impl Pass<'_> {
    /// Fills the logits.
    pub(super) fn head(
        &mut self,
        walk: &mut Walk<'_>,
        vectors: &ModelVectors,
        runs: &[SequenceRun<'_>],
        buffers: HeadBuffers<'_>,
        tap: &mut Option<&mut dyn Tap>,
    ) -> Result<(), RunError> {
        let (hidden, eps) = (self.config.hidden, self.config.rms_eps);
        let rows = buffers.input.len() / hidden;
        if rows == 0 {
            return Ok(());
        }
        let mut targets = self.mixed.chunks_exact_mut(hidden);
        for (run, columns) in with_columns(runs) {
            let columns = match run.logits {
                LogitsWanted::None => columns.end..columns.end,
                LogitsWanted::Last => columns.end - 1..columns.end,
                LogitsWanted::All => columns,
            };
            for (t, target) in columns.zip(&mut targets) {
                match vectors.output_mix.as_deref() {
                    Some(key) if self.residual.has_snapshots() => {
                        self.residual.mix_token(walk.tools.kernels, (key, eps), t, target);
                    }
                    _ => target.copy_from_slice(&self.residual.prefix()[t * hidden..(t + 1) * hidden]),
                }
            }
        }
        let mixed = &self.mixed[..rows * hidden];
        residual::norm(walk, self.config, mixed, &vectors.final_norm, buffers.input)?;
        let x = Columns::packed(buffers.input, hidden, rows);
        if let Some(tap) = tap {
            tap.values(TapPoint::OutputMix, None, Columns::packed(mixed, hidden, rows));
            tap.values(TapPoint::FinalNorm, None, x);
        }
        let head = Wanted { kind: MatrixKind::Head, layer: None, rows: self.config.vocab };
        walk.product(head, x, buffers.logits)
    }
}
