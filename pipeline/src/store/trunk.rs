//! The trunk and the head: pinned blocks from memory, the rest through a ring of slots that is filled
//! ahead in the order of the schedule, across the end of one pass into the next.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use k3_kernel::{Bf16Rows, Kernels};

use super::blocks::{Coding, StoredBlock};
use super::disks::{Client, Disks};
use super::embed::EmbedReader;
use super::error::StoreError;
use super::gather::read_each;
use super::request::{Class, Completion, Pieces, Request};
use super::stats::{StoreCounters, add, add_time};
use crate::memory::arena::{Arena, ArenaRegion, SLOT_ALIGN, SlotBuf};
use crate::source::{Block, WeightSource};
use crate::units::TokenId;

/// Memory of the trunk, allocated before the readers start so that they can register it.
pub(crate) struct TrunkMemory {
    pub(crate) ring: Vec<SlotBuf>,
    /// One slot for each pinned block, in order of the pass.
    pub(crate) pinned: Vec<SlotBuf>,
    /// All of those.
    pinned_region: Option<ArenaRegion>,
    pub(crate) regions: Vec<ArenaRegion>,
}

impl TrunkMemory {
    /// `pinned`: for each block of the pass whether it stays in memory.
    pub(crate) fn allocate(
        blocks: &[StoredBlock],
        pinned: &[bool],
        ring_slots: usize,
        slot_bytes: u64,
    ) -> Result<Self, StoreError> {
        if ring_slots == 0 {
            return Err(StoreError::NoSlot { purpose: "trunk blocks" });
        }
        for b in blocks {
            let expected = Pieces::one(b.extent).slot_bytes() as u64;
            if expected > slot_bytes {
                return Err(StoreError::SlotTooSmall { purpose: "a trunk block", expected, got: slot_bytes });
            }
        }
        let ring = Arena::new("ring slots", ring_slots, slot_bytes as usize)?;
        let region = ring.region();
        let sizes = blocks.iter().zip(pinned).filter(|&(_, &pinned)| pinned);
        let sizes: Vec<usize> =
            sizes.map(|(b, _)| (b.resident_bytes() as usize).next_multiple_of(SLOT_ALIGN)).collect();
        let arena = Arena::new("pinned blocks", 1, sizes.iter().sum())?;
        let pinned_region = arena.region();
        let mut rest = arena.into_slots().pop();
        let mut pinned = Vec::with_capacity(sizes.len());
        for bytes in sizes {
            if let Some(mut slot) = rest.take() {
                rest = Some(slot.split_off(bytes));
                pinned.push(slot);
            }
        }
        Ok(Self { ring: ring.into_slots(), pinned, pinned_region, regions: region.into_iter().collect() })
    }
}

/// A block in memory.
struct Resident {
    coding: Coding,
    bytes: usize,
    slot: SlotBuf,
}

/// A slot of the ring, by number of the streamed block it is for.
enum RingEntry {
    Empty,
    Arrived(SlotBuf),
    Failed(StoreError, SlotBuf),
}

/// How far the reads are.
#[derive(Clone, Copy, Debug)]
struct ReadAhead {
    /// Streamed blocks issued and used since the last restart.
    issued: u64,
    used: u64,
    /// Next streamed block to issue.
    next: usize,
    /// Whether that belongs to the pass after the current one.
    wrapped: bool,
}

impl ReadAhead {
    /// Before the first pass: what is read is the next pass's.
    const START: Self = Self { issued: 0, used: 0, next: 0, wrapped: true };
}

/// The trunk and the head as a pass leases them.
pub struct TrunkSource {
    client: Client,
    embed: EmbedReader,
    blocks: Vec<StoredBlock>,
    /// By block: in memory, or `None` for a streamed one.
    resident: Vec<Option<Resident>>,
    /// Streamed blocks in order of the pass; those of the head from `streamed_head` on.
    streamed: Vec<usize>,
    streamed_head: usize,
    /// First block of the head.
    head: usize,
    ring: Vec<RingEntry>,
    free: Vec<SlotBuf>,
    ahead: ReadAhead,
    /// Next block of the pass, and the end of the pass.
    cursor: usize,
    end: usize,
    failed: bool,
    lease: Option<SlotBuf>,
    counters: Arc<StoreCounters>,
}

