//! A model as a table, and as JSON.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use k3_pipeline::model::config::{Attention, FeedForward, LayerKind, ModelConfig};
use k3_pipeline::model::layout;
use k3_pipeline::model::tensors::{DType, LayerTensors, ModelTensors};
use serde::Serialize;

use crate::output::size;

/// What a model directory holds.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    directory: PathBuf,
    fingerprint: String,
    files: usize,
    file_bytes: u64,
    /// Tensors of the text model and the image tower.
    pub(crate) tensors: u64,
    hidden: usize,
    vocab: usize,
    layers: usize,
    kda_layers: usize,
    mla_layers: usize,
    moe_layers: usize,
    experts: usize,
    experts_per_token: usize,
    expert_bytes: u64,
    /// Experts whose six tensors do not lie back to back.
    scattered_experts: usize,
    trunk_bytes: u64,
    embed_bytes: u64,
    head_bytes: u64,
    routed_bytes: u64,
    vision_tensors: u64,
    vision_bytes: u64,
    groups: Vec<LayerGroup>,
}

/// All layers of one make.
#[derive(Debug, Serialize)]
struct LayerGroup {
    attention: &'static str,
    feed_forward: &'static str,
    layers: Vec<u16>,
    /// Trunk bytes of the first of them.
    bytes_each: u64,
    /// Tensors of the first of them, without the routed experts.
    tensors: Vec<TensorLine>,
}

#[derive(Debug, Serialize)]
struct TensorLine {
    name: &'static str,
    shape: Vec<usize>,
    dtype: &'static str,
    bytes: u64,
}

impl Summary {
    /// Gathers the figures.
    pub(crate) fn new(dir: &Path, config: &ModelConfig, tensors: &ModelTensors) -> Self {
        let count = |f: &dyn Fn(&LayerKind) -> bool| config.layers.iter().filter(|k| f(k)).count();
        let moe_layers = count(&|k| k.feed_forward == FeedForward::Moe);
        let tables = || tensors.layers.iter().filter_map(|l| l.experts.as_ref());
        let routed: usize = tables().map(|t| t.len()).sum();
        let dense: usize = tensors.layers.iter().map(|l| l.matrices.len() + l.vectors.len()).sum();
        let text_tensors = dense + tensors.vectors.len() + 2 + 6 * routed;
        let own_bytes: u64 = tensors.vectors.iter().map(|v| v.extent.bytes).sum();
        let scattered = |t: &k3_pipeline::model::tensors::ExpertTable| {
            t.iter().filter(|e| e.contiguous().is_none()).count()
        };
        Self {
            directory: dir.to_owned(),
            fingerprint: tensors.fingerprint.to_string(),
            files: tensors.files.len(),
            file_bytes: tensors.files.iter().map(|f| f.bytes).sum(),
            tensors: text_tensors as u64 + tensors.vision.count,
            hidden: config.hidden,
            vocab: config.vocab,
            layers: config.layers.len(),
            kda_layers: count(&|k| k.attention == Attention::Kda),
            mla_layers: count(&|k| k.attention == Attention::Mla),
            moe_layers,
            experts: config.moe.experts,
            experts_per_token: config.moe.experts_per_token,
            expert_bytes: layout::expert_bytes(config),
            scattered_experts: tables().map(scattered).sum(),
            trunk_bytes: tensors.layers.iter().map(trunk_bytes).sum::<u64>() + own_bytes,
            embed_bytes: tensors.embed.extent.bytes,
            head_bytes: tensors.head.extent.bytes,
            routed_bytes: layout::expert_bytes(config) * routed as u64,
            vision_tensors: tensors.vision.count,
            vision_bytes: tensors.vision.bytes,
            groups: groups(config, tensors),
        }
    }

