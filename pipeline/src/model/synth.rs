//! Checkpoints of any size in the released layout, made from a configuration: sparse files with true
//! headers, so that the full model takes no more disk than its headers, and whatever a caller fills in.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::config::{FeedForward, ModelConfig};
use super::config_error::ConfigError;
use super::config_json::{self, CONFIG_FILE};
use super::layout::{self, VectorDims};
use super::shard_index::INDEX_FILE;
use super::tensors::VectorKind;
use crate::units::{ExpertId, LayerIndex};

/// Number type of a stored tensor, in the order in which a file holds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SynthType {
    /// float32.
    F32,
    /// bfloat16.
    Bf16,
    /// Packed nibbles and scale bytes.
    U8,
}

/// One tensor of a synthetic checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SynthTensor {
    /// Its name.
    pub name: String,
    /// Its type.
    pub dtype: SynthType,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// A file with its tensors in the order in which they lie.
#[derive(Clone, Debug)]
pub struct SynthFile {
    /// Its name.
    pub name: String,
    /// Its tensors.
    pub tensors: Vec<SynthTensor>,
}

/// What was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SynthSummary {
    /// Weight files.
    pub files: usize,
    /// Tensors.
    pub tensors: usize,
    /// Bytes of all tensors, most of them in holes.
    pub tensor_bytes: u64,
}