impl TrunkSource {
    /// Loads the pinned blocks and starts reading ahead. `progress` is told bytes loaded and bytes in all.
    ///
    /// # Errors
    /// A failed read; bytes that are no such matrix.
    pub(crate) fn open(
        disks: &Arc<Disks>,
        embed: EmbedReader,
        (blocks, pinned): (Vec<StoredBlock>, &[bool]),
        memory: TrunkMemory,
        kernels: Kernels,
        counters: Arc<StoreCounters>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, StoreError> {
        let mut free = memory.ring;
        let mut client = Client::new(disks, free.len());
        // The system takes as long to hand out pages as loading takes otherwise.
        let loaded = AtomicBool::new(false);
        let resident = thread::scope(|scope| {
            if let Some(region) = &memory.pinned_region {
                // Without the thread it only takes longer.
                let _ = thread::Builder::new()
                    .name("k3-populate".to_owned())
                    .spawn_scoped(scope, || region.populate(&loaded));
            }
            let resident =
                load_pinned(&mut client, &mut free, (&blocks, pinned), memory.pinned, kernels, progress);
            loaded.store(true, Ordering::Relaxed);
            resident
        })?;
        let head = blocks.iter().position(|b| b.shape.id.layer.is_none()).unwrap_or(blocks.len());
        let streamed: Vec<usize> = (0..blocks.len()).filter(|&b| resident[b].is_none()).collect();
        let streamed_head = streamed.partition_point(|&b| b < head);
        let mut source = Self {
            client,
            embed,
            ring: free.iter().map(|_| RingEntry::Empty).collect(),
            free,
            resident,
            streamed,
            streamed_head,
            head,
            blocks,
            ahead: ReadAhead::START,
            cursor: 0,
            end: 0,
            failed: false,
            lease: None,
            counters,
        };
        source.read_ahead()?;
        Ok(source)
    }

    /// Streamed blocks of the current pass.
    fn pass_streamed(&self) -> usize {
        if self.end > self.head { self.streamed.len() } else { self.streamed_head }
    }

    /// Issues reads while there are free slots: to the end of the pass, then the layers of the next one.
    /// Whether that will want the head is not known yet.
    fn read_ahead(&mut self) -> Result<(), StoreError> {
        while let Some(slot) = self.free.pop() {
            if !self.ahead.wrapped && self.ahead.next >= self.pass_streamed() {
                self.ahead.wrapped = true;
                self.ahead.next = 0;
            }
            if self.ahead.wrapped && self.ahead.next >= self.streamed_head {
                self.free.push(slot);
                break;
            }
            let block = &self.blocks[self.streamed[self.ahead.next]];
            let (pieces, checksum) = (Pieces::one(block.extent), block.checksum);
            let request = Request { class: Class::Trunk, pieces, checksum, slot, tag: self.ahead.issued };
            if let Err((slot, error)) = self.client.submit(request) {
                self.free.push(slot);
                return Err(error);
            }
            self.ahead.issued += 1;
            self.ahead.next += 1;
        }
        Ok(())
    }

    fn entry(&self, number: u64) -> usize {
        (number % self.ring.len() as u64) as usize
    }

    fn arrived(&mut self, done: Completion) {
        let entry = self.entry(done.tag);
        self.ring[entry] = match done.result {
            Ok(()) => RingEntry::Arrived(done.slot),
            // The slot stays with its number: a later block must not come in under it.
            Err(error) => RingEntry::Failed(error, done.slot),
        };
    }

    /// The slot of the next streamed block, waiting for its read.
    fn next_streamed(&mut self) -> Result<SlotBuf, StoreError> {
        let entry = self.entry(self.ahead.used);
        while let Some(done) = self.client.poll() {
            self.arrived(done);
        }
        if matches!(self.ring[entry], RingEntry::Empty) {
            let start = Instant::now();
            while matches!(self.ring[entry], RingEntry::Empty) {
                let stopped = StoreError::NoSlot { purpose: "a trunk block that was never read" };
                let done = self.client.wait().ok_or(stopped)?;
                self.arrived(done);
            }
            add_time(&self.counters.trunk_wait_ns, start.elapsed());
            add(&self.counters.blocks_waited, 1);
        } else {
            add(&self.counters.blocks_ready, 1);
        }
        self.ahead.used += 1;
        match std::mem::replace(&mut self.ring[entry], RingEntry::Empty) {
            RingEntry::Arrived(slot) => Ok(slot),
            RingEntry::Failed(error, slot) => {
                self.free.push(slot);
                Err(error)
            }
            RingEntry::Empty => Err(StoreError::Cancelled),
        }
    }

    /// Takes every slot back and forgets how far the reads were.
    fn restart(&mut self) {
        self.client.cancel();
        while let Some(done) = self.client.wait() {
            self.free.push(done.slot);
        }
        for entry in &mut self.ring {
            match std::mem::replace(entry, RingEntry::Empty) {
                RingEntry::Arrived(slot) | RingEntry::Failed(_, slot) => self.free.push(slot),
                RingEntry::Empty => {}
            }
        }
        self.ahead = ReadAhead::START;
        self.failed = false;
    }

    fn advance(&mut self) -> Result<usize, StoreError> {
        self.free.extend(self.lease.take());
        if self.cursor >= self.end || self.failed {
            return Err(StoreError::PassEnded { blocks: self.end });
        }
        let block = self.cursor;
        let ready = self.read_ahead().and_then(|()| match self.resident[block] {
            Some(_) => Ok(None),
            None => self.next_streamed().map(Some),
        });
        self.lease = ready.inspect_err(|_| self.failed = true)?;
        if self.lease.is_some() {
            add(&self.counters.trunk_bytes, self.blocks[block].extent.bytes);
        } else {
            add(&self.counters.blocks_pinned, 1);
        }
        self.cursor += 1;
        Ok(block)
    }
}

impl WeightSource for TrunkSource {
    fn begin_pass(&mut self, head: bool) -> Result<(), StoreError> {
        self.client.disks().files().check_in_place()?;
        self.free.extend(self.lease.take());
        // What was read ahead is what the new pass begins with, when the last one went to its end.
        if self.failed || self.cursor != self.end {
            self.restart();
        }
        if !self.ahead.wrapped {
            self.ahead.next = 0;
        }
        self.ahead.wrapped = false;
        self.cursor = 0;
        self.end = if head { self.blocks.len() } else { self.head };
        self.read_ahead().inspect_err(|_| self.failed = true)
    }

