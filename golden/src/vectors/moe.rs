//! The router's choice and its weights.

use k3_kernel::moe::{RouterParams, router_choose};
use k3_kernel::{Bf16Rows, Columns, Matrix, Out};

use super::{Cases, difference};
use crate::GoldenError;

impl Cases<'_> {
    pub(super) fn router(&mut self, case: &str) -> Result<(), GoldenError> {
        let number = |name: &str| {
            let value = self.first(&self.golden.i32(&format!("{case}.{name}"))?.data);
            Ok::<_, GoldenError>(usize::try_from(value).unwrap_or_default())
        };
        let read = |name: &str| self.golden.f32(&format!("{case}.{name}"));
        let (x, bias) = (read("x")?, read("e_score_correction_bias")?.data);
        let params = RouterParams {
            top_k: number("top_k")?,
            groups: number("num_expert_group")?,
            groups_kept: number("topk_group")?,
            renormalize: number("renormalize")? != 0,
            scaling: self.first(&read("routed_scaling_factor")?.data),
        };
        let scores = self.router_scores(case, &x.data, bias.len())?;
        let (mut ids, mut all) = (Vec::new(), Vec::new());
        for scores in scores.chunks(bias.len()) {
            let (mut chosen, mut weights) = (vec![0; params.top_k], vec![0.0; params.top_k]);
            let groups = &mut vec![0.0; params.groups];
            router_choose(scores, &bias, &params, &mut chosen, &mut weights, groups);
            let mut pairs: Vec<(u16, f32)> = chosen.into_iter().zip(weights).collect();
            pairs.sort_by_key(|pair| pair.0);
            ids.extend(pairs.iter().map(|pair| i32::from(pair.0)));
            all.extend(pairs.iter().map(|pair| pair.1));
        }
        let expected = self.golden.i32(&format!("{case}.ids"))?.data;
        self.equal(&format!("{case}.ids"), difference(&ids, &expected));
        self.compare(&format!("{case}.weights_f64"), &all)
    }

    /// Scores after the sigmoid, [tokens, experts].
    fn router_scores(&self, case: &str, x: &[f32], experts: usize) -> Result<Vec<f32>, GoldenError> {
        let bytes = self.bytes(&format!("{case}.gate.weight"))?;
        let width = bytes.len() / 2 / experts;
        let tokens = x.len() / width;
        let mut scores = vec![0.0; tokens * experts];
        if let Ok(gate) = Bf16Rows::new(&bytes, experts, width) {
            let out = Out::new(&mut scores, experts, experts, tokens);
            self.kernels.matmul(Matrix::Bf16Rows(gate), 0..experts, Columns::packed(x, width, tokens), out);
        }
        self.kernels.sigmoid(&mut scores);
        Ok(scores)
    }
}
