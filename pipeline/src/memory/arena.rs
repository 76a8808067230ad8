//! Arenas: one page-aligned mapping per purpose, cut once into slots that have one owner each.
//!
//! A [`SlotBuf`] is moved into a read request and comes back with its completion. As it can be neither
//! copied nor borrowed past a move, two reads into one slot, or a read into a slot that somebody
//! computes from, do not compile:
//!
//! ```compile_fail,E0382
//! use k3_pipeline::memory::arena::{Arena, SlotBuf};
//! fn read_into(_layer: usize, _slot: SlotBuf) {}
//! let mut slots = Arena::new("ring", 1, 4096).unwrap().into_slots();
//! let slot = slots.pop().unwrap();
//! read_into(0, slot);
//! read_into(1, slot); // use of moved value: two layers in one slot
//! ```
#![allow(unsafe_code, reason = "slots of one mapping are disjoint; the proofs stand at each block")]

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
#[cfg(not(miri))]
use std::sync::atomic::Ordering;

#[cfg(not(miri))]
use rustix::mm::Advice;
use rustix::mm::{self, MapFlags, ProtFlags};
use thiserror::Error;

/// Slots start and end on multiples of this: what O_DIRECT asks for on every common disk.
pub const SLOT_ALIGN: usize = 4096;

/// Bytes that [`ArenaRegion::populate`] asks for at a time.
#[cfg(not(miri))]
const POPULATE_BYTES: usize = 64 << 20;

/// Memory for an arena was refused.
#[derive(Debug, Error)]
pub enum ArenaError {
    /// The slots' total size does not fit an address.
    #[error("arena for {purpose}: {slots} slots of {slot_bytes} bytes are more than can be addressed")]
    TooLarge {
        /// What the arena is for.
        purpose: &'static str,
        /// Slots asked for.
        slots: usize,
        /// Bytes of each.
        slot_bytes: usize,
    },
    /// The system refused the mapping.
    #[error("arena for {purpose}: the system refused {bytes} bytes: {source}")]
    Refused {
        /// What the arena is for.
        purpose: &'static str,
        /// Bytes asked for.
        bytes: usize,
        /// The system's answer.
        source: io::Error,
    },
}