    /// Prints the table.
    pub(crate) fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "model        {}", self.directory.display())?;
        writeln!(out, "fingerprint  {}", self.fingerprint)?;
        writeln!(out, "files        {} weight files, {}", self.files, size(self.file_bytes))?;
        writeln!(
            out,
            "layers       {}: {} linear attention (KDA), {} full attention (MLA); {} with experts",
            self.layers, self.kda_layers, self.mla_layers, self.moe_layers
        )?;
        writeln!(out, "widths       hidden {}, vocabulary {}", self.hidden, self.vocab)?;
        writeln!(
            out,
            "experts      {} per layer, {} per token, {} each; {} not in one piece\n",
            self.experts,
            self.experts_per_token,
            size(self.expert_bytes),
            self.scattered_experts
        )?;
        for group in &self.groups {
            group.print(out)?;
        }
        writeln!(out, "{:<24}{:>16}  {:>10}", "total", "bytes", "")?;
        for (name, bytes) in [
            ("trunk", self.trunk_bytes),
            ("embedding", self.embed_bytes),
            ("head", self.head_bytes),
            ("routed experts", self.routed_bytes),
            ("image tower, not read", self.vision_bytes),
        ] {
            writeln!(out, "{name:<24}{bytes:>16}  {:>10}", size(bytes))?;
        }
        writeln!(out, "\n{} tensors, {} of them of the image tower", self.tensors, self.vision_tensors)
    }
}

impl LayerGroup {
    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "{} x {} + {}, {} each: layers {}",
            self.layers.len(),
            self.attention,
            self.feed_forward,
            size(self.bytes_each),
            ranges(&self.layers)
        )?;
        for t in &self.tensors {
            let shape = t.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
            writeln!(out, "  {:<52}{:<5}{shape:>16}{:>12}", t.name, t.dtype, size(t.bytes))?;
        }
        writeln!(out)
    }
}

fn trunk_bytes(layer: &LayerTensors) -> u64 {
    let matrices: u64 = layer.matrices.iter().map(|m| m.extent.bytes).sum();
    matrices + layer.vectors.iter().map(|v| v.extent.bytes).sum::<u64>()
}

fn groups(config: &ModelConfig, tensors: &ModelTensors) -> Vec<LayerGroup> {
    let mut kinds: Vec<LayerKind> = Vec::new();
    for kind in &config.layers {
        if !kinds.contains(kind) {
            kinds.push(*kind);
        }
    }
    let group = |kind: LayerKind| {
        let layers: Vec<u16> =
            config.numbered_layers().filter(|(_, k)| *k == kind).map(|(layer, _)| layer.0).collect();
        let first = layers.first().and_then(|l| tensors.layers.get(usize::from(*l)))?;
        Some(LayerGroup {
            attention: match kind.attention {
                Attention::Kda => "KDA",
                Attention::Mla => "MLA",
            },
            feed_forward: match kind.feed_forward {
                FeedForward::Dense => "dense",
                FeedForward::Moe => "experts",
            },
            bytes_each: trunk_bytes(first),
            tensors: tensor_lines(first),
            layers,
        })
    };
    kinds.into_iter().filter_map(group).collect()
}

fn tensor_lines(layer: &LayerTensors) -> Vec<TensorLine> {
    let matrices = layer.matrices.iter().map(|m| TensorLine {
        name: layout::matrix_suffix(m.kind),
        shape: vec![m.rows, m.cols],
        dtype: dtype_name(m.dtype),
        bytes: m.extent.bytes,
    });
    let vectors = layer.vectors.iter().map(|v| TensorLine {
        name: layout::vector_suffix(v.kind),
        shape: vec![v.len],
        dtype: dtype_name(v.dtype),
        bytes: v.extent.bytes,
    });
    matrices.chain(vectors).collect()
}

fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::Bf16 => "BF16",
        DType::F32 => "F32",
    }
}

/// "0-2, 4, 6-8".
fn ranges(numbers: &[u16]) -> String {
    let mut runs: Vec<(u16, u16)> = Vec::new();
    for &n in numbers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(n) => *last = n,
            _ => runs.push((n, n)),
        }
    }
    let texts = runs.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") });
    texts.collect::<Vec<_>>().join(", ")
}