/// Why a synthetic checkpoint was not made.
#[derive(Debug, Error)]
pub enum SynthError {
    /// Its configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file could not be written.
    #[error("{}: cannot be written: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Puts values into tensors. What it leaves alone reads as zeros: +0 weights, and scales of 2^-127.
pub trait Fill {
    /// Called once for every tensor; it may write up to [`SynthTensor::bytes`] bytes from `offset` on.
    ///
    /// # Errors
    /// A failed write.
    fn fill(&mut self, tensor: &SynthTensor, file: &File, offset: u64) -> io::Result<()>;
}

/// Leaves every tensor a hole.
#[derive(Clone, Copy, Debug)]
pub struct Sparse;

impl Fill for Sparse {
    fn fill(&mut self, _: &SynthTensor, _: &File, _: u64) -> io::Result<()> {
        Ok(())
    }
}

impl SynthTensor {
    fn new(name: String, dtype: SynthType, shape: &[usize]) -> Self {
        Self { name, dtype, shape: shape.to_vec() }
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let width = match self.dtype {
            SynthType::F32 => 4,
            SynthType::Bf16 => 2,
            SynthType::U8 => 1,
        };
        self.shape.iter().fold(width, |n, d| n * *d as u64)
    }
}

/// The files of a text model in the released layout: one per layer, then one with the embedding, the
/// head and the last norms; inside a file by type, then by name.
#[must_use]
pub fn released_layout(config: &ModelConfig) -> Vec<SynthFile> {
    let mut groups: Vec<Vec<SynthTensor>> = config
        .numbered_layers()
        .map(|(layer, kind)| layer_tensors(config, layer, kind.feed_forward))
        .collect();
    let head = [config.vocab, config.hidden];
    let mut last: Vec<SynthTensor> = [layout::HEAD_NAME, layout::EMBED_NAME]
        .map(|name| SynthTensor::new(name.to_owned(), SynthType::Bf16, &head))
        .into();
    last.extend(layout::model_vectors(config).into_iter().map(|v| vector_tensor(config, None, v)));
    groups.push(last);
    let count = groups.len();
    let named = groups.into_iter().enumerate().map(|(i, mut tensors)| {
        tensors.sort_unstable_by(|a, b| (a.dtype, &a.name).cmp(&(b.dtype, &b.name)));
        SynthFile { name: format!("model-{:05}-of-{count:06}.safetensors", i + 1), tensors }
    });
    named.collect()
}

fn layer_tensors(config: &ModelConfig, layer: LayerIndex, feed_forward: FeedForward) -> Vec<SynthTensor> {
    let matrices = layout::matrices(config, layer).into_iter().map(|m| {
        SynthTensor::new(layout::matrix_name(Some(layer), m.kind), SynthType::Bf16, &[m.rows, m.cols])
    });
    let vectors = layout::vectors(config, layer).into_iter().map(|v| vector_tensor(config, Some(layer), v));
    let mut out: Vec<SynthTensor> = matrices.chain(vectors).collect();
    if feed_forward == FeedForward::Moe {
        for expert in (0u16..).map(ExpertId).take(config.moe.experts) {
            for (part, shape) in layout::expert(config).iter().enumerate() {
                for (slot, cols) in
                    [(2 * part, shape.cols / 2), (2 * part + 1, shape.cols / layout::MXFP4_GROUP)]
                {
                    let name = layout::expert_name(layer, expert, slot);
                    out.push(SynthTensor::new(name, SynthType::U8, &[shape.rows, cols]));
                }
            }
        }
    }
    out
}

/// F32 where the release has it; `A_log` padded to a head's width as there.
fn vector_tensor(
    config: &ModelConfig,
    layer: Option<LayerIndex>,
    vector: layout::VectorShape,
) -> SynthTensor {
    use VectorKind as V;
    let f32 = matches!(
        vector.kind,
        V::ALog | V::DtBias | V::QConv | V::KConv | V::VConv | V::OutNorm | V::RouterBias
    );
    let shape = match vector.dims {
        VectorDims::Flat(n) => vec![n],
        VectorDims::Row(n) => vec![1, n],
        VectorDims::Taps(channels, taps) => vec![channels, 1, taps],
        VectorDims::AtLeast(n) => vec![n.max(config.kda.head_dim)],
    };
    let dtype = if f32 { SynthType::F32 } else { SynthType::Bf16 };
    SynthTensor { name: layout::vector_name(layer, vector.kind), dtype, shape }
}

/// Writes `config.json` with the text given, the index, and the weight files into `dir`.
///
/// # Errors
/// A refused configuration, or a failed write.
pub fn write_checkpoint(
    dir: &Path,
    config_text: &str,
    fill: &mut dyn Fill,
) -> Result<SynthSummary, SynthError> {
    let config_path = dir.join(CONFIG_FILE);
    let config = config_json::parse_config(&config_path, config_text)?;
    let at = |path: &Path, source| SynthError::Write { path: path.to_owned(), source };
    fs::write(&config_path, config_text).map_err(|e| at(&config_path, e))?;
    let files = released_layout(&config);
    let mut summary = SynthSummary { files: files.len(), ..SynthSummary::default() };
    for file in &files {
        let path = dir.join(&file.name);
        summary.tensor_bytes += write_file(&path, file, fill).map_err(|e| at(&path, e))?;
        summary.tensors += file.tensors.len();
    }
    let index_path = dir.join(INDEX_FILE);
    write_index(&index_path, &files, summary.tensor_bytes).map_err(|e| at(&index_path, e))?;
    Ok(summary)
}

fn write_file(path: &Path, file: &SynthFile, fill: &mut dyn Fill) -> io::Result<u64> {
    let mut header = String::from("{");
    let mut end = 0;
    for (i, t) in file.tensors.iter().enumerate() {
        let comma = if i > 0 { "," } else { "" };
        let dtype = match t.dtype {
            SynthType::F32 => "F32",
            SynthType::Bf16 => "BF16",
            SynthType::U8 => "U8",
        };
        let begin = end;
        end += t.bytes();
        let shape: Vec<String> = t.shape.iter().map(usize::to_string).collect();
        // Writing to a string cannot fail.
        let _ = write!(
            header,
            "{comma}\"{}\":{{\"dtype\":\"{dtype}\",\"shape\":[{}],\"data_offsets\":[{begin},{end}]}}",
            t.name,
            shape.join(",")
        );
    }
    header.push('}');
    let padded = header.len().next_multiple_of(8);
    header.extend(std::iter::repeat_n(' ', padded - header.len()));
    let out = File::create(path)?;
    out.write_all_at(&(header.len() as u64).to_le_bytes(), 0)?;
    out.write_all_at(header.as_bytes(), 8)?;
    let mut offset = 8 + header.len() as u64;
    out.set_len(offset + end)?;
    for t in &file.tensors {
        fill.fill(t, &out, offset)?;
        offset += t.bytes();
    }
    Ok(end)
}

fn write_index(path: &Path, files: &[SynthFile], total: u64) -> io::Result<()> {
    let mut out = io::BufWriter::new(File::create(path)?);
    write!(out, "{{\n \"metadata\": {{\n  \"total_size\": {total}\n }},\n \"weight_map\": {{")?;
    let mut comma = "";
    for file in files {
        for t in &file.tensors {
            write!(out, "{comma}\n  \"{}\": \"{}\"", t.name, file.name)?;
            comma = ",";
        }
    }
    writeln!(out, "\n }}\n}}")?;
    out.flush()
}
