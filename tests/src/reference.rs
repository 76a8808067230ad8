//! The model in float64, written from its mathematics alone: whole text at once, no cache, no cleverness.
//! What every option of the engine is compared with where no golden numbers exist.

use k3_pipeline::model::config::{Attention, FeedForward, ModelConfig};
use k3_pipeline::model::tensors::{ExpertExtents, Extent, MatrixKind, ModelTensors, VectorKind};
use k3_pipeline::units::{ExpertId, LayerIndex, TokenId};

use crate::resident::{Files, widen};

/// One row per token.
type Rows = Vec<Vec<f64>>;

/// A model whose weights are read as they are needed.
pub struct Reference<'m> {
    config: &'m ModelConfig,
    tensors: &'m ModelTensors,
    files: &'m Files,
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn multiply(weights: &[f64], rows: usize, x: &[Vec<f64>]) -> Rows {
    let cols = weights.len() / rows;
    x.iter().map(|x| weights.chunks_exact(cols).map(|row| dot(row, x)).collect()).collect()
}

fn rmsnorm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let scale = (dot(x, x) / x.len() as f64 + eps).sqrt().recip();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let e: Vec<f64> = x.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|e| e / sum).collect()
}

fn add(to: &mut [Vec<f64>], x: &[Vec<f64>]) {
    for (to, x) in to.iter_mut().zip(x) {
        to.iter_mut().zip(x).for_each(|(to, x)| *to += x);
    }
}

impl<'m> Reference<'m> {
    /// The model behind `tensors`.
    #[must_use]
    pub fn new(config: &'m ModelConfig, tensors: &'m ModelTensors, files: &'m Files) -> Self {
        Self { config, tensors, files }
    }

    /// Logits of every position.
    #[must_use]
    pub fn logits(&self, ids: &[TokenId]) -> Rows {
        let e = self.config.hidden;
        let embed = widen64(self.files.bytes(self.tensors.embed.extent), self.tensors.embed.dtype);
        let mut prefix: Rows =
            ids.iter().map(|id| embed[id.0 as usize * e..(id.0 as usize + 1) * e].to_vec()).collect();
        let mut blocks: Vec<Rows> = Vec::new();
        for (layer, kind) in self.config.numbered_layers() {
            let at = Some(layer);
            let h =
                self.mix(&blocks, &prefix, (VectorKind::AttentionResNorm, VectorKind::AttentionResProj), at);
            let x = self.norm(&h, VectorKind::InputNorm, at);
            let out = match kind.attention {
                Attention::Kda => self.kda(&x, layer),
                Attention::Mla => self.mla(&x, layer),
            };
            if self.config.starts_residual_block(layer) {
                blocks.push(std::mem::replace(&mut prefix, out));
            } else {
                add(&mut prefix, &out);
            }
            let h = self.mix(&blocks, &prefix, (VectorKind::MlpResNorm, VectorKind::MlpResProj), at);
            let x = self.norm(&h, VectorKind::PostAttentionNorm, at);
            let out = match kind.feed_forward {
                FeedForward::Dense => self.dense(&x, layer),
                FeedForward::Moe => self.moe(&x, layer),
            };
            add(&mut prefix, &out);
        }
        let h = self.mix(&blocks, &prefix, (VectorKind::OutputResNorm, VectorKind::OutputResProj), None);
        let x = self.norm(&h, VectorKind::FinalNorm, None);
        self.product(MatrixKind::Head, None, &x)
    }

    fn product(&self, kind: MatrixKind, layer: Option<LayerIndex>, x: &[Vec<f64>]) -> Rows {
        let matrix = match layer {
            None => &self.tensors.head,
            Some(layer) => {
                let matrices = &self.tensors.layers[layer.index()].matrices;
                matrices.iter().find(|m| m.kind == kind).expect("the matrix")
            }
        };
        let weights = widen64(self.files.bytes(matrix.extent), matrix.dtype);
        multiply(&weights, matrix.rows, x)
    }

    fn vector(&self, kind: VectorKind, layer: Option<LayerIndex>) -> Vec<f64> {
        let vectors =
            layer.map_or(&self.tensors.vectors, |layer| &self.tensors.layers[layer.index()].vectors);
        let vector = vectors.iter().find(|v| v.kind == kind).expect("the vector");
        self.files.vector(vector).iter().map(|&v| f64::from(v)).collect()
    }

