//! The matrix products, and what is made of them alone: MLP and expert.

use k3_kernel::{Bf16Rows, Columns, Matrix, Mxfp4, Out, Q23, q23_bytes};

use super::{Cases, difference};
use crate::{GoldenError, Tensor};

/// Bounds of the activation in every case that holds one.
const SITU: (f32, f32) = (4.0, 25.0);

/// A packed matrix and its scales.
struct Packed {
    packed: Tensor<u8>,
    scales: Tensor<u8>,
}

impl Packed {
    fn view(&self) -> Option<Mxfp4<'_>> {
        let &[rows, half] = self.packed.shape.as_slice() else { return None };
        Mxfp4::new(&self.packed.data, &self.scales.data, rows, half * 2).ok()
    }
}

impl Cases<'_> {
    fn packed(&self, name: &str) -> Result<Packed, GoldenError> {
        let packed = self.golden.u8(&format!("{name}.weight_packed"))?;
        Ok(Packed { packed, scales: self.golden.u8(&format!("{name}.weight_scale"))? })
    }

    /// `W x` for every row of `x`: [tokens, rows]; empty when the shapes do not fit.
    fn mxfp4(&self, matrix: &Packed, x: &[f32]) -> Vec<f32> {
        let Some(w) = matrix.view() else { return Vec::new() };
        let mut y = Vec::new();
        for x in x.chunks(w.cols()) {
            let mut codes = vec![0; q23_bytes(w.cols())];
            self.kernels.q23_quantize(x, &mut codes);
            let mut out = vec![0.0; w.rows()];
            if let Ok(codes) = Q23::new(&codes, w.cols()) {
                self.kernels.mxfp4_matmul(w, 0..w.rows(), &[codes], Out::one(&mut out));
            }
            y.extend(out);
        }
        y
    }

    fn bf16_product(&self, name: &str, x: &[f32]) -> Result<Vec<f32>, GoldenError> {
        let tensor = self.golden.bf16_bytes(name)?;
        let (bytes, rows, cols) = (tensor.data.concat(), tensor.rows(), tensor.data.len() / tensor.rows());
        let tokens = x.len() / cols;
        let mut y = vec![0.0; tokens * rows];
        if let Ok(w) = Bf16Rows::new(&bytes, rows, cols) {
            let out = Out::new(&mut y, rows, rows, tokens);
            self.kernels.matmul(Matrix::Bf16Rows(w), 0..rows, Columns::packed(x, cols, tokens), out);
        }
        Ok(y)
    }

    /// Every code under every scale, bit for bit: the product with unit vectors gives the weights.
    pub(super) fn mxfp4_codes(&mut self) -> Result<(), GoldenError> {
        let expected = self.golden.f32("mxfp4_all.dequant")?;
        let matrix = self.packed("mxfp4_all")?;
        let (rows, cols) = (expected.rows(), 32);
        let mut found = vec![0u32; rows * cols];
        for col in 0..cols {
            let unit: Vec<f32> = (0..cols).map(|c| if c == col { 1.0 } else { 0.0 }).collect();
            for (row, value) in self.mxfp4(&matrix, &unit).iter().enumerate() {
                found[row * cols + col] = value.to_bits();
            }
        }
        // A sum that starts at +0 cannot give the sign of a zero weight back.
        let bits: Vec<u32> = expected.data.iter().map(|v| if *v == 0.0 { 0 } else { v.to_bits() }).collect();
        self.equal("mxfp4_all.dequant", difference(&found, &bits));

        let nan = self.packed("mxfp4_nan")?;
        let y = self.mxfp4(&nan, &[1.0; 32]);
        self.equal("mxfp4_nan", (y.is_empty() || !y.iter().all(|v| v.is_nan())).then_some(0));
        Ok(())
    }

    pub(super) fn mxfp4_product(&mut self, case: &str) -> Result<(), GoldenError> {
        let x = self.golden.f32(&format!("{case}.x"))?;
        let y = self.mxfp4(&self.packed(case)?, &x.data);
        self.compare(&format!("{case}.y_f64"), &y)
    }

    /// Rows whose outputs run from 1e-38 to 1e36: each is judged by the largest product in its own sum.
    pub(super) fn mxfp4_scales(&mut self) -> Result<(), GoldenError> {
        let x = self.golden.f32("mxfp4_matvec_scales.x")?;
        let matrix = self.packed("mxfp4_matvec_scales")?;
        let expected = self.golden.f64("mxfp4_matvec_scales.y_f64")?;
        let y = self.mxfp4(&matrix, &x.data);
        let Some(w) = matrix.view() else {
            self.equal("mxfp4_matvec_scales.y_f64", Some(0));
            return Ok(());
        };
        let largest = |i: usize| {
            let (x, row) = (x.row(i / w.rows()), i % w.rows());
            (0..w.cols()).map(|c| product(w, row, c, x[c])).fold(f64::MIN_POSITIVE, f64::max)
        };
        self.judge("mxfp4_matvec_scales.y_f64", &expected.data, &y, largest);
        Ok(())
    }

    pub(super) fn dense_mlp(&mut self) -> Result<(), GoldenError> {
        let x = self.golden.f32("dense_mlp.x")?.data;
        let gate = self.bf16_product("dense_mlp.gate_proj.weight", &x)?;
        let up = self.bf16_product("dense_mlp.up_proj.weight", &x)?;
        let mut hidden = vec![0.0; gate.len()];
        self.kernels.situ(&gate, &up, SITU.0, SITU.1, &mut hidden);
        let y = self.bf16_product("dense_mlp.down_proj.weight", &hidden)?;
        self.compare("dense_mlp.y_f64", &y)
    }

    pub(super) fn expert(&mut self) -> Result<(), GoldenError> {
        let x = self.golden.f32("expert.x")?.data;
        let gate = self.mxfp4(&self.packed("expert.w1")?, &x);
        let up = self.mxfp4(&self.packed("expert.w3")?, &x);
        let mut hidden = vec![0.0; gate.len()];
        self.kernels.situ(&gate, &up, SITU.0, SITU.1, &mut hidden);
        let y = self.mxfp4(&self.packed("expert.w2")?, &hidden);
        self.compare("expert.y_f64", &y)
    }
}

/// |w x| of one element.
fn product(w: Mxfp4<'_>, row: usize, col: usize, x: f32) -> f64 {
    const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let byte = w.packed_row(row)[col / 2];
    let code = if col.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
    let scale = f64::from(w.scale_row(row)[col / 32]) - 127.0;
    E2M1[usize::from(code & 7)] * scale.exp2() * f64::from(x).abs()
}
