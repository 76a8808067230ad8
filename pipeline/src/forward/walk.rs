//! The walk over the weights: leases blocks in order and multiplies.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use k3_kernel::{Columns, Kernels, Matrix, Out};

use super::error::RunError;
use crate::model::layout;
use crate::model::tensors::MatrixKind;
use crate::source::{Block, ExpertSource, WeightSource};
use crate::team::{Cut, PerWorker, Team};
use crate::units::LayerIndex;

/// Everything a pass computes with, except its activations.
pub(crate) struct Walk<'e> {
    pub(crate) tools: Tools<'e>,
    pub(crate) weights: &'e mut dyn WeightSource,
    pub(crate) experts: &'e mut dyn ExpertSource,
    pub(crate) cancel: &'e AtomicBool,
    /// Time spent waiting for reads.
    pub(crate) waited: Duration,
}

/// A matrix of the walk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) kind: MatrixKind,
    pub(crate) layer: Option<LayerIndex>,
    pub(crate) rows: usize,
}

/// What computes: the instruction set, the threads, their scratch.
pub(crate) struct Tools<'e> {
    pub(crate) kernels: Kernels,
    pub(crate) team: &'e mut Team,
    pub(crate) scratch: &'e mut PerWorker<Vec<f32>>,
}

impl Tools<'_> {
    /// [`Team::parts`] with this scratch.
    pub(crate) fn parts<C: Cut>(
        &mut self,
        cut: C,
        job: impl Fn(&mut [f32], usize, C::Part) + Sync,
    ) -> Result<(), RunError> {
        Ok(self.team.parts(self.scratch, cut, |scratch, i, part| job(scratch, i, part))?)
    }

    /// [`Tools::parts`] for parts that take long: once somebody asked for the end of the pass, those that are
    /// left are left out and the pass ends.
    pub(crate) fn long_parts<C: Cut>(
        &mut self,
        cancel: &AtomicBool,
        cut: C,
        job: impl Fn(&mut [f32], usize, C::Part) + Sync,
    ) -> Result<(), RunError> {
        let left_out = AtomicBool::new(false);
        self.parts(cut, |scratch, i, part| match cancel.load(Ordering::Relaxed) {
            true => left_out.store(true, Ordering::Relaxed),
            false => job(scratch, i, part),
        })?;
        // Not the wish itself: it may have been taken back meanwhile.
        if left_out.into_inner() { Err(RunError::Cancelled) } else { Ok(()) }
    }

    /// [`Team::rows`] for a product; false when an output is not finite.
    pub(crate) fn rows(
        &mut self,
        out: Out<'_>,
        product: impl Fn(Range<usize>, Out<'_>) + Sync,
    ) -> Result<bool, RunError> {
        let finite = AtomicBool::new(true);
        self.team.rows(self.scratch, [out], |_, rows, [mut out]| {
            product(rows, out.reborrow());
            if !columns_finite(&mut out) {
                finite.store(false, Ordering::Relaxed);
            }
        })?;
        Ok(finite.into_inner())
    }
}

impl Walk<'_> {
    /// Ends the pass when somebody asked for it.
    pub(crate) fn check_cancelled(&self) -> Result<(), RunError> {
        if self.cancel.load(Ordering::Relaxed) { Err(RunError::Cancelled) } else { Ok(()) }
    }

    /// `out` [x.count, rows] = W x for the next matrix of the walk, which must be `wanted`.
    pub(crate) fn product(
        &mut self,
        wanted: Wanted,
        x: Columns<'_>,
        out: &mut [f32],
    ) -> Result<(), RunError> {
        let kernels = self.tools.kernels;
        let mut next = 0;
        while next < wanted.rows {
            self.check_cancelled()?;
            let block = lease(self.weights, &mut self.waited, wanted, next)?;
            let (rows, matrix) = (block.id.rows.clone(), block.matrix);
            let part = Out::new(out, wanted.rows, wanted.rows, x.count).split_at(rows.start).1;
            let part = part.split_at(rows.len()).0;
            let finite = self.tools.rows(part, |rows, out| kernels.matmul(matrix, rows, x, out))?;
            if !finite {
                return Err(explain(kernels, &block, x.count, out));
            }
            next = rows.end;
        }
        Ok(())
    }

    /// Leases the blocks of the next matrix one after the other, for work that is no plain product.
    pub(crate) fn each_block(
        &mut self,
        wanted: Wanted,
        mut job: impl FnMut(&Block<'_>, &mut Tools<'_>) -> Result<(), RunError>,
    ) -> Result<(), RunError> {
        let mut next = 0;
        while next < wanted.rows {
            self.check_cancelled()?;
            let block = lease(self.weights, &mut self.waited, wanted, next)?;
            next = block.id.rows.end;
            job(&block, &mut self.tools)?;
        }
        Ok(())
    }
}

