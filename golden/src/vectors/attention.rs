//! The recurrence of linear attention.

use k3_kernel::kda::{KdaTokens, kda_state_index, kda_state_len};
use k3_kernel::{Columns, Out, math};

use super::Cases;
use crate::GoldenError;

/// States of all heads, in the kernel's layout.
struct States {
    heads: Vec<Vec<f32>>,
    dk: usize,
    dv: usize,
}

impl States {
    /// From the golden order, [heads, value, key].
    fn packed(state: &[f32], dk: usize, dv: usize) -> Self {
        let pack = |state: &[f32]| {
            let mut packed = vec![0.0; kda_state_len(dk, dv)];
            for (n, s) in state.iter().enumerate() {
                packed[kda_state_index(dk, dv, n % dk, n / dk)] = *s;
            }
            packed
        };
        Self { heads: state.chunks(dv * dk).map(pack).collect(), dk, dv }
    }

    /// Back to the golden order.
    fn unpacked(&self) -> Vec<f32> {
        let (dk, dv) = (self.dk, self.dv);
        let unpack =
            |state: &Vec<f32>| (0..dk * dv).map(|n| state[kda_state_index(dk, dv, n % dk, n / dk)]).collect();
        self.heads.iter().flat_map(|state| -> Vec<f32> { unpack(state) }).collect()
    }
}

impl Cases<'_> {
    pub(super) fn kda(&mut self, case: &str) -> Result<(), GoldenError> {
        let initial = self.golden.f32(&format!("{case}.initial_state"))?;
        let &[_, dv, dk] = initial.shape.as_slice() else {
            self.equal(&format!("{case}.initial_state"), Some(0));
            return Ok(());
        };
        let mut states = States::packed(&initial.data, dk, dv);
        for call in ["t9", "t1"] {
            let name = format!("{case}.{call}");
            let (alpha, out) = self.kda_call(case, &name, &mut states)?;
            self.compare(&format!("{name}.decay_f64"), &alpha)?;
            self.compare(&format!("{name}.o_f64"), &out)?;
            self.compare(&format!("{name}.state_f64"), &states.unpacked())?;
        }
        Ok(())
    }

    /// All tokens of one call: decay factors and outputs, [T, heads, width].
    fn kda_call(
        &self,
        case: &str,
        name: &str,
        states: &mut States,
    ) -> Result<(Vec<f32>, Vec<f32>), GoldenError> {
        let read = |tensor: &str| Ok::<_, GoldenError>(self.golden.f32(&format!("{name}.{tensor}"))?.data);
        let parameter =
            |tensor: &str| Ok::<_, GoldenError>(self.golden.f32(&format!("{case}.{tensor}"))?.data);
        let (mut q, mut k, v, g, mut beta) = (read("q")?, read("k")?, read("v")?, read("g")?, read("beta")?);
        let (a_log, dt_bias) = (parameter("A_log")?, parameter("dt_bias")?);
        let bound = Some(self.first(&parameter("lower_bound")?));
        let (heads, kernels) = (states.heads.len(), self.kernels);
        let (width, tokens) = (dt_bias.len() / heads, beta.len() / heads);
        kernels.sigmoid(&mut beta);
        let mut alpha = vec![0.0; g.len()];
        for (n, alpha) in alpha.chunks_mut(width).enumerate() {
            let (head, part) = (n % heads, n * width..(n + 1) * width);
            let bias = &dt_bias[head * width..][..width];
            kernels.kda_decay(&g[part.clone()], bias, math::exp(a_log[head]), bound, alpha);
            kernels.l2norm(&mut q[part.clone()], 1e-6, 1.0 / (width as f32).sqrt());
            kernels.l2norm(&mut k[part], 1e-6, 1.0);
        }
        let mut out = vec![0.0; v.len()];
        for (head, state) in states.heads.iter_mut().enumerate() {
            let columns = |data, len| {
                let data: &[f32] = data;
                Columns { data: &data[head * len..], stride: heads * len, count: tokens, len }
            };
            let inputs = KdaTokens {
                q: columns(&q, width),
                k: columns(&k, width),
                v: columns(&v, width),
                alpha: columns(&alpha, width),
                beta: columns(&beta, 1),
            };
            let out = Out::new(&mut out[head * width..], heads * width, width, tokens);
            kernels.kda_run(state, width, width, &inputs, out);
        }
        Ok((alpha, out))
    }
}
