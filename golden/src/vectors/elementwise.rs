//! Norms, activation, short convolution, residual mix.

use k3_kernel::conv::conv_taps;

use super::{Cases, difference};
use crate::GoldenError;

impl Cases<'_> {
    pub(super) fn norms(&mut self) -> Result<(), GoldenError> {
        for case in ["rmsnorm", "rmsnorm_lowrank", "rmsnorm_latent"] {
            let x = self.golden.f32(&format!("{case}.x"))?;
            let weight = self.bf16(&format!("{case}.weight"))?;
            let eps = self.eps(case)?;
            let mut y = vec![0.0; x.data.len()];
            for (x, y) in x.data.chunks(weight.len()).zip(y.chunks_mut(weight.len())) {
                self.kernels.rmsnorm(x, &weight, eps, y);
            }
            self.compare(&format!("{case}.y_f64"), &y)?;
        }
        Ok(())
    }

    pub(super) fn situ(&mut self) -> Result<(), GoldenError> {
        let read = |name: &str| self.golden.f32(&format!("situ.{name}"));
        let (gate, up) = (read("gate")?.data, read("up")?.data);
        let (beta, linear) = (self.first(&read("beta")?.data), self.first(&read("linear_beta")?.data));
        let mut y = vec![0.0; gate.len()];
        self.kernels.situ(&gate, &up, beta, linear, &mut y);
        self.compare("situ.y_f64", &y)
    }

    pub(super) fn short_convolution(&mut self) -> Result<(), GoldenError> {
        let read = |name: &str| self.golden.f32(&format!("shortconv.{name}"));
        let weight = read("weight")?;
        let width = weight.shape.last().copied().unwrap_or(1);
        let channels = weight.rows();
        let mut taps = vec![0.0; weight.data.len()];
        conv_taps(&weight.data, width, &mut taps);
        let mut hist = vec![0.0; (width - 1) * channels];
        for call in 0..4 {
            let x = self.golden.f32(&format!("shortconv.x{call}"))?.data;
            let mut y = vec![0.0; x.len()];
            for (x, y) in x.chunks(channels).zip(y.chunks_mut(channels)) {
                self.kernels.conv_silu(&taps, &mut hist, x, y);
            }
            self.compare(&format!("shortconv.y{call}_f64"), &y)?;
            let state = self.golden.f32(&format!("shortconv.state{call}"))?.data;
            let newest = |t: usize, c: usize| state[c * width + t + 1];
            let expected: Vec<f32> = (0..hist.len()).map(|i| newest(i / channels, i % channels)).collect();
            self.equal(&format!("shortconv.state{call}"), difference(&hist, &expected));
        }
        Ok(())
    }

    pub(super) fn attention_residuals(&mut self) -> Result<(), GoldenError> {
        for case in ["attn_res_1", "attn_res_3", "attn_res_8"] {
            let norm = self.bf16(&format!("{case}.norm.weight"))?;
            let proj = self.bf16(&format!("{case}.proj.weight"))?;
            let key: Vec<f32> = norm.iter().zip(&proj).map(|(n, p)| n * p).collect();
            let (n, eps) = (key.len(), self.eps(case)?);
            let prefix = self.golden.f32(&format!("{case}.prefix_sum"))?;
            let blocks = self.golden.f32(&format!("{case}.block_residual"))?;
            let mut all = vec![0.0; prefix.data.len()];
            let per_token = blocks.data.len() / prefix.rows();
            let inputs = blocks.data.chunks(per_token).zip(prefix.data.chunks(n));
            for ((blocks, prefix), y) in inputs.zip(all.chunks_mut(n)) {
                let sources: Vec<&[f32]> = blocks.chunks(n).chain([prefix]).collect();
                self.kernels.residual_mix(&sources, &key, eps, y);
            }
            self.compare(&format!("{case}.y_f64"), &all)?;
        }
        Ok(())
    }
}