/// Waits for the next block and checks that it is the one the walk needs.
fn lease<'s>(
    weights: &'s mut dyn WeightSource,
    waited: &mut Duration,
    wanted: Wanted,
    row: usize,
) -> Result<Block<'s>, RunError> {
    let started = Instant::now();
    let block = weights.next_block()?;
    *waited += started.elapsed();
    let id = &block.id;
    let fits = id.rows.start == row && id.rows.end > row && id.rows.end <= wanted.rows;
    if id.kind != wanted.kind || id.layer != wanted.layer || !fits || block.matrix.rows() != id.rows.len() {
        let Wanted { kind, layer, .. } = wanted;
        return Err(RunError::OutOfOrder { kind, layer, row, found: block.id });
    }
    Ok(block)
}

/// True when no value is NaN or infinite. No early exit: this form vectorises.
pub(crate) fn all_finite(values: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    !values.iter().fold(false, |bad, v| bad | (v.to_bits() & EXPONENT == EXPONENT))
}

/// True when no value of any column is NaN or infinite.
pub(crate) fn columns_finite(out: &mut Out<'_>) -> bool {
    (0..out.count()).all(|t| all_finite(out.column(t)))
}

/// Names what made the output of `block` non-finite. Slow; runs once, before the pass ends.
pub(crate) fn explain(kernels: Kernels, block: &Block<'_>, count: usize, out: &[f32]) -> RunError {
    let tensor = layout::matrix_name(block.id.layer, block.id.kind);
    if let Some(row) = bad_row(kernels, block.matrix) {
        let row = block.id.rows.start + row;
        return RunError::BadWeight { tensor, row, what: "NaN or infinity".to_owned() };
    }
    let stride = out.len() / count.max(1);
    let bad = out.iter().enumerate().find(|(i, v)| !v.is_finite() && block.id.rows.contains(&(i % stride)));
    let (row, column) = bad.map_or((block.id.rows.start, 0), |(i, _)| (i % stride, i / stride));
    RunError::BadActivation { tensor, row, column }
}

/// First row with a non-finite weight. Whatever is not finite is NaN after multiplication by zero.
fn bad_row(kernels: Kernels, matrix: Matrix<'_>) -> Option<usize> {
    let zeros = vec![0.0; matrix.cols()];
    let mut out = vec![0.0; matrix.rows()];
    kernels.matmul(matrix, 0..matrix.rows(), Columns::one(&zeros), Out::one(&mut out));
    out.iter().position(|v| v.is_nan())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::team::Tiles;

    #[test]
    fn long_work_ends_at_its_next_part() {
        let (cancel, done) = (AtomicBool::new(false), AtomicUsize::new(0));
        let mut team = Team::new(1, false).unwrap();
        let mut scratch = PerWorker::new(1, Vec::new);
        let mut tools = Tools { kernels: Kernels::detect(), team: &mut team, scratch: &mut scratch };
        let mut run = |ask_at: usize| {
            cancel.store(false, Ordering::Relaxed);
            done.store(0, Ordering::Relaxed);
            let mut values = [0.0; 9];
            let ended = tools.long_parts(&cancel, Tiles::chunks(&mut values, 1), |_, i, _| {
                done.fetch_add(1, Ordering::Relaxed);
                cancel.store(i >= ask_at, Ordering::Relaxed);
            });
            (ended.is_ok(), done.load(Ordering::Relaxed))
        };
        assert_eq!(run(9), (true, 9));
        assert_eq!(run(3), (false, 4));
    }

    #[test]
    fn finiteness_is_seen_in_every_place() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for i in 0..37 {
                let mut values = vec![f32::MAX; 37];
                assert!(all_finite(&values));
                values[i] = bad;
                assert!(!all_finite(&values));
            }
        }
    }
}
