//! The routed experts: per-layer cache slots under a policy, and staging slots for those on their way
//! through. The reads of a request are issued together; experts are handed out as they arrive.
//!
//! Buffers change hands, bytes are never copied: a newcomer that is kept gives its buffer to the cache
//! slot, and the buffer of the expert it evicts serves the reads that follow. Between requests every
//! cache slot has a buffer, and the staging buffers are free.

use std::sync::Arc;
use std::time::Instant;

use k3_kernel::Mxfp4;

use super::disks::Client;
use super::error::StoreError;
use super::request::{Class, Pieces, Request};
use super::stats::{StoreCounters, add, add_time};
use super::trace::TraceWriter;
use crate::memory::arena::SlotBuf;
use crate::memory::policy::{Placement, ReplacementPolicy};
use crate::model::layout::expert_name;
use crate::model::tensors::{ExpertExtents, ModelTensors};
use crate::source::{Expert, ExpertRequest, ExpertSource};
use crate::units::{ExpertId, LayerIndex};

/// Widths of a routed expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Width that experts read and write (Λ).
    pub io_width: usize,
    /// Their inner width (I).
    pub inner_width: usize,
}

/// What reading an expert into a slot means.
#[must_use]
pub fn expert_pieces(extents: &ExpertExtents) -> Pieces {
    extents.contiguous().map_or_else(|| Pieces::gather(&extents.0), Pieces::one)
}

/// An expert of the current request.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    expert: ExpertId,
    extents: ExpertExtents,
    placement: Placement,
    /// Its bytes are here: a hit, or a read that ended well.
    read: bool,
}

/// Memory of the experts.
pub(crate) struct ExpertMemory {
    /// Cache slots of all layers, in order of layers.
    pub(crate) cache: Vec<SlotBuf>,
    pub(crate) staging: Vec<SlotBuf>,
}

/// The routed experts as a pass leases them.
pub struct ExpertArenas {
    client: Client,
    tensors: Arc<ModelTensors>,
    shape: ExpertShape,
    policy: Box<dyn ReplacementPolicy>,
    /// Buffer of each cache slot; out while its expert is leased or its next one is read.
    slots: Vec<Option<SlotBuf>>,
    free: Vec<SlotBuf>,
    layer: LayerIndex,
    wanted: Vec<Wanted>,
    placed: Vec<Placement>,
    /// Hits not handed out, best rank last, each with its buffer.
    hits: Vec<(usize, SlotBuf)>,
    /// Reads not issued, lowest offset last.
    unissued: Vec<usize>,
    handed_out: usize,
    lease: Option<(usize, SlotBuf)>,
    /// Number of the last request that asked for each expert.
    asked: Vec<u64>,
    requests: u64,
    counters: Arc<StoreCounters>,
    trace: Option<TraceWriter>,
}

impl ExpertArenas {
    pub(crate) fn new(
        client: Client,
        tensors: Arc<ModelTensors>,
        shape: ExpertShape,
        policy: Box<dyn ReplacementPolicy>,
        memory: ExpertMemory,
        counters: Arc<StoreCounters>,
        trace: Option<TraceWriter>,
    ) -> Result<Self, StoreError> {
        let experts = tensors.layers.iter().filter_map(|l| l.experts.as_ref()).map(|t| t.len()).max();
        let experts = experts.unwrap_or(0);
        if experts > 0 && memory.staging.is_empty() {
            return Err(StoreError::NoSlot { purpose: "experts on their way through" });
        }
        let buffers = memory.cache.len() + memory.staging.len();
        let mut free = Vec::with_capacity(buffers);
        free.extend(memory.staging);
        Ok(Self {
            client,
            tensors,
            shape,
            policy,
            slots: memory.cache.into_iter().map(Some).collect(),
            free,
            layer: LayerIndex(0),
            wanted: Vec::with_capacity(experts),
            placed: Vec::with_capacity(experts),
            hits: Vec::with_capacity(experts),
            unissued: Vec::with_capacity(experts),
            handed_out: 0,
            lease: None,
            asked: vec![0; experts],
            requests: 0,
            counters,
            trace,
        })
    }