    fn norm(&self, x: &[Vec<f64>], kind: VectorKind, layer: Option<LayerIndex>) -> Rows {
        let weight = self.vector(kind, layer);
        x.iter().map(|x| rmsnorm(x, &weight, f64::from(self.config.rms_eps))).collect()
    }

    fn mix(
        &self,
        blocks: &[Rows],
        prefix: &Rows,
        (norm, projection): (VectorKind, VectorKind),
        layer: Option<LayerIndex>,
    ) -> Rows {
        if blocks.is_empty() {
            return prefix.clone();
        }
        let (norm, projection) = (self.vector(norm, layer), self.vector(projection, layer));
        let eps = f64::from(self.config.rms_eps);
        let mix_token = |t: usize| {
            let sources: Vec<&Vec<f64>> = blocks.iter().map(|b| &b[t]).chain([&prefix[t]]).collect();
            let scores: Vec<f64> =
                sources.iter().map(|v| dot(&rmsnorm(v, &norm, eps), &projection)).collect();
            let p = softmax(&scores);
            (0..sources[0].len()).map(|i| sources.iter().zip(&p).map(|(v, p)| p * v[i]).sum()).collect()
        };
        (0..prefix.len()).map(mix_token).collect()
    }

    /// Depthwise causal convolution over time, then SiLU.
    fn conv(&self, x: &Rows, kind: VectorKind, layer: LayerIndex) -> Rows {
        let (weights, taps) = (self.vector(kind, Some(layer)), self.config.kda.conv_kernel);
        let value = |t: usize, c: usize| {
            let tap =
                |j: usize| (t + j + 1).checked_sub(taps).map_or(0.0, |s| weights[c * taps + j] * x[s][c]);
            let y: f64 = (0..taps).map(tap).sum();
            y * sigmoid(y)
        };
        (0..x.len()).map(|t| (0..x[t].len()).map(|c| value(t, c)).collect()).collect()
    }

    fn kda(&self, x: &Rows, layer: LayerIndex) -> Rows {
        let (c, at) = (&self.config.kda, Some(layer));
        let d = c.head_dim;
        let q = self.conv(&self.product(MatrixKind::KdaQ, at, x), VectorKind::QConv, layer);
        let k = self.conv(&self.product(MatrixKind::KdaK, at, x), VectorKind::KConv, layer);
        let v = self.conv(&self.product(MatrixKind::KdaV, at, x), VectorKind::VConv, layer);
        let beta = self.product(MatrixKind::KdaBeta, at, x);
        let z = self.product(MatrixKind::KdaDecayB, at, &self.product(MatrixKind::KdaDecayA, at, x));
        let gate = if c.full_rank_gate {
            self.product(MatrixKind::KdaGate, at, x)
        } else {
            self.product(MatrixKind::KdaGateB, at, &self.product(MatrixKind::KdaGateA, at, x))
        };
        let (a_log, bias) = (self.vector(VectorKind::ALog, at), self.vector(VectorKind::DtBias, at));
        let out_norm = self.vector(VectorKind::OutNorm, at);
        let unit = |x: &[f64], scale: f64| -> Vec<f64> {
            let scale = scale / (dot(x, x) + 1e-6).sqrt();
            x.iter().map(|x| x * scale).collect()
        };
        let mut o: Rows = vec![vec![0.0; c.width()]; x.len()];
        for head in 0..c.heads {
            let (of, gain) = (head * d..(head + 1) * d, a_log[head].exp());
            let mut state = vec![vec![0.0; d]; d];
            for t in 0..x.len() {
                let q = unit(&q[t][of.clone()], (d as f64).sqrt().recip());
                let k = unit(&k[t][of.clone()], 1.0);
                let decay = |i: usize| {
                    let z = z[t][of.start + i] + bias[of.start + i];
                    match c.lower_bound {
                        Some(bound) => (f64::from(bound) * sigmoid(gain * z)).exp(),
                        None => (-gain * z.exp().ln_1p()).exp(),
                    }
                };
                for (i, row) in state.iter_mut().enumerate() {
                    let alpha = decay(i);
                    row.iter_mut().for_each(|s| *s *= alpha);
                }
                let beta = sigmoid(beta[t][head]);
                for j in 0..d {
                    let u: f64 = (0..d).map(|i| state[i][j] * k[i]).sum();
                    let delta = beta * (v[t][of.start + j] - u);
                    (0..d).for_each(|i| state[i][j] += k[i] * delta);
                }
                let read: Vec<f64> = (0..d).map(|j| (0..d).map(|i| state[i][j] * q[i]).sum()).collect();
                let normed = rmsnorm(&read, &out_norm, f64::from(self.config.rms_eps));
                for ((o, n), g) in o[t][of.clone()].iter_mut().zip(normed).zip(&gate[t][of.clone()]) {
                    *o = n * sigmoid(*g);
                }
            }
        }
        self.product(MatrixKind::KdaOut, at, &o)
    }

