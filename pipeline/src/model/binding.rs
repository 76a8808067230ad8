//! Which tensor plays which part: every name, type and shape against the configuration.

use super::checkpoint_error::{CheckpointProblem, Dims};
use super::config::{FeedForward, ModelConfig};
use super::layout::{self, ExpertShape, MXFP4_GROUP, MatrixShape, VectorShape};
use super::shard::{Entry, StoredType};
use super::tensors::{
    DType, ExpertExtents, ExpertTable, Extent, FileId, Fingerprint, LayerTensors, MatrixExtent, MatrixRef,
    ModelTensors, VectorRef, VisionTensors, WeightFile,
};
use crate::units::{ExpertId, LayerIndex};

/// A part and the tensor that plays it, once it is found.
struct Slot<S> {
    shape: S,
    found: Option<Stored>,
    /// A tensor of this name was there, but could not be used: it is not missing.
    refused: bool,
}

impl<S> Slot<S> {
    fn open(shape: S) -> Self {
        Self { shape, found: None, refused: false }
    }

    fn is_missing(&self) -> bool {
        self.found.is_none() && !self.refused
    }
}

#[derive(Clone, Copy)]
struct Stored {
    dtype: DType,
    elements: usize,
    extent: Extent,
}

struct LayerSlots {
    matrices: Vec<Slot<MatrixShape>>,
    vectors: Vec<Slot<VectorShape>>,
    /// Six extents for each expert; [`UNBOUND`] until found, [`REFUSED`] when found unusable.
    experts: Vec<[Extent; 6]>,
}

/// No tensor of an expert has 0 bytes.
const UNBOUND: Extent = Extent { file: FileId(0), offset: 0, bytes: 0 };
const REFUSED: Extent = Extent { file: FileId(0), offset: 1, bytes: 0 };

/// What is done with one tensor of a file.
pub(super) enum Verdict {
    /// It plays its part, or belongs to the image tower.
    Fine,
    /// It cannot.
    Problem(CheckpointProblem),
    /// Another file had it before.
    Twice(FileId),
}

/// Collects the tensors of all files.
pub(super) struct Binder<'c> {
    config: &'c ModelConfig,
    expert_shapes: [ExpertShape; 3],
    layers: Vec<LayerSlots>,
    own: Vec<Slot<VectorShape>>,
    embed: Slot<MatrixShape>,
    head: Slot<MatrixShape>,
    vision: VisionTensors,
}

impl<'c> Binder<'c> {
    /// A binder for the tensors that `config` asks for.
    pub(super) fn new(config: &'c ModelConfig) -> Self {
        let layers = config.numbered_layers().map(|(layer, kind)| LayerSlots {
            matrices: layout::matrices(config, layer).into_iter().map(Slot::open).collect(),
            vectors: layout::vectors(config, layer).into_iter().map(Slot::open).collect(),
            experts: match kind.feed_forward {
                FeedForward::Moe => vec![[UNBOUND; 6]; config.moe.experts],
                FeedForward::Dense => Vec::new(),
            },
        });
        Self {
            config,
            expert_shapes: layout::expert(config),
            layers: layers.collect(),
            own: layout::model_vectors(config).into_iter().map(Slot::open).collect(),
            embed: Slot::open(layout::head(config)),
            head: Slot::open(layout::head(config)),
            vision: VisionTensors::default(),
        }
    }

    /// Binds one tensor of `file`, whose name is `file_name`.
    pub(super) fn bind(&mut self, entry: &Entry<'_>, file: FileId, file_name: &str) -> Verdict {
        let name: &str = &entry.name;
        if layout::VISION_PREFIXES.iter().any(|p| name.starts_with(p)) {
            self.vision.count += 1;
            self.vision.bytes += entry.bytes;
            return Verdict::Fine;
        }
        let found = Found { entry, file, file_name };
        if name == layout::HEAD_NAME {
            return found.bind_matrix(&mut self.head);
        }
        if name == layout::EMBED_NAME {
            return found.bind_matrix(&mut self.embed);
        }
        let Some(body) = name.strip_prefix(layout::BODY_PREFIX) else { return found.unexpected() };
        let Some((layer, suffix)) = body.strip_prefix("layers.").and_then(numbered) else {
            let slot = self.own.iter_mut().find(|s| layout::vector_suffix(s.shape.kind) == body);
            return slot.map_or_else(|| found.unexpected(), |s| found.bind_vector(s));
        };
        let Some(slots) = self.layers.get_mut(layer) else { return found.unexpected() };
        if let Some(rest) = suffix.strip_prefix("block_sparse_moe.experts.") {
            return found.bind_expert(rest, slots, &self.expert_shapes);
        }
        if let Some(s) = slots.matrices.iter_mut().find(|s| layout::matrix_suffix(s.shape.kind) == suffix) {
            return found.bind_matrix(s);
        }
        let slot = slots.vectors.iter_mut().find(|s| layout::vector_suffix(s.shape.kind) == suffix);
        slot.map_or_else(|| found.unexpected(), |s| found.bind_vector(s))
    }

