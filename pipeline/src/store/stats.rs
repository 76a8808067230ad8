//! What reading costs: counters that the sources keep, and a snapshot of them for reports.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

/// Counters, shared by both sources and whoever reports.
#[derive(Debug, Default)]
pub struct StoreCounters {
    pub(crate) trunk_bytes: AtomicU64,
    pub(crate) blocks_ready: AtomicU64,
    pub(crate) blocks_waited: AtomicU64,
    pub(crate) blocks_pinned: AtomicU64,
    pub(crate) trunk_wait_ns: AtomicU64,
    pub(crate) embed_bytes: AtomicU64,
    pub(crate) embed_wait_ns: AtomicU64,
    pub(crate) expert_bytes: AtomicU64,
    pub(crate) expert_requests: AtomicU64,
    pub(crate) expert_hits: AtomicU64,
    pub(crate) expert_admitted: AtomicU64,
    pub(crate) expert_wait_ns: AtomicU64,
}

/// What has been read and waited for since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StoreStats {
    /// Bytes of trunk and head blocks read.
    pub trunk_bytes: u64,
    /// Streamed blocks that were here when they were asked for.
    pub blocks_ready: u64,
    /// Streamed blocks that had to be waited for.
    pub blocks_waited: u64,
    /// Blocks leased from memory.
    pub blocks_pinned: u64,
    /// Seconds waited for blocks.
    pub trunk_wait_s: f64,
    /// Bytes of embedding rows read.
    pub embed_bytes: u64,
    /// Seconds waited for embedding rows.
    pub embed_wait_s: f64,
    /// Bytes of experts read.
    pub expert_bytes: u64,
    /// Experts asked for.
    pub expert_requests: u64,
    /// Experts that were in their layer's cache when they were asked for: nothing was read for them.
    pub expert_hits: u64,
    /// Experts that were read and kept.
    pub expert_admitted: u64,
    /// Seconds waited for experts.
    pub expert_wait_s: f64,
}

impl StoreStats {
    /// All bytes read: trunk, head, experts, embedding rows.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        self.trunk_bytes + self.expert_bytes + self.embed_bytes
    }
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

pub(crate) fn add_time(counter: &AtomicU64, time: Duration) {
    add(counter, u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
}

impl StoreCounters {
    /// The counts so far.
    #[must_use]
    pub fn snapshot(&self) -> StoreStats {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        let seconds = |c: &AtomicU64| Duration::from_nanos(get(c)).as_secs_f64();
        StoreStats {
            trunk_bytes: get(&self.trunk_bytes),
            blocks_ready: get(&self.blocks_ready),
            blocks_waited: get(&self.blocks_waited),
            blocks_pinned: get(&self.blocks_pinned),
            trunk_wait_s: seconds(&self.trunk_wait_ns),
            embed_bytes: get(&self.embed_bytes),
            embed_wait_s: seconds(&self.embed_wait_ns),
            expert_bytes: get(&self.expert_bytes),
            expert_requests: get(&self.expert_requests),
            expert_hits: get(&self.expert_hits),
            expert_admitted: get(&self.expert_admitted),
            expert_wait_s: seconds(&self.expert_wait_ns),
        }
    }
}