    fn mla(&self, x: &Rows, layer: LayerIndex) -> Rows {
        let (c, at) = (&self.config.mla, Some(layer));
        let low_rank = |x: &Rows, kind| -> Rows {
            let weight = self.vector(kind, at);
            x.iter().map(|x| rmsnorm(x, &weight, 1e-6)).collect()
        };
        let q = match c.q_rank {
            Some(_) => {
                let low = low_rank(&self.product(MatrixKind::MlaQA, at, x), VectorKind::QANorm);
                self.product(MatrixKind::MlaQB, at, &low)
            }
            None => self.product(MatrixKind::MlaQ, at, x),
        };
        let kv = self.product(MatrixKind::MlaKvA, at, x);
        let latent: Rows = kv.iter().map(|kv| kv[..c.kv_rank].to_vec()).collect();
        let expanded = self.product(MatrixKind::MlaKvB, at, &low_rank(&latent, VectorKind::KvANorm));
        let (width, head_rows) = (c.query_width(), c.nope_dim + c.v_dim);
        let mut o: Rows = vec![vec![0.0; c.heads * c.v_dim]; x.len()];
        for head in 0..c.heads {
            for t in 0..x.len() {
                let (nope, rope) = q[t][head * width..(head + 1) * width].split_at(c.nope_dim);
                let score = |s: usize| {
                    let key = &expanded[s][head * head_rows..][..c.nope_dim];
                    (dot(nope, key) + dot(rope, &kv[s][c.kv_rank..])) / (width as f64).sqrt()
                };
                let p = softmax(&(0..=t).map(score).collect::<Vec<f64>>());
                for (s, p) in p.iter().enumerate() {
                    let value = &expanded[s][head * head_rows + c.nope_dim..][..c.v_dim];
                    let o = &mut o[t][head * c.v_dim..(head + 1) * c.v_dim];
                    o.iter_mut().zip(value).for_each(|(o, v)| *o += p * v);
                }
            }
        }
        if c.output_gate {
            for (o, gate) in o.iter_mut().zip(self.product(MatrixKind::MlaGate, at, x)) {
                o.iter_mut().zip(gate).for_each(|(o, gate)| *o *= sigmoid(gate));
            }
        }
        self.product(MatrixKind::MlaOut, at, &o)
    }

    fn situ(&self, gate: &Rows, up: &Rows) -> Rows {
        let (b, l) = (f64::from(self.config.situ_beta), f64::from(self.config.situ_linear_beta));
        let one = |(g, u): (&f64, &f64)| b * (g / b).tanh() * sigmoid(*g) * l * (u / l).tanh();
        gate.iter().zip(up).map(|(gate, up)| gate.iter().zip(up).map(one).collect()).collect()
    }

    fn dense(&self, x: &Rows, layer: LayerIndex) -> Rows {
        let [gate, up] =
            [MatrixKind::MlpGate, MatrixKind::MlpUp].map(|kind| self.product(kind, Some(layer), x));
        self.product(MatrixKind::MlpDown, Some(layer), &self.situ(&gate, &up))
    }

