//! The blocks of a pass and where each lies, in the order in which a pass needs them.

use k3_kernel::{Bf16Rows, Bf16Tiled, F32Rows, HnTiled, Matrix, ShapeError};

use super::error::StoreError;
use super::pack::BlockChecksum;
use crate::model::layout::matrix_name;
use crate::model::tensors::{DType, Extent, ModelTensors};
use crate::schedule::{BlockShape, Partition, PassMatrix};

/// How the bytes of a block code its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// bf16, row-major, as released.
    Bf16Rows,
    /// f32, row-major, as released.
    F32Rows,
    /// bf16 in tiles of 16 rows.
    Bf16Tiled,
    /// The lossless "hn" code of bf16 tiles.
    Hn,
}

/// One block as it lies on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// Which rows of which matrix, and their sizes.
    pub shape: BlockShape,
    /// How its bytes code the rows.
    pub coding: Coding,
    /// Where they lie.
    pub extent: Extent,
    /// What they must hash to, in a pack.
    pub checksum: Option<BlockChecksum>,
}

impl StoredBlock {
    /// The coding that the block has when it is kept in memory.
    #[must_use]
    pub fn resident_coding(&self) -> Coding {
        if self.coding == Coding::Bf16Rows && self.is_tiled() { Coding::Bf16Tiled } else { self.coding }
    }

    /// Bytes that the block has when it is kept in memory.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        if self.coding == Coding::Bf16Rows { self.shape.resident_bytes } else { self.extent.bytes }
    }

    fn is_tiled(&self) -> bool {
        let id = &self.shape.id;
        let (kind, layer, rows) = (id.kind, id.layer, id.rows.len());
        PassMatrix { kind, layer, rows, cols: self.shape.cols, dtype: self.shape.dtype }.is_tiled()
    }

    /// The rows as a matrix.
    ///
    /// # Errors
    /// When the bytes are no such matrix.
    pub fn matrix<'a>(&self, coding: Coding, bytes: &'a [u8]) -> Result<Matrix<'a>, StoreError> {
        let (rows, cols) = (self.shape.rows(), self.shape.cols);
        let matrix = match coding {
            Coding::Bf16Rows => Bf16Rows::new(bytes, rows, cols).map(Matrix::Bf16Rows),
            Coding::F32Rows => F32Rows::new(bytes, rows, cols).map(Matrix::F32Rows),
            Coding::Bf16Tiled => Bf16Tiled::new(bytes, rows, cols).map(Matrix::Bf16Tiled),
            Coding::Hn => HnTiled::new(bytes, rows, cols).map(Matrix::Hn),
        };
        matrix.map_err(|e| self.malformed(&e))
    }

    pub(crate) fn malformed(&self, error: &ShapeError) -> StoreError {
        let id = &self.shape.id;
        let name = matrix_name(id.layer, id.kind);
        let what = format!("{name} rows {}..{}", id.rows.start, id.rows.end);
        StoreError::Malformed { what, detail: error.to_string() }
    }
}

/// The blocks of a checkpoint without a pack.
#[must_use]
pub fn checkpoint_blocks(tensors: &ModelTensors, partition: Partition) -> Vec<StoredBlock> {
    let matrices = tensors.layers.iter().flat_map(|l| &l.matrices).chain(std::iter::once(&tensors.head));
    matrices
        .flat_map(|m| {
            let (extent, coding) = match m.dtype {
                DType::Bf16 => (m.extent, Coding::Bf16Rows),
                DType::F32 => (m.extent, Coding::F32Rows),
            };
            partition.matrix_blocks(PassMatrix::from(m)).map(move |shape| StoredBlock {
                coding,
                checksum: None,
                extent: Extent {
                    file: extent.file,
                    offset: extent.offset + shape.tensor_offset(),
                    bytes: shape.stored_bytes,
                },
                shape,
            })
        })
        .collect()
}
