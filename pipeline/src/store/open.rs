//! Opens everything a pass leases from, as the plan says: memory first, then files and readers, then the
//! resident weights.

use std::path::PathBuf;
use std::sync::Arc;

use k3_kernel::Kernels;

use super::blocks::{StoredBlock, checkpoint_blocks};
use super::disks::{Client, DiskOptions, Disks};
use super::embed::EmbedReader;
use super::error::StoreError;
use super::experts::{ExpertArenas, ExpertMemory, ExpertShape, expert_pieces};
use super::pack::{PackIdentity, open_pack};
use super::reader::BlockReader;
use super::request::{Pieces, span};
use super::stats::StoreCounters;
use super::trace::TraceWriter;
use super::trunk::{TrunkMemory, TrunkSource};
use super::vectors::{ResidentVectors, VECTOR_SLOTS, load_vectors};
use crate::memory::arena::{Arena, ArenaRegion, SlotBuf};
use crate::memory::policy::{self, CacheShape};
use crate::model::config::ModelConfig;
use crate::model::tensors::{Extent, FileId, ModelTensors, WeightFile};
use crate::plan::{Plan, read_slot_bytes};
use crate::schedule::Partition;
use crate::units::ExpertId;

/// What is not in the plan.
#[derive(Clone, Default)]
pub struct StoreOptions {
    /// A reader of one's own, throttled or failing; it runs under the thread engine.
    pub reader: Option<Arc<dyn BlockReader>>,
    /// Where to record the expert requests.
    pub trace: Option<PathBuf>,
}

/// Everything a pass leases from.
pub struct Store {
    /// The trunk and the head.
    pub trunk: TrunkSource,
    /// The routed experts.
    pub experts: ExpertArenas,
    /// The small vectors.
    pub vectors: ResidentVectors,
    /// What reading has cost so far.
    pub counters: Arc<StoreCounters>,
    /// The disks, for reports.
    pub disks: Arc<Disks>,
}

