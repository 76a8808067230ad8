//! A small model on disk for the tests of this folder: every byte known, nothing aligned.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use k3_kernel::hn::hn_decode;
use k3_kernel::weights::tiled_bytes;
use k3_kernel::{Bf16Tiled, Kernels, Matrix};

use super::{Store, StoreError, StoreOptions};
use crate::model::config::{Attention, FeedForward, KdaConfig, LayerKind, MlaConfig, ModelConfig, MoeConfig};
use crate::model::tensors::{
    DType, ExpertExtents, ExpertTable, Extent, FileId, Fingerprint, LayerTensors, MatrixExtent, MatrixKind,
    MatrixRef, ModelTensors, VectorKind, VectorRef, VisionTensors, WeightFile,
};
use crate::plan::{
    BudgetSource, CachePolicy, ComputePlan, DirectMode, ExpertPlan, IoEngine, Ledger, ModelSizes, Plan,
    ReaderPlan, Traffic, TrunkPlan, read_slot_bytes,
};
use crate::source::{ExpertRequest, ExpertSource, WeightSource};
use crate::units::{ExpertId, LayerIndex, TokenId};

pub(super) const LAYERS: u16 = 4;
pub(super) const EXPERTS: u16 = 12;
pub(super) const WIDTH: usize = 96;
pub(super) const VOCAB: usize = 50;

/// One file being written, and what lies in it.
struct Writer {
    id: u16,
    bytes: Vec<u8>,
    state: u64,
    /// Bits that may be set.
    mask: u8,
}

impl Writer {
    /// Random finite numbers in any format, with few exponents but for one in a hundred, as in trained
    /// weights.
    fn push(&mut self, bytes: usize) -> Extent {
        let offset = self.bytes.len() as u64;
        for i in 0..bytes {
            self.state =
                self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let random = (self.state >> 33) as u8 & 0x3f;
            let frequent = i % 2 == 1 && !(self.state >> 45).is_multiple_of(100);
            self.bytes.push(if frequent { 0x38 | random & 7 } else { random } & self.mask);
        }
        Extent { file: FileId(self.id), offset, bytes: bytes as u64 }
    }
}

/// The model, its files in a directory that goes with it.
pub(super) struct Fixture {
    pub(super) dir: tempfile::TempDir,
    pub(super) config: ModelConfig,
    pub(super) tensors: Arc<ModelTensors>,
    /// Content of each file.
    pub(super) content: Vec<Vec<u8>>,
}

fn matrix(
    w: &mut Writer,
    kind: MatrixKind,
    layer: Option<LayerIndex>,
    rows: usize,
    dtype: DType,
) -> MatrixRef {
    let extent = w.push(rows * WIDTH * dtype.bytes());
    MatrixRef { kind, layer, rows, cols: WIDTH, dtype, extent }
}

fn expert(w: &mut Writer, contiguous: bool) -> ExpertExtents {
    let (packed, scales) = (WIDTH * 64 / 2, WIDTH * 64 / 32);
    ExpertExtents([packed, scales, packed, scales, packed, scales].map(|bytes| {
        if !contiguous {
            w.push(7);
        }
        w.push(bytes)
    }))
}

fn layer(w: &mut Writer, index: u16, contiguous: bool) -> LayerTensors {
    let layer = Some(LayerIndex(index));
    w.push(11 + usize::from(index));
    let dense = index == 0;
    let mut matrices = vec![
        matrix(w, MatrixKind::KdaQ, layer, 170, DType::Bf16),
        matrix(w, MatrixKind::MlaKvB, layer, 72, DType::Bf16),
        matrix(w, MatrixKind::KdaBeta, layer, 6, DType::F32),
    ];
    if !dense {
        matrices.push(matrix(w, MatrixKind::Router, layer, EXPERTS.into(), DType::Bf16));
    }
    let vector = |w: &mut Writer, kind, len: usize, dtype: DType| {
        let extent = w.push(len * dtype.bytes());
        VectorRef { kind, layer, len, dtype, extent }
    };
    let vectors = vec![
        vector(w, VectorKind::InputNorm, WIDTH, DType::Bf16),
        vector(w, VectorKind::ALog, 9, DType::F32),
    ];
    let experts = (!dense).then(|| ExpertTable::new((0..EXPERTS).map(|_| expert(w, contiguous)).collect()));
    LayerTensors { matrices, vectors, experts }
}

impl Fixture {
    pub(super) fn new(contiguous_experts: bool) -> Self {
        Self::with_bytes(contiguous_experts, 0x3f)
    }

    /// All weights zero.
    pub(super) fn zeroed() -> Self {
        Self::with_bytes(true, 0)
    }