    /// Writes what the trace recorder holds back.
    ///
    /// # Errors
    /// When the trace cannot be written.
    pub fn flush_trace(&mut self) -> Result<(), StoreError> {
        self.trace.as_mut().map_or(Ok(()), TraceWriter::flush)
    }

    /// Looks every expert up before anything changes.
    fn look_up(&mut self, layer: LayerIndex, wanted: &[ExpertRequest]) -> Result<(), StoreError> {
        let table = self.tensors.layers.get(layer.index()).and_then(|l| l.experts.as_ref());
        let experts = table.map_or(0, |t| t.len());
        self.requests += 1;
        self.wanted.clear();
        for w in wanted {
            let extents = table.and_then(|t| t.extents(w.expert));
            let Some(&extents) = extents else {
                self.wanted.clear();
                return Err(StoreError::UnknownExpert { layer, expert: w.expert, experts });
            };
            if std::mem::replace(&mut self.asked[w.expert.index()], self.requests) == self.requests {
                self.wanted.clear();
                return Err(StoreError::DuplicateExpert { layer, expert: w.expert });
            }
            let placement = Placement::Bypass;
            self.wanted.push(Wanted { expert: w.expert, extents, placement, read: false });
        }
        Ok(())
    }

    /// Sorts the wanted into hits and reads, and takes the buffers of the evicted.
    fn place(&mut self, requests: &[ExpertRequest]) {
        self.policy.visit(self.layer, requests, &mut self.placed);
        for (i, (w, &placement)) in self.wanted.iter_mut().zip(&self.placed).enumerate() {
            w.placement = placement;
            if let Placement::Hit(slot) = placement
                && let Some(buffer) = self.slots[slot].take()
            {
                w.read = true;
                self.hits.push((i, buffer));
            } else {
                self.unissued.push(i);
            }
        }
        self.hits.reverse();
        for placement in &self.placed {
            if let Placement::Admit(slot) = *placement {
                self.free.extend(self.slots[slot].take());
                add(&self.counters.expert_admitted, 1);
            }
        }
        let wanted = &self.wanted;
        self.unissued.sort_unstable_by_key(|&i| {
            let first = wanted[i].extents.0[0];
            std::cmp::Reverse((first.file.0, first.offset))
        });
        add(&self.counters.expert_requests, requests.len() as u64);
        add(&self.counters.expert_hits, self.hits.len() as u64);
    }

    /// Issues reads while there are buffers.
    fn issue(&mut self) -> Result<(), StoreError> {
        while let Some(&i) = self.unissued.last() {
            let Some(slot) = self.free.pop() else { break };
            let pieces = expert_pieces(&self.wanted[i].extents);
            if let Err((slot, error)) = self.client.submit(Request {
                class: Class::Demand,
                pieces,
                checksum: None,
                slot,
                tag: i as u64,
            }) {
                self.free.push(slot);
                return Err(error);
            }
            self.unissued.pop();
        }
        Ok(())
    }

    /// Whether a newcomer of this request takes a slot over.
    fn is_taken_over(&self, slot: usize) -> bool {
        self.placed.contains(&Placement::Admit(slot))
    }

    /// Puts the buffer of a used or arrived expert where it belongs.
    fn give_back(&mut self, i: usize, buffer: SlotBuf) {
        let home = match self.wanted[i].placement {
            Placement::Hit(slot) if !self.is_taken_over(slot) => Some(slot),
            Placement::Admit(slot) => Some(slot),
            Placement::Hit(_) | Placement::Bypass => None,
        };
        match home {
            Some(slot) if self.slots[slot].is_none() => self.slots[slot] = Some(buffer),
            _ => self.free.push(buffer),
        }
    }

    fn return_lease(&mut self) {
        if let Some((i, buffer)) = self.lease.take() {
            self.give_back(i, buffer);
        }
    }