    fn next_block(&mut self) -> Result<Block<'_>, StoreError> {
        let block = self.advance()?;
        let stored = &self.blocks[block];
        let matrix = match (&self.resident[block], &self.lease) {
            (Some(r), _) => stored.matrix(r.coding, &r.slot[..r.bytes])?,
            (None, Some(slot)) => {
                let data = Pieces::one(stored.extent).as_slice()[0].data();
                stored.matrix(stored.coding, &slot[data])?
            }
            (None, None) => return Err(StoreError::Cancelled),
        };
        Ok(Block { id: stored.shape.id.clone(), matrix })
    }

    fn embed(&mut self, ids: &[TokenId], out: &mut [f32]) -> Result<(), StoreError> {
        self.embed.read(ids, out)
    }
}

/// Reads the pinned blocks through the ring's slots and puts them into the form the kernels like best.
fn load_pinned(
    client: &mut Client,
    ring: &mut Vec<SlotBuf>,
    (blocks, pinned): (&[StoredBlock], &[bool]),
    slots: Vec<SlotBuf>,
    kernels: Kernels,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Option<Resident>>, StoreError> {
    let mut resident: Vec<Option<Resident>> = blocks.iter().map(|_| None).collect();
    let wanted: Vec<usize> = (0..blocks.len()).filter(|&b| pinned[b]).collect();
    for (&b, slot) in wanted.iter().zip(slots) {
        let (coding, bytes) = (blocks[b].resident_coding(), blocks[b].resident_bytes() as usize);
        resident[b] = Some(Resident { coding, bytes, slot });
    }
    let total = wanted.iter().map(|&b| blocks[b].extent.bytes).sum();
    let mut loaded = 0;
    let extents = (wanted.len(), |i: usize| (blocks[wanted[i]].extent, blocks[wanted[i]].checksum));
    read_each(client, Class::Trunk, ring, extents, |i, data| {
        let block = &blocks[wanted[i]];
        if let Some(r) = &mut resident[wanted[i]] {
            let to = &mut r.slot[..r.bytes];
            if r.coding == block.coding {
                to.copy_from_slice(data);
            } else {
                let rows = Bf16Rows::new(data, block.shape.rows(), block.shape.cols);
                kernels.tile_rows(rows.map_err(|e| block.malformed(&e))?, to);
            }
        }
        loaded += block.extent.bytes;
        progress(loaded, total);
        Ok(())
    })?;
    Ok(resident)
}