    fn with_bytes(contiguous_experts: bool, mask: u8) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut writers: Vec<Writer> =
            (0..3).map(|id| Writer { id, bytes: Vec::new(), state: 7 + u64::from(id), mask }).collect();
        let layers =
            (0..LAYERS).map(|l| layer(&mut writers[usize::from(l % 2)], l, contiguous_experts)).collect();
        let w = &mut writers[2];
        w.push(3);
        let embed = w.push(VOCAB * WIDTH * 2);
        let head = matrix(w, MatrixKind::Head, None, VOCAB, DType::Bf16);
        let extent = w.push(WIDTH * 2);
        let final_norm =
            VectorRef { kind: VectorKind::FinalNorm, layer: None, len: WIDTH, dtype: DType::Bf16, extent };
        let content: Vec<Vec<u8>> = writers.into_iter().map(|w| w.bytes).collect();
        let files = content
            .iter()
            .enumerate()
            .map(|(i, bytes)| {
                let path: PathBuf = dir.path().join(format!("shard-{i}"));
                File::create(&path).unwrap().write_all(bytes).unwrap();
                WeightFile { path, bytes: bytes.len() as u64 }
            })
            .collect();
        let embed = MatrixExtent { rows: VOCAB, cols: WIDTH, dtype: DType::Bf16, extent: embed };
        let tensors = Arc::new(ModelTensors {
            files,
            embed,
            layers,
            head,
            vectors: vec![final_norm],
            vision: VisionTensors::default(),
            fingerprint: Fingerprint(1),
        });
        Self { dir, config: config(), tensors, content }
    }

    pub(super) fn bytes(&self, e: &Extent) -> &[u8] {
        &self.content[usize::from(e.file.0)][e.offset as usize..(e.offset + e.bytes) as usize]
    }

    pub(super) fn path(&self, file: usize) -> &std::path::Path {
        &self.tensors.files[file].path
    }

    pub(super) fn open(&self, plan: &Plan) -> Result<Store, StoreError> {
        self.open_with(plan, &StoreOptions::default())
    }

    pub(super) fn open_with(&self, plan: &Plan, options: &StoreOptions) -> Result<Store, StoreError> {
        Store::open(&self.config, &self.tensors, plan, Kernels::scalar(), options, &mut |_, _| {})
    }

    /// Walks one pass and compares every block with the file; the number of blocks seen.
    pub(super) fn walk(&self, store: &mut Store, head: bool, stop_after: usize) -> Result<usize, StoreError> {
        store.trunk.begin_pass(head)?;
        let all: Vec<&MatrixRef> = self
            .tensors
            .layers
            .iter()
            .flat_map(|l| &l.matrices)
            .chain(std::iter::once(&self.tensors.head))
            .collect();
        let matrices = &all[..all.len() - usize::from(!head)];
        let mut seen = 0;
        for m in matrices {
            let mut row = 0;
            while row < m.rows {
                if seen == stop_after {
                    return Ok(seen);
                }
                let block = store.trunk.next_block()?;
                assert_eq!((block.id.kind, block.id.layer, block.id.rows.start), (m.kind, m.layer, row));
                let bytes = &self.bytes(&m.extent)[row * WIDTH * m.dtype.bytes()..];
                assert_same(&block.matrix, &bytes[..block.id.rows.len() * WIDTH * m.dtype.bytes()]);
                row = block.id.rows.end;
                seen += 1;
            }
        }
        assert!(matches!(store.trunk.next_block(), Err(StoreError::PassEnded { .. })));
        Ok(seen)
    }

    /// Requests experts and compares each with the file; their numbers in order of arrival.
    pub(super) fn ask(&self, store: &mut Store, layer: u16, wanted: &[u16]) -> Result<Vec<u16>, StoreError> {
        let requests: Vec<ExpertRequest> =
            (0u8..).zip(wanted).map(|(rank, &e)| ExpertRequest { expert: ExpertId(e), rank }).collect();
        store.experts.request(LayerIndex(layer), &requests)?;
        let mut got = Vec::new();
        while let Some(e) = store.experts.next_expert()? {
            let table = self.tensors.layers[usize::from(layer)].experts.as_ref().unwrap();
            let x = table.extents(e.id).unwrap().0;
            for (n, w) in [e.w1, e.w2, e.w3].into_iter().enumerate() {
                let packed: Vec<u8> = (0..w.rows()).flat_map(|r| w.packed_row(r).to_vec()).collect();
                let scales: Vec<u8> = (0..w.rows()).flat_map(|r| w.scale_row(r).to_vec()).collect();
                assert!(packed == self.bytes(&x[2 * n]), "layer {layer} expert {} w{}", e.id, n + 1);
                assert!(scales == self.bytes(&x[2 * n + 1]), "layer {layer} expert {} w{}", e.id, n + 1);
            }
            got.push(e.id.0);
        }
        Ok(got)
    }

    /// Compares an embedding lookup with the file.
    pub(super) fn embed(&self, store: &mut Store, ids: &[u32]) -> Result<(), StoreError> {
        let ids: Vec<TokenId> = ids.iter().map(|&id| TokenId(id)).collect();
        let mut out = vec![f32::NAN; ids.len() * WIDTH];
        store.trunk.embed(&ids, &mut out)?;
        for (id, row) in ids.iter().zip(out.chunks(WIDTH)) {
            let bytes = &self.bytes(&self.tensors.embed.extent)[id.0 as usize * WIDTH * 2..];
            for (v, b) in row.iter().zip(bytes.chunks(2)) {
                assert_eq!(v.to_bits() >> 16, u32::from(u16::from_le_bytes([b[0], b[1]])));
            }
        }
        Ok(())
    }
}

