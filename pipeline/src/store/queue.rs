//! One read queue per disk, shared by all who read from it.
//!
//! Requests are cut into chunks of [`CHUNK_BYTES`]: several readers work on one block at once, and a
//! demand read never waits behind more than the chunks under way. Demand goes before trunk, and within a
//! class requests are served in order of issue. Everything is allocated at construction.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::error::StoreError;
use super::files::FileTable;
use super::pack::BlockChecksum;
use super::request::{Class, Completion, Piece, Pieces, Request};
use crate::memory::arena::SlotBuf;
use crate::model::tensors::FileId;

/// Largest single read.
pub const CHUNK_BYTES: usize = 4 << 20;

/// Where the completions of one client arrive.
#[derive(Debug)]
pub(crate) struct Mailbox {
    arrived: Mutex<VecDeque<Completion>>,
    ready: Condvar,
}

impl Mailbox {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { arrived: Mutex::new(VecDeque::with_capacity(capacity)), ready: Condvar::new() }
    }

    fn push(&self, completion: Completion) {
        lock(&self.arrived).push_back(completion);
        self.ready.notify_one();
    }

    pub(crate) fn try_pop(&self) -> Option<Completion> {
        lock(&self.arrived).pop_front()
    }

    pub(crate) fn pop(&self) -> Completion {
        let mut arrived = lock(&self.arrived);
        loop {
            if let Some(completion) = arrived.pop_front() {
                return completion;
            }
            arrived = self.ready.wait(arrived).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A poisoned lock holds what it held: a reader that panics is caught before it can leave half a change.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A part of a request that one read fetches.
#[derive(Debug)]
pub(crate) struct Chunk {
    job: usize,
    pub(crate) file: FileId,
    /// First byte, a sector's first.
    pub(crate) offset: u64,
    /// Bytes that must come; the rest of `part` is the end of the last sector.
    pub(crate) needed: usize,
    pub(crate) part: SlotBuf,
}

/// A request under way.
#[derive(Debug)]
struct Job {
    mailbox: Arc<Mailbox>,
    class: Class,
    tag: u64,
    pieces: Pieces,
    checksum: Option<BlockChecksum>,
    /// Piece that the next chunk belongs to, and how many of its sector bytes were cut off already.
    piece: usize,
    cut: usize,
    /// What is not handed to a reader yet.
    rest: SlotBuf,
    /// First byte of the slot, as [`SlotBuf::start`] counts.
    start: usize,
    in_flight: usize,
    error: Option<StoreError>,
}

impl Job {
    fn is_issued(&self) -> bool {
        self.error.is_some() || self.piece == self.pieces.as_slice().len()
    }

    /// Cuts the next chunk off. Bytes of the slot before it go to `parts`.
    fn next_chunk(&mut self, job: usize, parts: &mut Vec<SlotBuf>) -> Option<Chunk> {
        let piece: Piece = *self.pieces.as_slice().get(self.piece)?;
        let wanted = piece.slack() + piece.extent.bytes as usize;
        let bytes = (piece.span() - self.cut).min(CHUNK_BYTES);
        let gap = self.start + piece.at + self.cut - self.rest.start();
        if gap > 0 {
            parts.push(self.take(gap));
        }
        let chunk = Chunk {
            job,
            file: piece.extent.file,
            offset: piece.extent.offset - piece.slack() as u64 + self.cut as u64,
            needed: bytes.min(wanted - self.cut),
            part: self.take(bytes),
        };
        self.cut += bytes;
        if self.cut == piece.span() {
            self.piece += 1;
            self.cut = 0;
        }
        self.in_flight += 1;
        Some(chunk)
    }

    fn take(&mut self, bytes: usize) -> SlotBuf {
        let rest = self.rest.split_off(bytes);
        std::mem::replace(&mut self.rest, rest)
    }
}

/// A place for a job, and its parts as they come back. The list outlives the job: its memory is reused.
#[derive(Debug)]
struct Place {
    job: Option<Job>,
    parts: Vec<SlotBuf>,
}

/// What waits and what is under way on one disk.
#[derive(Debug)]
pub(crate) struct Pending {
    places: Vec<Place>,
    free: Vec<usize>,
    demand: VecDeque<usize>,
    trunk: VecDeque<usize>,
    pub(crate) closed: bool,
}

impl Pending {
    fn new(jobs: usize, slot_bytes_max: usize) -> Self {
        let parts = slot_bytes_max.div_ceil(CHUNK_BYTES) + 2 * super::request::PIECES_MAX + 1;
        Self {
            places: (0..jobs).map(|_| Place { job: None, parts: Vec::with_capacity(parts) }).collect(),
            free: (0..jobs).rev().collect(),
            demand: VecDeque::with_capacity(jobs),
            trunk: VecDeque::with_capacity(jobs),
            closed: false,
        }
    }

    fn add(&mut self, request: Request, mailbox: Arc<Mailbox>) -> Result<(), (SlotBuf, StoreError)> {
        let Some(place) = self.free.pop() else {
            return Err((request.slot, StoreError::QueueFull { capacity: self.places.len() }));
        };
        match request.class {
            Class::Demand => self.demand.push_back(place),
            Class::Trunk => self.trunk.push_back(place),
        }
        self.places[place].job = Some(Job {
            mailbox,
            class: request.class,
            tag: request.tag,
            pieces: request.pieces,
            checksum: request.checksum,
            piece: 0,
            cut: 0,
            start: request.slot.start(),
            rest: request.slot,
            in_flight: 0,
            error: None,
        });
        Ok(())
    }

    fn queue(&mut self, class: Class) -> &mut VecDeque<usize> {
        match class {
            Class::Demand => &mut self.demand,
            Class::Trunk => &mut self.trunk,
        }
    }

    /// The next chunk to read: demand first, then in order of issue.
    pub(crate) fn take_chunk(&mut self) -> Option<Chunk> {
        for class in [Class::Demand, Class::Trunk] {
            while let Some(&place) = self.queue(class).front() {
                let Place { job: Some(job), parts } = &mut self.places[place] else { return None };
                let chunk = job.next_chunk(place, parts);
                if job.is_issued() {
                    self.queue(class).pop_front();
                }
                if chunk.is_some() {
                    return chunk;
                }
            }
        }
        None
    }

    /// Takes a chunk back. The completion, when it was the request's last.
    pub(crate) fn finish(&mut self, chunk: Chunk, result: Result<(), StoreError>) -> Option<Finished> {
        let place = chunk.job;
        let Place { job: Some(job), parts } = &mut self.places[place] else { return None };
        parts.push(chunk.part);
        job.in_flight -= 1;
        if let Err(error) = result {
            let class = job.class;
            job.error.get_or_insert(error);
            self.queue(class).retain(|&p| p != place);
        }
        self.complete(place)
    }

    /// Joins the slot again once no part of it is out.
    fn complete(&mut self, place: usize) -> Option<Finished> {
        let Place { job, parts } = &mut self.places[place];
        let job = job.take_if(|job| job.in_flight == 0 && job.is_issued())?;
        parts.push(job.rest);
        parts.sort_unstable_by_key(|p| p.start());
        let slot = parts.drain(..).reduce(|low, high| match low.join(high) {
            Ok(joined) => joined,
            Err(_) => unreachable!("the parts of one slot are neighbours"),
        })?;
        self.free.push(place);
        let completion = Completion { tag: job.tag, slot, result: job.error.map_or(Ok(()), Err) };
        let check = job.checksum.filter(|_| completion.result.is_ok());
        let check = check.zip(job.pieces.as_slice().first().copied());
        Some(Finished { mailbox: job.mailbox, completion, check })
    }

    /// Withdraws every request of a client; chunks under way are let finish.
    fn cancel(&mut self, mailbox: &Arc<Mailbox>, mut finished: impl FnMut(Finished)) {
        for place in 0..self.places.len() {
            match &mut self.places[place].job {
                Some(job) if Arc::ptr_eq(&job.mailbox, mailbox) => {
                    job.error.get_or_insert(StoreError::Cancelled);
                    let class = job.class;
                    self.queue(class).retain(|&p| p != place);
                    if let Some(done) = self.complete(place) {
                        finished(done);
                    }
                }
                _ => {}
            }
        }
    }
}

/// A completion and where it goes.
#[derive(Debug)]
pub(crate) struct Finished {
    mailbox: Arc<Mailbox>,
    completion: Completion,
    check: Option<(BlockChecksum, Piece)>,
}

impl Finished {
    /// Hands the completion to its client, after comparing checksums. Not to be called under the lock.
    pub(crate) fn deliver(mut self, files: &FileTable) {
        if let Some((checksum, piece)) = self.check {
            let bytes = &self.completion.slot[piece.data()];
            let file = files.get(piece.extent.file);
            self.completion.result = file.and_then(|f| checksum.check(f.path(), piece.extent.offset, bytes));
        }
        self.mailbox.push(self.completion);
    }
}

/// What the readers of one disk share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) files: Arc<FileTable>,
    pending: Mutex<Pending>,
    work: Condvar,
    /// Wakes a reader that waits for the kernel's completions.
    pub(crate) bell: Option<std::os::fd::OwnedFd>,
}

impl Shared {
    pub(crate) fn new(
        files: Arc<FileTable>,
        jobs: usize,
        slot_bytes_max: usize,
        bell: Option<std::os::fd::OwnedFd>,
    ) -> Self {
        Self { files, pending: Mutex::new(Pending::new(jobs, slot_bytes_max)), work: Condvar::new(), bell }
    }

    pub(crate) fn pending(&self) -> MutexGuard<'_, Pending> {
        lock(&self.pending)
    }

    pub(crate) fn wait_for_work<'a>(&self, pending: MutexGuard<'a, Pending>) -> MutexGuard<'a, Pending> {
        self.work.wait(pending).unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        self.work.notify_all();
        if let Some(bell) = &self.bell {
            // An eventfd refuses only when its counter is full, and then the reader is awake.
            let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
        }
    }

    pub(crate) fn submit(
        &self,
        request: Request,
        mailbox: &Arc<Mailbox>,
    ) -> Result<(), (SlotBuf, StoreError)> {
        self.pending().add(request, Arc::clone(mailbox))?;
        self.ring();
        Ok(())
    }

    pub(crate) fn cancel(&self, mailbox: &Arc<Mailbox>) {
        // What is withdrawn has failed: there is nothing to compare under the lock.
        self.pending().cancel(mailbox, |finished| finished.deliver(&self.files));
    }

    pub(crate) fn close(&self) {
        self.pending().closed = true;
        self.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::arena::Arena;
    use crate::model::tensors::Extent;

    fn request(class: Class, offset: u64, bytes: u64, slot: SlotBuf, tag: u64) -> Request {
        let extent = Extent { file: FileId(0), offset, bytes };
        Request { class, pieces: Pieces::one(extent), checksum: None, slot, tag }
    }

    /// Takes and finishes one chunk: its offset and length, and the tag when a request is over.
    fn serve(pending: &mut Pending, result: Result<(), StoreError>) -> Option<(u64, usize, Option<u64>)> {
        let chunk = pending.take_chunk()?;
        let (offset, needed) = (chunk.offset, chunk.needed);
        let finished = pending.finish(chunk, result);
        Some((offset, needed, finished.map(|f| f.completion.tag)))
    }

    #[test]
    fn demand_goes_first_even_in_the_middle_of_a_block_and_nothing_is_allocated() {
        let chunk = CHUNK_BYTES as u64;
        let mut slots = Arena::new("test", 3, 3 * CHUNK_BYTES).unwrap().into_slots();
        let mailbox = Arc::new(Mailbox::new(3));
        let mut pending = Pending::new(3, 3 * CHUNK_BYTES);
        let mut served = Vec::with_capacity(8);
        let counted = allocation_counter::measure(|| {
            let block = request(Class::Trunk, 100, 2 * chunk, slots.pop().unwrap(), 1);
            pending.add(block, Arc::clone(&mailbox)).unwrap();
            let next = request(Class::Trunk, 50 * chunk, 10, slots.pop().unwrap(), 2);
            pending.add(next, Arc::clone(&mailbox)).unwrap();
            served.extend(serve(&mut pending, Ok(())));
            let expert = request(Class::Demand, 80 * chunk + 4096, 4097, slots.pop().unwrap(), 3);
            pending.add(expert, Arc::clone(&mailbox)).unwrap();
            while let Some(s) = serve(&mut pending, Ok(())) {
                served.push(s);
            }
        });
        assert_eq!(
            served,
            [
                (0, CHUNK_BYTES, None),
                (80 * chunk + 4096, 4097, Some(3)),
                (chunk, CHUNK_BYTES, None),
                (2 * chunk, 100, Some(1)),
                (50 * chunk, 10, Some(2)),
            ]
        );
        assert_eq!(counted.count_total, 0);
    }

    #[test]
    fn a_failed_request_is_over_with_the_chunks_under_way_and_the_slot_is_whole() {
        let mut slots = Arena::new("test", 1, 4 * CHUNK_BYTES).unwrap().into_slots();
        let mailbox = Arc::new(Mailbox::new(1));
        let mut pending = Pending::new(1, 4 * CHUNK_BYTES);
        let all = request(Class::Trunk, 0, 4 * CHUNK_BYTES as u64, slots.pop().unwrap(), 9);
        pending.add(all, Arc::clone(&mailbox)).unwrap();
        let full =
            request(Class::Trunk, 0, 1, Arena::new("test", 1, 4096).unwrap().into_slots().remove(0), 0);
        assert!(matches!(
            pending.add(full, Arc::clone(&mailbox)),
            Err((_, StoreError::QueueFull { capacity: 1 }))
        ));
        let (first, second) = (pending.take_chunk().unwrap(), pending.take_chunk().unwrap());
        assert!(pending.finish(second, Err(StoreError::Cancelled)).is_none());
        assert!(pending.take_chunk().is_none(), "nothing more is issued for it");
        let over = pending.finish(first, Ok(())).unwrap().completion;
        assert!(over.result.is_err());
        assert_eq!((over.tag, over.slot.start(), over.slot.len()), (9, 0, 4 * CHUNK_BYTES));
    }

    #[test]
    fn withdrawn_requests_come_back_but_for_those_of_others() {
        let mut slots = Arena::new("test", 3, 2 * CHUNK_BYTES).unwrap().into_slots();
        let (mine, other) = (Arc::new(Mailbox::new(3)), Arc::new(Mailbox::new(3)));
        let mut pending = Pending::new(3, 2 * CHUNK_BYTES);
        for (tag, owner) in [(0, &mine), (1, &other), (2, &mine)] {
            let r = request(Class::Trunk, 0, 2 * CHUNK_BYTES as u64, slots.pop().unwrap(), tag);
            pending.add(r, Arc::clone(owner)).unwrap();
        }
        let under_way = pending.take_chunk().unwrap();
        let mut over = Vec::new();
        pending.cancel(&mine, |f| over.push(f.completion.tag));
        assert_eq!(over, [2]);
        let last = pending.finish(under_way, Ok(())).unwrap().completion;
        assert!(last.tag == 0 && matches!(last.result, Err(StoreError::Cancelled)));
        assert_eq!(serve(&mut pending, Ok(())), Some((0, CHUNK_BYTES, None)));
        assert_eq!(serve(&mut pending, Ok(())), Some((CHUNK_BYTES as u64, CHUNK_BYTES, Some(1))));
    }
}
