//! The kernels against the golden vectors: single operations computed with the released code. A value
//! passes when it is within [`TOLERANCE`] of the largest value of its row.

mod attention;
mod elementwise;
mod moe;
mod products;

use std::path::Path;

use k3_kernel::Kernels;
use k3_kernel::act::bf16_to_f32;

use crate::{Golden, GoldenError, golden_dir};

/// Largest error of a value, as a share of the largest absolute value in its last-axis row.
pub const TOLERANCE: f64 = 1e-5;

/// How one output of one case compares.
#[derive(Clone, Debug, PartialEq)]
pub struct VectorOutcome {
    /// Tensor compared with.
    pub name: String,
    /// Worst error as a share of the row's largest value; 0 where bits or numbers had to be equal and are,
    /// infinite where they are not.
    pub worst: f64,
    /// Row with the worst error.
    pub row: usize,
}

impl VectorOutcome {
    /// Whether the output is close enough.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.worst <= TOLERANCE
    }
}

/// Computes every case with `kernels`.
///
/// # Errors
/// When the vectors cannot be read or lack a tensor.
pub fn check_vectors(kernels: Kernels) -> Result<Vec<VectorOutcome>, GoldenError> {
    let golden = Golden::open(&golden_dir().join("vectors/kernels-shared.safetensors"))?;
    let mut cases = Cases { golden: &golden, kernels, outcomes: Vec::new() };
    cases.norms()?;
    cases.situ()?;
    cases.short_convolution()?;
    cases.attention_residuals()?;
    cases.kda("kda")?;
    cases.kda("kda_128")?;
    for case in ["router", "router_ties", "router_scaled"] {
        cases.router(case)?;
    }
    cases.mxfp4_codes()?;
    for case in ["mxfp4_matvec", "mxfp4_matvec_wide"] {
        cases.mxfp4_product(case)?;
    }
    cases.mxfp4_scales()?;
    cases.dense_mlp()?;
    cases.expert()?;
    Ok(cases.outcomes)
}

/// Computes the one case on the release's own bytes, whose file lies outside the project.
///
/// # Errors
/// When `file` cannot be read or lacks a tensor.
pub fn check_released_vectors(kernels: Kernels, file: &Path) -> Result<Vec<VectorOutcome>, GoldenError> {
    let golden = Golden::open(file)?;
    let mut cases = Cases { golden: &golden, kernels, outcomes: Vec::new() };
    cases.mxfp4_product("mxfp4_matvec_real")?;
    Ok(cases.outcomes)
}

/// The cases, and what has come of them so far.
struct Cases<'g> {
    golden: &'g Golden,
    kernels: Kernels,
    outcomes: Vec<VectorOutcome>,
}

impl Cases<'_> {
    /// Compares with tensor `name` row by row.
    fn compare(&mut self, name: &str, found: &[f32]) -> Result<(), GoldenError> {
        let expected = self.golden.f64(name)?;
        let rows = expected.rows();
        let width = expected.data.len() / rows.max(1);
        let scales: Vec<f64> =
            (0..rows).map(|row| expected.row(row).iter().fold(0.0, |m: f64, v| m.max(v.abs()))).collect();
        self.judge(name, &expected.data, found, |i| scales[i / width]);
        Ok(())
    }

    /// Compares value by value; `scale` is what the error of value `i` is a share of.
    fn judge(&mut self, name: &str, expected: &[f64], found: &[f32], scale: impl Fn(usize) -> f64) {
        let mut outcome = VectorOutcome { name: name.to_owned(), worst: 0.0, row: 0 };
        if expected.len() != found.len() {
            outcome.worst = f64::INFINITY;
        }
        for (i, (expected, found)) in expected.iter().zip(found).enumerate() {
            let error = (expected - f64::from(*found)).abs();
            let share = if error == 0.0 { 0.0 } else { error / scale(i) };
            // A NaN compares as neither smaller nor larger: it must count as the worst.
            if share > outcome.worst || share.is_nan() {
                outcome.worst = if share.is_nan() { f64::INFINITY } else { share };
                outcome.row = i;
            }
        }
        self.outcomes.push(outcome);
    }

    /// Notes a comparison that knows only equal and different.
    fn equal(&mut self, name: &str, first_difference: Option<usize>) {
        let worst = if first_difference.is_some() { f64::INFINITY } else { 0.0 };
        let row = first_difference.unwrap_or(0);
        self.outcomes.push(VectorOutcome { name: name.to_owned(), worst, row });
    }

    /// A BF16 tensor, widened.
    fn bf16(&self, name: &str) -> Result<Vec<f32>, GoldenError> {
        let bytes = self.bytes(name)?;
        let mut wide = vec![0.0; bytes.len() / 2];
        bf16_to_f32(&bytes, &mut wide);
        Ok(wide)
    }

    /// The bytes of a BF16 tensor.
    fn bytes(&self, name: &str) -> Result<Vec<u8>, GoldenError> {
        Ok(self.golden.bf16_bytes(name)?.data.concat())
    }

    fn eps(&self, case: &str) -> Result<f32, GoldenError> {
        Ok(self.first(&self.golden.f64(&format!("{case}.eps"))?.data) as f32)
    }

    fn first<T: Copy + Default>(&self, data: &[T]) -> T {
        data.first().copied().unwrap_or_default()
    }
}

/// First place where two sequences differ.
fn difference<T: PartialEq>(a: &[T], b: &[T]) -> Option<usize> {
    if a.len() != b.len() {
        return Some(a.len().min(b.len()));
    }
    a.iter().zip(b).position(|(a, b)| a != b)
}