impl Store {
    /// Allocates, opens, loads. `progress` is told bytes of pinned blocks loaded and in all.
    ///
    /// # Errors
    /// Memory refused; a file that cannot be opened, changed or read; weights that are not what they
    /// should be.
    pub fn open(
        config: &ModelConfig,
        tensors: &Arc<ModelTensors>,
        plan: &Plan,
        kernels: Kernels,
        options: &StoreOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, StoreError> {
        let (blocks, files) = stored_blocks(config, tensors, plan)?;
        let is_pinned = |(number, b): (usize, &StoredBlock)| plan.trunk.is_pinned(number, b.shape.id.layer);
        let pinned: Vec<bool> = blocks.iter().enumerate().map(is_pinned).collect();
        let mut regions = Vec::new();
        let trunk_memory =
            TrunkMemory::allocate(&blocks, &pinned, plan.trunk.ring_slots, plan.trunk.slot_bytes)?;
        regions.extend(trunk_memory.regions.iter().cloned());
        let row_bytes = (tensors.embed.cols * tensors.embed.dtype.bytes()) as u64;
        let embed_slots = plan.pass_tokens_max.max(1);
        let embed_memory = arena("embedding rows", embed_slots, read_slot_bytes(row_bytes), &mut regions)?;
        let expert_memory = expert_memory(tensors, plan, &mut regions)?;

        let disks = Disks::open(
            &files,
            &DiskOptions {
                plan: &plan.reader,
                requests_max: requests_max(plan, &expert_memory),
                slot_bytes_max: slot_bytes_max(tensors, plan),
                regions: &regions,
                reader: options.reader.clone(),
            },
        )?;
        let vectors = load_vectors(config, tensors, &disks)?;
        let counters = Arc::new(StoreCounters::default());
        let embed = EmbedReader::new(&disks, embed_memory, tensors.embed.clone(), Arc::clone(&counters));
        let shape = ExpertShape { io_width: config.expert_io_width(), inner_width: config.moe.expert_width };
        let trace = options.trace.as_deref().map(TraceWriter::create).transpose()?;
        let buffers = expert_memory.cache.len() + expert_memory.staging.len();
        let experts = ExpertArenas::new(
            Client::new(&disks, buffers),
            Arc::clone(tensors),
            shape,
            policy::build(plan.experts.policy, &cache_shape(tensors, plan)),
            expert_memory,
            Arc::clone(&counters),
            trace,
        )?;
        let trunk_counters = Arc::clone(&counters);
        let trunk = TrunkSource::open(
            &disks,
            embed,
            (blocks, &pinned),
            trunk_memory,
            kernels,
            trunk_counters,
            progress,
        )?;
        Ok(Self { trunk, experts, vectors, counters, disks })
    }
}

/// The blocks of a pass and the files to open: the checkpoint's, and the pack's where there is one.
fn stored_blocks(
    config: &ModelConfig,
    tensors: &ModelTensors,
    plan: &Plan,
) -> Result<(Vec<StoredBlock>, Vec<WeightFile>), StoreError> {
    let block_bytes = plan.trunk.block_bytes;
    let blocks = checkpoint_blocks(tensors, Partition::new(config, block_bytes));
    let mut files = tensors.files.clone();
    let Some(path) = &plan.trunk.pack else { return Ok((blocks, files)) };
    let file = FileId(u16::try_from(files.len()).unwrap_or(u16::MAX));
    let identity = PackIdentity { fingerprint: tensors.fingerprint, block_bytes };
    let (pack, blocks) =
        open_pack(path, identity, &blocks, file).map_err(|e| StoreError::Pack(Box::new(e)))?;
    files.push(pack);
    Ok((blocks, files))
}

fn arena(
    purpose: &'static str,
    slots: usize,
    slot_bytes: u64,
    regions: &mut Vec<ArenaRegion>,
) -> Result<Vec<SlotBuf>, StoreError> {
    let arena = Arena::new(purpose, slots, usize::try_from(slot_bytes).unwrap_or(usize::MAX))?;
    regions.extend(arena.region());
    Ok(arena.into_slots())
}

/// The expert slots, checked against every expert of the model.
fn expert_memory(
    tensors: &ModelTensors,
    plan: &Plan,
    regions: &mut Vec<ArenaRegion>,
) -> Result<ExpertMemory, StoreError> {
    let slot_bytes = plan.experts.slot_bytes;
    for table in tensors.layers.iter().filter_map(|l| l.experts.as_ref()) {
        for extents in (0..table.len()).filter_map(|e| table.extents(ExpertId(e as u16))) {
            let expected = expert_pieces(extents).slot_bytes() as u64;
            if expected > slot_bytes {
                return Err(StoreError::SlotTooSmall { purpose: "an expert", expected, got: slot_bytes });
            }
        }
    }
    let cached = plan.experts.arena_slots.iter().sum();
    let cache = arena("expert cache", cached, slot_bytes, regions)?;
    let staging = arena("expert staging", plan.experts.staging_slots, slot_bytes, regions)?;
    Ok(ExpertMemory { cache, staging })
}

fn cache_shape(tensors: &ModelTensors, plan: &Plan) -> CacheShape {
    let layers = tensors.layers.len();
    let slots = (0..layers).map(|l| plan.experts.arena_slots.get(l).copied().unwrap_or(0)).collect();
    let experts = tensors.layers.iter().map(|l| l.experts.as_ref().map_or(0, |t| t.len())).collect();
    CacheShape { slots, experts }
}

/// Every slot can be in a read at once.
fn requests_max(plan: &Plan, experts: &ExpertMemory) -> usize {
    let embed = plan.pass_tokens_max.max(1);
    plan.trunk.ring_slots + experts.cache.len() + experts.staging.len() + embed + VECTOR_SLOTS
}

fn slot_bytes_max(tensors: &ModelTensors, plan: &Plan) -> usize {
    let vectors = tensors.layers.iter().flat_map(|l| &l.vectors).chain(&tensors.vectors);
    let vectors = vectors.map(|v| span(&v.extent)).max().unwrap_or(0);
    let embed = Pieces::one(Extent { bytes: plan.traffic.embed_bytes, ..tensors.embed.extent }).slot_bytes();
    let planned = plan.trunk.slot_bytes.max(plan.experts.slot_bytes);
    usize::try_from(planned).unwrap_or(usize::MAX).max(vectors).max(embed)
}
