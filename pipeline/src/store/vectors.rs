//! The small vectors: norms, convolution taps, decay parameters, router biases, resident as f32.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::disks::{Client, Disks};
use super::error::StoreError;
use super::gather::read_each;
use super::request::{Class, span};
use crate::memory::arena::Arena;
use crate::model::config::ModelConfig;
use crate::model::layout::vector_name;
use crate::model::tensors::{DType, ModelTensors, VectorKind, VectorRef};
use crate::units::LayerIndex;

/// Vectors read at once.
pub(crate) const VECTOR_SLOTS: usize = 8;

/// All small vectors of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResidentVectors {
    values: Vec<f32>,
    places: HashMap<(Option<LayerIndex>, VectorKind), Range<usize>>,
}

impl ResidentVectors {
    /// A vector of a layer, or of the model itself; `None` where the model has no such vector.
    #[must_use]
    pub fn get(&self, layer: Option<LayerIndex>, kind: VectorKind) -> Option<&[f32]> {
        self.places.get(&(layer, kind)).map(|place| &self.values[place.clone()])
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.values.len() * size_of::<f32>()
    }
}

/// Reads every small vector. Of `A_log` only the first H values are kept: the release pads it.
///
/// # Errors
/// A failed read; a value that is not finite, by name.
pub fn load_vectors(
    config: &ModelConfig,
    tensors: &ModelTensors,
    disks: &Arc<Disks>,
) -> Result<ResidentVectors, StoreError> {
    let all: Vec<&VectorRef> =
        tensors.layers.iter().flat_map(|l| &l.vectors).chain(&tensors.vectors).collect();
    let mut places = HashMap::with_capacity(all.len());
    let mut ranges = Vec::with_capacity(all.len());
    let mut end = 0;
    for v in &all {
        let len = if v.kind == VectorKind::ALog { v.len.min(config.kda.heads) } else { v.len };
        places.insert((v.layer, v.kind), end..end + len);
        ranges.push(end..end + len);
        end += len;
    }
    let mut values = vec![0.0; end];
    let slot_bytes = all.iter().map(|v| span(&v.extent)).max().unwrap_or(0);
    let mut slots = Arena::new("small vectors", VECTOR_SLOTS, slot_bytes)?.into_slots();
    let mut client = Client::new(disks, VECTOR_SLOTS);
    let extents = (all.len(), |i: usize| (all[i].extent, None));
    read_each(&mut client, Class::Demand, &mut slots, extents, |i, bytes| {
        let out = &mut values[ranges[i].clone()];
        to_f32(all[i].dtype, bytes, out);
        match out.iter().position(|v| !v.is_finite()) {
            None => Ok(()),
            Some(index) => {
                let tensor = vector_name(all[i].layer, all[i].kind);
                Err(StoreError::NonFinite { tensor, index, value: out[index] })
            }
        }
    })?;
    Ok(ResidentVectors { values, places })
}

/// The first `out.len()` elements as f32.
pub(crate) fn to_f32(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::Bf16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
        DType::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
    }
}