fn assert_same(matrix: &Matrix<'_>, bytes: &[u8]) {
    match matrix {
        Matrix::Bf16Rows(w) => {
            assert!((0..w.rows()).all(|r| w.row(r) == &bytes[r * WIDTH * 2..][..WIDTH * 2]));
        }
        Matrix::F32Rows(w) => {
            assert!((0..w.rows()).all(|r| w.row(r) == &bytes[r * WIDTH * 4..][..WIDTH * 4]));
        }
        Matrix::Bf16Tiled(w) => {
            for r in 0..w.rows() {
                let tile = w.tile(r / 16);
                for c in 0..WIDTH {
                    assert_eq!(&tile[c][r % 16 * 2..][..2], &bytes[(r * WIDTH + c) * 2..][..2]);
                }
            }
        }
        Matrix::Hn(w) => {
            let mut tiled = vec![0; tiled_bytes(w.rows(), WIDTH).unwrap()];
            hn_decode(w, &mut tiled);
            assert_same(&Matrix::Bf16Tiled(Bf16Tiled::new(&tiled, w.rows(), WIDTH).unwrap()), bytes);
        }
    }
}

fn config() -> ModelConfig {
    let layer = |dense| LayerKind {
        attention: Attention::Kda,
        feed_forward: if dense { FeedForward::Dense } else { FeedForward::Moe },
    };
    ModelConfig {
        hidden: WIDTH,
        vocab: VOCAB,
        rms_eps: 1e-5,
        kda: KdaConfig { heads: 6, head_dim: 16, conv_kernel: 4, lower_bound: None, full_rank_gate: true },
        mla: MlaConfig {
            heads: 3,
            q_rank: None,
            kv_rank: 8,
            nope_dim: 16,
            rope_dim: 8,
            v_dim: 8,
            output_gate: false,
        },
        moe: MoeConfig {
            experts: EXPERTS.into(),
            experts_per_token: 4,
            shared_experts: 1,
            latent: None,
            expert_width: 64,
            latent_norm: false,
            renormalize: true,
            scaling: 1.0,
            groups: 1,
            groups_kept: 1,
        },
        dense_width: 64,
        situ_beta: 4.0,
        situ_linear_beta: 25.0,
        attn_res_block: None,
        layers: (0..LAYERS).map(|l| layer(l == 0)).collect(),
        bos: TokenId(0),
        eos: TokenId(1),
        pad: TokenId(2),
    }
}

/// A plan with blocks of 8 KiB, one ring slot, nothing pinned, no cache, one staging slot.
pub(super) fn plan() -> Plan {
    Plan {
        preset: "test".to_owned(),
        context_tokens: 16,
        sequences_max: 1,
        snapshots_max: 0,
        pass_tokens_max: 4,
        draft_tokens_max: 0,
        trunk: TrunkPlan {
            block_bytes: 8192,
            ring_slots: 1,
            slot_bytes: read_slot_bytes(16384),
            pinned_layers: Vec::new(),
            dealt_blocks: Vec::new(),
            pinned_head: false,
            pinned_bytes: 0,
            pack: None,
        },
        experts: ExpertPlan {
            slot_bytes: read_slot_bytes(3 * WIDTH as u64 * 64 * 17 / 32) + 5 * read_slot_bytes(0),
            arena_slots: vec![0; LAYERS.into()],
            staging_slots: 1,
            policy: CachePolicy::LayerRank,
        },
        reader: ReaderPlan { engine: IoEngine::Pread, direct: DirectMode::Auto, depth: 3 },
        compute: ComputePlan { threads: 1, pin_threads: false, isa: None },
        ledger: Ledger { lines: Vec::new(), budget_bytes: 0, budget_from: BudgetSource::Preset },
        traffic: Traffic {
            trunk_bytes: 0,
            head_bytes: 0,
            expert_bytes_max: 0,
            embed_bytes: WIDTH as u64 * 2,
            touched_bytes: 0,
            touched_trunk_bytes: 0,
        },
        model: ModelSizes {
            layers: 0,
            expert_bytes: 0,
            experts_bytes: 0,
            trunk_bytes: 0,
            layer_bytes_max: 0,
            embed_bytes: 0,
            head_bytes: 0,
            state_bytes: 0,
            history_bytes: 0,
            latent_bytes_per_token: 0,
        },
    }
}