    /// The next expert whose bytes are here: its place in the request, and its buffer.
    fn next_ready(&mut self) -> Result<Option<(usize, SlotBuf)>, StoreError> {
        if let Some(hit) = self.hits.pop() {
            return Ok(Some(hit));
        }
        let done = match self.client.poll() {
            Some(done) => done,
            None => {
                let start = Instant::now();
                let Some(done) = self.client.wait() else { return Ok(None) };
                add_time(&self.counters.expert_wait_ns, start.elapsed());
                done
            }
        };
        let i = done.tag as usize;
        if let Err(error) = done.result {
            self.free.push(done.slot);
            return Err(error);
        }
        self.wanted[i].read = true;
        add(&self.counters.expert_bytes, expert_pieces(&self.wanted[i].extents).data_bytes());
        Ok(Some((i, done.slot)))
    }
}

impl ExpertSource for ExpertArenas {
    fn request(&mut self, layer: LayerIndex, wanted: &[ExpertRequest]) -> Result<(), StoreError> {
        self.return_lease();
        let left = self.wanted.len() - self.handed_out;
        if left > 0 {
            return Err(StoreError::RequestPending { layer: self.layer, left });
        }
        self.handed_out = 0;
        self.look_up(layer, wanted)?;
        self.layer = layer;
        if let Some(trace) = &mut self.trace {
            trace.record(layer, wanted)?;
        }
        self.place(wanted);
        self.issue()
    }

    fn next_expert(&mut self) -> Result<Option<Expert<'_>>, StoreError> {
        self.return_lease();
        self.issue()?;
        let Some((i, buffer)) = self.next_ready()? else { return Ok(None) };
        self.handed_out += 1;
        let (_, buffer) = &*self.lease.insert((i, buffer));
        view(&self.wanted[i], self.shape, self.layer, buffer).map(Some)
    }

    fn abandon(&mut self) -> Result<(), StoreError> {
        self.return_lease();
        self.client.cancel();
        while let Some(done) = self.client.wait() {
            let i = done.tag as usize;
            self.wanted[i].read = done.result.is_ok();
            if self.wanted[i].read {
                self.give_back(i, done.slot);
            } else {
                self.free.push(done.slot);
            }
        }
        while let Some((i, buffer)) = self.hits.pop() {
            self.give_back(i, buffer);
        }
        for w in self.wanted.drain(..) {
            if let (Placement::Admit(slot), false) = (w.placement, w.read) {
                self.policy.forget(slot);
            }
        }
        for slot in self.slots.iter_mut().filter(|s| s.is_none()) {
            *slot = self.free.pop();
        }
        self.placed.clear();
        self.unissued.clear();
        self.handed_out = 0;
        Ok(())
    }
}

/// The three products of an expert, as views of its buffer.
fn view<'a>(
    wanted: &Wanted,
    shape: ExpertShape,
    layer: LayerIndex,
    buffer: &'a [u8],
) -> Result<Expert<'a>, StoreError> {
    let pieces = expert_pieces(&wanted.extents);
    let whole = pieces.as_slice()[0].data();
    let part = |n: usize| match pieces.as_slice().get(n) {
        Some(piece) if pieces.as_slice().len() > 1 => &buffer[piece.data()],
        _ => {
            let before: u64 = wanted.extents.0[..n].iter().map(|e| e.bytes).sum();
            let start = whole.start + before as usize;
            &buffer[start..start + wanted.extents.0[n].bytes as usize]
        }
    };
    let product = |n: usize, rows, cols| {
        Mxfp4::new(part(2 * n), part(2 * n + 1), rows, cols).map_err(|e| StoreError::Malformed {
            what: expert_name(layer, wanted.expert, 2 * n),
            detail: e.to_string(),
        })
    };
    Ok(Expert {
        id: wanted.expert,
        w1: product(0, shape.inner_width, shape.io_width)?,
        w2: product(1, shape.io_width, shape.inner_width)?,
        w3: product(2, shape.inner_width, shape.io_width)?,
    })
}
