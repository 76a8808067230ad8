//! Sources that hold a whole model in memory: no reader, no cache, any block size, any order of
//! arrival. What the streaming sources must agree with.

use std::fs;
use std::ops::Range;
use std::path::PathBuf;

use k3_kernel::{Bf16Rows, Bf16Tiled, F32Rows, Kernels, Matrix, Mxfp4};
use k3_pipeline::model::config::ModelConfig;
use k3_pipeline::model::layout;
use k3_pipeline::model::tensors::{
    DType, ExpertExtents, Extent, MatrixExtent, MatrixKind, ModelTensors, VectorRef,
};
use k3_pipeline::schedule::{BlockId, BlockShape, Partition, PassMatrix, pass_matrices};
use k3_pipeline::source::{Block, Expert, ExpertRequest, ExpertSource, WeightSource};
use k3_pipeline::store::StoreError;
use k3_pipeline::units::{LayerIndex, TokenId};

/// All weight files of a model, whole.
#[derive(Debug)]
pub struct Files(Vec<Vec<u8>>);

impl Files {
    /// Reads every file of `tensors`.
    ///
    /// # Errors
    /// When one cannot be read.
    pub fn read(tensors: &ModelTensors) -> std::io::Result<Self> {
        tensors.files.iter().map(|file| fs::read(&file.path)).collect::<Result<_, _>>().map(Self)
    }

    /// The bytes of an extent.
    #[must_use]
    pub fn bytes(&self, extent: Extent) -> &[u8] {
        let first = extent.offset as usize;
        &self.0[usize::from(extent.file.0)][first..first + extent.bytes as usize]
    }

    /// The elements of a small vector.
    #[must_use]
    pub fn vector(&self, vector: &VectorRef) -> Vec<f32> {
        widen(self.bytes(vector.extent), vector.dtype)
    }
}