    /// Calls `note` for every part that no tensor plays, in order of the layers.
    pub(super) fn missing(&self, note: &mut dyn FnMut(CheckpointProblem)) {
        let mut lacks = |tensor, expected| note(CheckpointProblem::Missing { tensor, expected });
        let dense = |m: &MatrixShape| format!("BF16 or F32 [{}, {}]", m.rows, m.cols);
        for (slot, name) in [(&self.embed, layout::EMBED_NAME), (&self.head, layout::HEAD_NAME)] {
            if slot.is_missing() {
                lacks(name.to_owned(), dense(&slot.shape));
            }
        }
        for s in self.own.iter().filter(|s| s.is_missing()) {
            lacks(layout::vector_name(None, s.shape.kind), format!("BF16 or F32 {}", s.shape.dims));
        }
        for (layer, slots) in (0u16..).map(LayerIndex).zip(&self.layers) {
            for s in slots.matrices.iter().filter(|s| s.is_missing()) {
                lacks(layout::matrix_name(Some(layer), s.shape.kind), dense(&s.shape));
            }
            for s in slots.vectors.iter().filter(|s| s.is_missing()) {
                lacks(
                    layout::vector_name(Some(layer), s.shape.kind),
                    format!("BF16 or F32 {}", s.shape.dims),
                );
            }
            for (expert, extents) in (0u16..).map(ExpertId).zip(&slots.experts) {
                for slot in (0..6).filter(|i| extents[*i] == UNBOUND) {
                    let [rows, cols] = expert_dims(&self.expert_shapes, slot);
                    lacks(layout::expert_name(layer, expert, slot), format!("U8 [{rows}, {cols}]"));
                }
            }
        }
    }

    /// The bound tensors; `None` while any part is missing.
    pub(super) fn finish(self, files: Vec<WeightFile>, fingerprint: Fingerprint) -> Option<ModelTensors> {
        let mut layers = Vec::with_capacity(self.layers.len());
        for (layer, slots) in (0u16..).map(LayerIndex).zip(self.layers) {
            layers.push(finish_layer(layer, slots)?);
        }
        let embed = matrix_ref(&self.embed, None)?;
        Some(ModelTensors {
            files,
            embed: MatrixExtent {
                rows: self.config.vocab,
                cols: self.config.hidden,
                dtype: embed.dtype,
                extent: embed.extent,
            },
            layers,
            head: matrix_ref(&self.head, None)?,
            vectors: self.own.iter().map(|s| vector_ref(s, None)).collect::<Option<_>>()?,
            vision: self.vision,
            fingerprint,
        })
    }
}

fn finish_layer(layer: LayerIndex, slots: LayerSlots) -> Option<LayerTensors> {
    if slots.experts.iter().flatten().any(|e| e.bytes == 0) {
        return None;
    }
    let experts: Box<[ExpertExtents]> = slots.experts.into_iter().map(ExpertExtents).collect();
    Some(LayerTensors {
        matrices: slots.matrices.iter().map(|s| matrix_ref(s, Some(layer))).collect::<Option<_>>()?,
        vectors: slots.vectors.iter().map(|s| vector_ref(s, Some(layer))).collect::<Option<_>>()?,
        experts: (!experts.is_empty()).then(|| ExpertTable::new(experts)),
    })
}

fn matrix_ref(slot: &Slot<MatrixShape>, layer: Option<LayerIndex>) -> Option<MatrixRef> {
    let MatrixShape { kind, rows, cols } = slot.shape;
    slot.found.map(|f| MatrixRef { kind, layer, rows, cols, dtype: f.dtype, extent: f.extent })
}