    fn moe(&self, x: &Rows, layer: LayerIndex) -> Rows {
        let (c, at) = (&self.config.moe, Some(layer));
        let scores = self.product(MatrixKind::Router, at, x);
        let z = if c.latent.is_some() { self.product(MatrixKind::LatentDown, at, x) } else { x.clone() };
        let mut sum: Rows = vec![vec![0.0; self.config.expert_io_width()]; x.len()];
        for t in 0..x.len() {
            let scores: Vec<f64> = scores[t].iter().map(|&s| sigmoid(s)).collect();
            for (id, weight) in self.choose(&scores, layer) {
                let y = self.expert(layer, ExpertId(id as u16), &z[t]);
                sum[t].iter_mut().zip(&y).for_each(|(sum, y)| *sum += weight * y);
            }
        }
        if c.latent.is_some() && c.latent_norm {
            sum = self.norm(&sum, VectorKind::RoutedNorm, at);
        }
        let mut out = if c.latent.is_some() { self.product(MatrixKind::LatentUp, at, &sum) } else { sum };
        let [gate, up] = [MatrixKind::SharedGate, MatrixKind::SharedUp].map(|kind| self.product(kind, at, x));
        add(&mut out, &self.product(MatrixKind::SharedDown, at, &self.situ(&gate, &up)));
        out
    }

    /// Chosen experts with their weights.
    fn choose(&self, scores: &[f64], layer: LayerIndex) -> Vec<(usize, f64)> {
        let c = &self.config.moe;
        let bias = self.vector(VectorKind::RouterBias, Some(layer));
        let mut choice: Vec<f64> = scores.iter().zip(&bias).map(|(s, b)| s + b).collect();
        if c.groups_kept < c.groups {
            let size = c.experts / c.groups;
            let best_two = |group: &[f64]| {
                let mut sorted = group.to_vec();
                sorted.sort_by(|a, b| b.total_cmp(a));
                sorted.iter().take(2).sum::<f64>()
            };
            let mut groups: Vec<(usize, f64)> = choice.chunks(size).map(best_two).enumerate().collect();
            groups.sort_by(|a, b| b.1.total_cmp(&a.1));
            for &(group, _) in &groups[c.groups_kept..] {
                choice[group * size..(group + 1) * size].fill(f64::NEG_INFINITY);
            }
        }
        let mut ids: Vec<usize> = (0..scores.len()).collect();
        ids.sort_by(|&a, &b| choice[b].total_cmp(&choice[a]));
        ids.truncate(c.experts_per_token);
        let total: f64 = ids.iter().map(|&id| scores[id]).sum();
        let renormalize = c.renormalize && c.experts_per_token > 1;
        let scale = f64::from(c.scaling) / if renormalize { total + 1e-20 } else { 1.0 };
        ids.iter().map(|&id| (id, scores[id] * scale)).collect()
    }

    fn expert(&self, layer: LayerIndex, id: ExpertId, z: &[f64]) -> Vec<f64> {
        let table = self.tensors.layers[layer.index()].experts.as_ref().expect("experts");
        let ExpertExtents(six) = table.extents(id).expect("the expert");
        let product = |slot: usize, rows: usize, x: Vec<f64>| {
            multiply(&self.mxfp4(six[slot], six[slot + 1]), rows, &[x]).swap_remove(0)
        };
        let width = self.config.moe.expert_width;
        let (gate, up) = (product(0, width, z.to_vec()), product(4, width, z.to_vec()));
        let inner = self.situ(&vec![gate], &vec![up]).swap_remove(0);
        product(2, z.len(), inner)
    }

    fn mxfp4(&self, packed: Extent, scales: Extent) -> Vec<f64> {
        const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let nibbles = self.files.bytes(packed).iter().flat_map(|b| [b & 15, b >> 4]);
        let scales = self.files.bytes(scales);
        let value = |(i, nibble): (usize, u8)| {
            let scale = 2f64.powi(i32::from(scales[i / 32]) - 127);
            let magnitude = E2M1[usize::from(nibble & 7)] * scale;
            if nibble & 8 == 0 { magnitude } else { -magnitude }
        };
        nibbles.enumerate().map(value).collect()
    }
}

fn widen64(bytes: &[u8], dtype: k3_pipeline::model::tensors::DType) -> Vec<f64> {
    widen(bytes, dtype).iter().map(|&v| f64::from(v)).collect()
}