/// Elements of a dense tensor.
#[must_use]
pub fn widen(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::Bf16 => bytes
            .chunks_exact(2)
            .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
            .collect(),
        DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

/// The trunk in memory.
pub struct ResidentWeights {
    blocks: Vec<ResidentBlock>,
    first_of_head: usize,
    end: usize,
    next: usize,
    embed: Vec<f32>,
    hidden: usize,
}

struct ResidentBlock {
    shape: BlockShape,
    tiled: bool,
    bytes: Vec<u8>,
}

impl ResidentWeights {
    /// Cuts the trunk into blocks of `block_bytes`, tiled or as released.
    #[must_use]
    pub fn new(
        config: &ModelConfig,
        tensors: &ModelTensors,
        files: &Files,
        kernels: Kernels,
        (block_bytes, tiled): (u64, bool),
    ) -> Self {
        let partition = Partition::new(config, block_bytes);
        let extents = tensors.layers.iter().flat_map(|l| &l.matrices).chain([&tensors.head]);
        let mut blocks = Vec::new();
        for (matrix, whole) in pass_matrices(tensors).zip(extents) {
            for shape in partition.matrix_blocks(matrix) {
                let first = shape.tensor_offset() as usize;
                let stored = &files.bytes(whole.extent)[first..first + shape.stored_bytes as usize];
                let tiled = tiled && matrix.is_tiled();
                let bytes = if tiled { tile(kernels, stored, &shape) } else { stored.to_vec() };
                blocks.push(ResidentBlock { shape, tiled, bytes });
            }
        }
        let first_of_head = blocks.iter().position(|b| b.shape.id.layer.is_none()).unwrap_or(blocks.len());
        let MatrixExtent { extent, dtype, .. } = tensors.embed;
        let embed = widen(files.bytes(extent), dtype);
        Self { blocks, first_of_head, end: 0, next: 0, embed, hidden: config.hidden }
    }

    /// Drops the blocks before the first of `kind`: a pass begins there.
    pub fn begin_at(&mut self, kind: MatrixKind) {
        let first = self.blocks.iter().position(|b| b.shape.id.kind == kind).unwrap_or(0);
        self.blocks.drain(..first);
        self.first_of_head -= first;
    }

    /// Overwrites one element of a stored matrix, for tests of damage. Row-major blocks only.
    pub fn poke(&mut self, wanted: &PassMatrix, row: usize, bytes: &[u8]) {
        for block in &mut self.blocks {
            let BlockId { kind, layer, rows } = block.shape.id.clone();
            if kind == wanted.kind && layer == wanted.layer && rows.contains(&row) {
                let at = (row - rows.start) * wanted.row_bytes() as usize;
                block.bytes[at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
    }
}

fn tile(kernels: Kernels, stored: &[u8], shape: &BlockShape) -> Vec<u8> {
    let mut bytes = vec![0; shape.resident_bytes as usize];
    let rows = Bf16Rows::new(stored, shape.rows(), shape.cols).expect("bytes of the block");
    kernels.tile_rows(rows, &mut bytes);
    bytes
}

impl WeightSource for ResidentWeights {
    fn begin_pass(&mut self, head: bool) -> Result<(), StoreError> {
        self.next = 0;
        self.end = if head { self.blocks.len() } else { self.first_of_head };
        Ok(())
    }

    fn next_block(&mut self) -> Result<Block<'_>, StoreError> {
        assert!(self.next < self.end, "a block past the last of the pass");
        let ResidentBlock { shape, tiled, bytes } = &self.blocks[self.next];
        self.next += 1;
        let (rows, cols) = (shape.rows(), shape.cols);
        let matrix = match (shape.dtype, tiled) {
            (DType::F32, _) => F32Rows::new(bytes, rows, cols).map(Matrix::F32Rows),
            (DType::Bf16, false) => Bf16Rows::new(bytes, rows, cols).map(Matrix::Bf16Rows),
            (DType::Bf16, true) => Bf16Tiled::new(bytes, rows, cols).map(Matrix::Bf16Tiled),
        };
        Ok(Block { id: shape.id.clone(), matrix: matrix.expect("bytes of the block") })
    }

    fn embed(&mut self, ids: &[TokenId], out: &mut [f32]) -> Result<(), StoreError> {
        for (id, out) in ids.iter().zip(out.chunks_exact_mut(self.hidden)) {
            out.copy_from_slice(&self.embed[id.0 as usize * self.hidden..][..self.hidden]);
        }
        Ok(())
    }
}

/// In which order requested experts arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// As requested.
    InOrder,
    /// The last first.
    Reversed,
    /// From the middle.
    Rotated,
}

/// The routed experts in memory.
pub struct ResidentExperts {
    tables: Vec<Vec<[Vec<u8>; 6]>>,
    width: usize,
    io: usize,
    arrival: Arrival,
    layer: usize,
    wanted: Vec<ExpertRequest>,
    next: Range<usize>,
}

impl ResidentExperts {
    /// Copies every expert.
    #[must_use]
    pub fn new(config: &ModelConfig, tensors: &ModelTensors, files: &Files, arrival: Arrival) -> Self {
        let copy = |ExpertExtents(six): &ExpertExtents| six.map(|extent| files.bytes(extent).to_vec());
        let tables = tensors
            .layers
            .iter()
            .map(|layer| {
                let table = layer.experts.as_ref();
                let ids = (0..table.map_or(0, |t| t.len()) as u16).map(k3_pipeline::units::ExpertId);
                ids.filter_map(|id| table.and_then(|t| t.extents(id))).map(copy).collect()
            })
            .collect();
        let [w1, _, _] = layout::expert(config);
        Self {
            tables,
            width: w1.rows,
            io: w1.cols,
            arrival,
            layer: 0,
            wanted: Vec::with_capacity(config.moe.experts),
            next: 0..0,
        }
    }

    /// Overwrites a byte of an expert's tensor `slot`, for tests of damage.
    pub fn poke(&mut self, (layer, expert, slot): (usize, usize, usize), at: usize, byte: u8) {
        self.tables[layer][expert][slot][at] = byte;
    }
}

impl ExpertSource for ResidentExperts {
    fn request(&mut self, layer: LayerIndex, wanted: &[ExpertRequest]) -> Result<(), StoreError> {
        assert!(self.next.is_empty(), "the request before was not used up");
        self.layer = layer.index();
        self.wanted.clear();
        self.wanted.extend_from_slice(wanted);
        match self.arrival {
            Arrival::InOrder => {}
            Arrival::Reversed => self.wanted.reverse(),
            Arrival::Rotated => {
                let middle = self.wanted.len() / 2;
                self.wanted.rotate_left(middle);
            }
        }
        self.next = 0..wanted.len();
        Ok(())
    }

    fn next_expert(&mut self) -> Result<Option<Expert<'_>>, StoreError> {
        let Some(i) = self.next.next() else { return Ok(None) };
        let id = self.wanted[i].expert;
        let six = &self.tables[self.layer][id.index()];
        let matrix = |slot: usize, rows, cols| {
            Mxfp4::new(&six[slot], &six[slot + 1], rows, cols).expect("bytes of the expert")
        };
        Ok(Some(Expert {
            id,
            w1: matrix(0, self.width, self.io),
            w2: matrix(2, self.io, self.width),
            w3: matrix(4, self.width, self.io),
        }))
    }

    fn abandon(&mut self) -> Result<(), StoreError> {
        self.next = 0..0;
        Ok(())
    }
}

/// Where the golden models lie.
#[must_use]
pub fn golden_model(name: &str) -> PathBuf {
    k3_golden::repository_root().join("golden/models").join(name)
}