fn vector_ref(slot: &Slot<VectorShape>, layer: Option<LayerIndex>) -> Option<VectorRef> {
    let kind = slot.shape.kind;
    slot.found.map(|f| VectorRef { kind, layer, len: f.elements, dtype: f.dtype, extent: f.extent })
}

/// "12.rest" -> (12, "rest"), for a number as it is usually written.
fn numbered(text: &str) -> Option<(usize, &str)> {
    let (digits, rest) = text.split_once('.')?;
    let canonical = digits == "0" || !digits.starts_with(['0', '+']);
    canonical.then(|| digits.parse().ok()).flatten().map(|n| (n, rest))
}

/// Stored shape of one of the six tensors of an expert.
fn expert_dims(shapes: &[ExpertShape; 3], slot: usize) -> [u64; 2] {
    let s = &shapes[slot / 2];
    let cols = if slot.is_multiple_of(2) { s.cols / 2 } else { s.cols / MXFP4_GROUP };
    [s.rows as u64, cols as u64]
}

/// A tensor on its way to its part.
struct Found<'e, 'a> {
    entry: &'e Entry<'a>,
    file: FileId,
    file_name: &'e str,
}

impl Found<'_, '_> {
    fn extent(&self) -> Extent {
        Extent { file: self.file, offset: self.entry.offset, bytes: self.entry.bytes }
    }

    fn unexpected(&self) -> Verdict {
        let (tensor, file) = (self.entry.name.to_string(), self.file_name.to_owned());
        Verdict::Problem(CheckpointProblem::Unexpected { tensor, file })
    }

    fn wrong_shape(&self, expected: String) -> Verdict {
        Verdict::Problem(CheckpointProblem::Shape {
            tensor: self.entry.name.to_string(),
            file: self.file_name.to_owned(),
            expected,
            found: self.entry.shape.clone(),
        })
    }

    fn wrong_type(&self, expected: &'static str) -> Verdict {
        Verdict::Problem(CheckpointProblem::Type {
            tensor: self.entry.name.to_string(),
            file: self.file_name.to_owned(),
            expected,
            found: self.entry.dtype.name,
        })
    }

    fn bind_matrix(&self, slot: &mut Slot<MatrixShape>) -> Verdict {
        let expected = [slot.shape.rows as u64, slot.shape.cols as u64];
        if self.entry.shape != expected {
            slot.refused = true;
            return self.wrong_shape(Dims(&expected).to_string());
        }
        self.fill(slot)
    }

    fn bind_vector(&self, slot: &mut Slot<VectorShape>) -> Verdict {
        if !slot.shape.dims.accepts(&self.entry.shape) {
            slot.refused = true;
            return self.wrong_shape(slot.shape.dims.to_string());
        }
        self.fill(slot)
    }

    fn fill<S>(&self, slot: &mut Slot<S>) -> Verdict {
        let Some(dtype) = dense_type(self.entry.dtype) else {
            slot.refused = true;
            return self.wrong_type("BF16 or F32");
        };
        if let Some(before) = slot.found {
            return Verdict::Twice(before.extent.file);
        }
        let elements = self.entry.bytes as usize / dtype.bytes();
        slot.found = Some(Stored { dtype, elements, extent: self.extent() });
        Verdict::Fine
    }

    /// `rest` is the name from the expert's number on.
    fn bind_expert(&self, rest: &str, slots: &mut LayerSlots, shapes: &[ExpertShape; 3]) -> Verdict {
        let target = numbered(rest).and_then(|(expert, suffix)| {
            let slot = layout::EXPERT_SUFFIXES.iter().position(|s| *s == suffix)?;
            Some((slot, &mut slots.experts.get_mut(expert)?[slot]))
        });
        let Some((slot, target)) = target else { return self.unexpected() };
        if *target != UNBOUND {
            return Verdict::Twice(target.file);
        }
        *target = REFUSED;
        if self.entry.dtype.name != "U8" {
            return self.wrong_type("U8");
        }
        let expected = expert_dims(shapes, slot);
        if self.entry.shape != expected {
            return self.wrong_shape(Dims(&expected).to_string());
        }
        *target = self.extent();
        Verdict::Fine
    }
}

fn dense_type(stored: StoredType) -> Option<DType> {
    match stored.name {
        "BF16" => Some(DType::Bf16),
        "F32" => Some(DType::F32),
        _ => None,
    }
}