/// An anonymous private mapping, zeroed by the system, unmapped with its last slot.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: `Mapping` itself reads and writes nothing; it owns address space, which belongs to the process,
// not to a thread. All access goes through `SlotBuf`s, whose ranges are disjoint.
unsafe impl Send for Mapping {}
// SAFETY: as above: `&Mapping` offers the base address and the length only.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(purpose: &'static str, len: usize) -> Result<Self, ArenaError> {
        let refused = |e: rustix::io::Errno| ArenaError::Refused { purpose, bytes: len, source: e.into() };
        // SAFETY: a fresh private anonymous mapping at an address of the system's choice overlaps nothing.
        let base = unsafe {
            mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(refused)?;
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| refused(rustix::io::Errno::NOMEM))?;
        // Miri knows no advice.
        #[cfg(not(miri))]
        // SAFETY: the range is the mapping just made. Huge pages are a wish: without them all works.
        let _ = unsafe { mm::madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        Ok(Self { base, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this address and length, and every `SlotBuf` over it
        // holds an `Arc` to it, so none is left. A failure leaks address space and nothing else.
        let _ = unsafe { mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A mapping that has not been cut yet.
#[derive(Debug)]
pub struct Arena {
    mapping: Option<Arc<Mapping>>,
    slots: usize,
    slot_bytes: usize,
}

/// Address range of an arena, for registration with the kernel's I/O rings. Holding it keeps the
/// mapping alive; it gives no access to the bytes.
#[derive(Clone, Debug)]
pub struct ArenaRegion {
    mapping: Arc<Mapping>,
}

impl ArenaRegion {
    /// First address.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.mapping.base.as_ptr()
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.mapping.len
    }

    /// Makes the pages resident, in order, until `stop` is set: whoever writes them later waits for none. A wish:
    /// systems that do not know it (before Linux 5.14) do nothing, and the first write does it as ever.
    pub fn populate(&self, stop: &AtomicBool) {
        // Miri knows no advice.
        #[cfg(not(miri))]
        for at in (0..self.mapping.len).step_by(POPULATE_BYTES) {
            let len = POPULATE_BYTES.min(self.mapping.len - at);
            if stop.load(Ordering::Relaxed) {
                break;
            }
            // SAFETY: the range lies inside the mapping, which `self` keeps. No byte changes: those of pages that
            // are there stay, those of others become the zeros that they would be read as.
            let advice = unsafe {
                mm::madvise(self.mapping.base.as_ptr().add(at).cast(), len, Advice::LinuxPopulateWrite)
            };
            if advice.is_err() {
                break;
            }
        }
        #[cfg(miri)]
        let _ = stop;
    }
}

impl Arena {
    /// Maps `slots` slots of at least `slot_bytes` bytes each (rounded up to [`SLOT_ALIGN`]). The pages
    /// become resident when they are first written.
    ///
    /// # Errors
    /// When the size overflows or the system refuses it.
    pub fn new(purpose: &'static str, slots: usize, slot_bytes: usize) -> Result<Self, ArenaError> {
        let too_large = || ArenaError::TooLarge { purpose, slots, slot_bytes };
        let slot_bytes = slot_bytes.checked_next_multiple_of(SLOT_ALIGN).ok_or_else(too_large)?;
        let len = slots.checked_mul(slot_bytes).filter(|&n| isize::try_from(n).is_ok());
        let len = len.ok_or_else(too_large)?;
        let mapping = if len == 0 { None } else { Some(Arc::new(Mapping::new(purpose, len)?)) };
        Ok(Self { mapping, slots, slot_bytes })
    }

    /// The arena's address range; `None` for an arena without bytes.
    #[must_use]
    pub fn region(&self) -> Option<ArenaRegion> {
        self.mapping.clone().map(|mapping| ArenaRegion { mapping })
    }

    /// Cuts the arena into its slots. It can be cut once only.
    #[must_use]
    pub fn into_slots(self) -> Vec<SlotBuf> {
        let Some(mapping) = self.mapping else { return Vec::new() };
        let len = self.slot_bytes;
        (0..self.slots).map(|i| SlotBuf { mapping: Arc::clone(&mapping), start: i * len, len }).collect()
    }
}

/// A part of an arena with one owner: to hold it is to be the only one who can touch its bytes.
#[derive(Debug)]
pub struct SlotBuf {
    mapping: Arc<Mapping>,
    start: usize,
    len: usize,
}

impl SlotBuf {
    /// Cuts off everything from byte `at`: `self` keeps `[0, at)`.
    ///
    /// # Panics
    /// When `at` is past the end.
    #[must_use = "the bytes cut off are lost until the slot is joined again"]
    pub fn split_off(&mut self, at: usize) -> SlotBuf {
        assert!(at <= self.len, "cut at {at} of a slot of {} bytes", self.len);
        let rest = SlotBuf { mapping: Arc::clone(&self.mapping), start: self.start + at, len: self.len - at };
        self.len = at;
        rest
    }

    /// Joins two parts that lie side by side, in either order.
    ///
    /// # Errors
    /// Gives both back when they are not neighbours.
    pub fn join(self, other: SlotBuf) -> Result<SlotBuf, (SlotBuf, SlotBuf)> {
        let (low, high) = if self.start <= other.start { (self, other) } else { (other, self) };
        if !Arc::ptr_eq(&low.mapping, &high.mapping) || low.start + low.len != high.start {
            return Err((low, high));
        }
        Ok(SlotBuf { len: low.len + high.len, ..low })
    }

    /// First byte's place in the arena: orders the parts of one slot.
    #[must_use]
    pub fn start(&self) -> usize {
        self.start
    }
}

impl Deref for SlotBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `[start, start + len)` lies inside the mapping (`into_slots`, `split_off` and `join` keep
        // it so), the mapping lives as long as `self.mapping`, its bytes are initialised (zeroed by the
        // system), and no other `SlotBuf` covers them: slots are cut disjoint, are not `Clone`, and are
        // shortened when cut again. So `&self` is the only way to them, and `&mut self` excludes it.
        unsafe { std::slice::from_raw_parts(self.mapping.base.as_ptr().add(self.start), self.len) }
    }
}

impl DerefMut for SlotBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.base.as_ptr().add(self.start), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_aligned_disjoint_and_zeroed() {
        let mut slots = Arena::new("test", 5, 5000).unwrap().into_slots();
        assert_eq!(slots.len(), 5);
        for (i, s) in slots.iter_mut().enumerate() {
            assert_eq!(s.len(), 8192);
            assert_eq!(s.as_ptr() as usize % SLOT_ALIGN, 0);
            assert!(s.iter().all(|&b| b == 0), "slot {i} is not zeroed, or overlaps one before it");
            s.fill(i as u8 + 1);
        }
        for (i, s) in slots.iter().enumerate() {
            assert!(s.iter().all(|&b| b == i as u8 + 1), "slot {i} was overwritten");
        }
    }

    #[test]
    fn the_mapping_outlives_the_arena_and_every_other_slot() {
        let mut slots = Arena::new("test", 3, 4096).unwrap().into_slots();
        let mut last = slots.pop().unwrap();
        drop(slots);
        last.fill(7);
        assert_eq!(std::thread::spawn(move || last[4095]).join().unwrap(), 7);
    }

    #[test]
    fn populating_changes_no_byte_and_ends_when_told_to() {
        let arena = Arena::new("test", 3, 40 << 20).unwrap();
        let region = arena.region().unwrap();
        let mut slots = arena.into_slots();
        slots[1].fill(7);
        std::thread::scope(|scope| {
            scope.spawn(|| region.populate(&AtomicBool::new(false)));
            slots[2].fill(9);
        });
        for (slot, byte) in slots.iter().zip([0, 7, 9]) {
            assert!(slot.iter().all(|&b| b == byte), "a slot of {byte} was changed");
        }
        region.populate(&AtomicBool::new(true));
    }

    #[test]
    fn parts_join_in_either_order_and_only_with_neighbours() {
        let mut slots = Arena::new("test", 2, 12288).unwrap().into_slots();
        let other = slots.pop().unwrap();
        let mut a = slots.pop().unwrap();
        let mut b = a.split_off(4096);
        let c = b.split_off(4096);
        assert_eq!((a.len(), b.len(), c.len()), (4096, 4096, 4096));
        let (a, c) = a.join(c).unwrap_err();
        let ab = b.join(a).unwrap();
        let whole = c.join(ab).unwrap();
        assert_eq!((whole.start(), whole.len()), (0, 12288));
        // Neighbours in the mapping do join: they are one range.
        assert_eq!(whole.join(other).unwrap().len(), 24576);
        let foreign = Arena::new("test", 1, 4096).unwrap().into_slots().pop().unwrap();
        let mine = Arena::new("test", 1, 4096).unwrap().into_slots().pop().unwrap();
        assert!(mine.join(foreign).is_err());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri stops where the system would refuse")]
    fn sizes_that_cannot_be_are_refused() {
        assert!(matches!(Arena::new("x", usize::MAX, 4096), Err(ArenaError::TooLarge { .. })));
        assert!(matches!(Arena::new("x", 1, usize::MAX), Err(ArenaError::TooLarge { .. })));
        assert!(matches!(Arena::new("x", 1, 1 << 50), Err(ArenaError::Refused { .. })));
        assert!(Arena::new("x", 0, 4096).unwrap().into_slots().is_empty());
    }
}
