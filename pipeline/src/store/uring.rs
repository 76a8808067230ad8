//! The io_uring engine: one thread per disk that keeps `depth` reads with the kernel, into registered
//! buffers where the system allows so much locked memory.
#![allow(unsafe_code, reason = "the kernel writes into slots; the proofs stand at each block")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};

use super::error::StoreError;
use super::files::SourceFile;
use super::queue::{Chunk, Pending, Shared};
use super::reader::{Progress, Step, read_failed, short_read};
use crate::memory::arena::ArenaRegion;

/// The kernel takes registered buffers of at most 1 GiB.
const REGISTERED_BYTES_MAX: usize = 1 << 30;
/// Registered buffers of one ring.
const REGISTERED_MAX: usize = 1 << 14;
/// How often a read that the kernel puts off is issued again.
const RETRIES_MAX: u32 = 1000;
/// Marks completions of the bell; reads are marked with their place.
const BELL: u64 = u64::MAX;

/// A chunk that the kernel is reading into.
struct InFlight {
    chunk: Chunk,
    progress: Progress,
    retries: u32,
}

/// A ring before its thread runs.
pub(crate) struct Ring {
    uring: IoUring,
    /// The slots' memory, kept alive for as long as it is registered.
    regions: Vec<ArenaRegion>,
    /// Registered address ranges, ascending, by buffer number; empty when none are.
    buffers: Vec<(usize, usize, u16)>,
    bell: OwnedFd,
    bell_armed: bool,
    reads: Vec<Option<InFlight>>,
    done: Vec<(u64, i32)>,
}

impl Ring {
    /// A ring for `depth` reads, and the bell that wakes its thread.
    pub(crate) fn new(depth: usize, regions: &[ArenaRegion]) -> io::Result<(Self, OwnedFd)> {
        let entries = u32::try_from(depth + 1).unwrap_or(u32::MAX).min(4096).next_power_of_two();
        let uring = IoUring::new(entries)?;
        let mut probe = Probe::new();
        uring.submitter().register_probe(&mut probe)?;
        if ![opcode::Read::CODE, opcode::ReadFixed::CODE, opcode::PollAdd::CODE]
            .iter()
            .all(|&code| probe.is_supported(code))
        {
            return Err(io::Error::from(io::ErrorKind::Unsupported));
        }
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let ringer = bell.try_clone()?;
        let depth = depth.min(entries as usize - 1);
        let mut ring = Self {
            uring,
            regions: regions.to_vec(),
            buffers: Vec::new(),
            bell,
            bell_armed: false,
            reads: (0..depth).map(|_| None).collect(),
            done: Vec::with_capacity(2 * entries as usize),
        };
        ring.register();
        Ok((ring, ringer))
    }

    /// Registers the slots. That is refused where locked memory is limited; reads then name addresses.
    fn register(&mut self) {
        let mut ranges: Vec<(usize, usize)> = Vec::new();
        for region in &self.regions {
            let (base, bytes) = (region.base() as usize, region.bytes());
            let cuts = (0..bytes).step_by(REGISTERED_BYTES_MAX);
            ranges.extend(cuts.map(|at| (base + at, (bytes - at).min(REGISTERED_BYTES_MAX))));
        }
        ranges.sort_unstable();
        if ranges.is_empty() || ranges.len() > REGISTERED_MAX {
            return;
        }
        let vectors: Vec<libc::iovec> = ranges
            .iter()
            .map(|&(base, bytes)| libc::iovec { iov_base: base as *mut libc::c_void, iov_len: bytes })
            .collect();
        // SAFETY: the ranges are whole mappings, alive as long as `self.regions`, which the ring outlives
        // in no case: both are dropped with `self`. Registering moves and writes no byte.
        let registered = unsafe { self.uring.submitter().register_buffers(&vectors) };
        if registered.is_ok() {
            self.buffers = ranges.iter().zip(0u16..).map(|(&(base, bytes), n)| (base, bytes, n)).collect();
        }
    }

    pub(crate) fn is_registered(&self) -> bool {
        !self.buffers.is_empty()
    }

    /// Starts the thread.
    pub(crate) fn start(self, shared: &Arc<Shared>) -> Result<JoinHandle<()>, StoreError> {
        let shared = Arc::clone(shared);
        let thread = thread::Builder::new().name("k3-uring".to_owned()).spawn(move || self.run(&shared));
        thread.map_err(|source| StoreError::Thread { source })
    }

    fn run(mut self, shared: &Shared) {
        while self.gather(shared) {
            self.arm_bell();
            self.wait();
            self.collect(shared);
        }
        // The kernel still writes into these slots: they are waited for before the memory may go.
        while self.reads.iter().any(Option::is_some) {
            self.wait();
            self.collect(shared);
        }
    }

    /// Takes work until the ring is full or there is no more; waits while there is none at all. False
    /// when the queue is closed.
    fn gather(&mut self, shared: &Shared) -> bool {
        let mut pending = shared.pending();
        loop {
            if pending.closed {
                return false;
            }
            self.fill(&mut pending, shared);
            if self.reads.iter().any(Option::is_some) {
                return true;
            }
            pending = shared.wait_for_work(pending);
        }
    }

    fn fill(&mut self, pending: &mut Pending, shared: &Shared) {
        for place in 0..self.reads.len() {
            if self.reads[place].is_some() {
                continue;
            }
            let Some(chunk) = pending.take_chunk() else { return };
            let progress = Progress::new(chunk.needed);
            match shared.files.get(chunk.file) {
                Ok(file) => {
                    self.reads[place] = Some(InFlight { chunk, progress, retries: 0 });
                    self.push_read(place, file);
                }
                Err(error) => {
                    if let Some(finished) = pending.finish(chunk, Err(error)) {
                        finished.deliver(&shared.files);
                    }
                }
            }
        }
    }

    /// Gives the kernel the read of `place`, from where it stands.
    fn push_read(&mut self, place: usize, file: &SourceFile) {
        let Some(read) = &mut self.reads[place] else { return };
        let rest = &mut read.chunk.part[read.progress.done..];
        let (address, bytes) = (rest.as_mut_ptr(), rest.len());
        let offset = read.chunk.offset + read.progress.done as u64;
        let len = u32::try_from(bytes).unwrap_or(u32::MAX);
        let fd = types::Fd(file.raw_fd());
        let start = address as usize;
        let buffer = self.buffers.partition_point(|&(base, _, _)| base <= start);
        let buffer = buffer.checked_sub(1).map(|n| self.buffers[n]);
        let entry = match buffer.filter(|&(base, size, _)| start + bytes <= base + size) {
            Some((_, _, n)) => opcode::ReadFixed::new(fd, address, len, n).offset(offset).build(),
            None => opcode::Read::new(fd, address, len).offset(offset).build(),
        };
        // SAFETY: the bytes belong to the slot in `self.reads[place]`, which is not touched, moved out or
        // dropped before this read's completion has been seen (`collect`, and the end of `run`); the file
        // lives in the shared table, which outlives the thread.
        unsafe { self.push(&entry.user_data(place as u64)) };
    }

    fn arm_bell(&mut self) {
        if !self.bell_armed {
            self.bell_armed = true;
            let fd = types::Fd(self.bell.as_raw_fd());
            let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build().user_data(BELL);
            // SAFETY: a poll names no memory, and the descriptor is open as long as the ring is.
            unsafe { self.push(&entry) };
        }
    }

    /// # Safety
    /// What the entry points to must stay valid until its completion has been seen.
    unsafe fn push(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: the caller's promise.
            if unsafe { self.uring.submission().push(entry) }.is_ok() {
                return;
            }
            // The submission queue has room for every place and the bell; it is full only while the kernel
            // has not taken the entries yet.
            let _ = self.uring.submit();
        }
    }

    /// Waits for a completion at least. Errors are the kernel's "try again" in its many forms: nothing in
    /// flight may be given up, as the kernel would go on writing to it.
    fn wait(&mut self) {
        match self.uring.submit_and_wait(1) {
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }

    fn collect(&mut self, shared: &Shared) {
        let mut done = std::mem::take(&mut self.done);
        done.extend(self.uring.completion().map(|c| (c.user_data(), c.result())));
        for &(mark, result) in &done {
            if mark == BELL {
                self.bell_armed = false;
                let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
            } else {
                self.finish_read(mark as usize, result, shared);
            }
        }
        done.clear();
        self.done = done;
    }

    fn finish_read(&mut self, place: usize, result: i32, shared: &Shared) {
        let Some(read) = self.reads.get_mut(place).and_then(Option::as_mut) else { return };
        let outcome = shared.files.get(read.chunk.file).and_then(|file| {
            let again = step(read, file, result)?;
            if again { Ok(Some(file)) } else { file.check_unchanged().map(|()| None) }
        });
        match outcome {
            Ok(Some(file)) => self.push_read(place, file),
            Ok(None) => self.hand_over(place, Ok(()), shared),
            Err(error) => self.hand_over(place, Err(error), shared),
        }
    }

    fn hand_over(&mut self, place: usize, result: Result<(), StoreError>, shared: &Shared) {
        if let Some(read) = self.reads[place].take() {
            let finished = shared.pending().finish(read.chunk, result);
            if let Some(finished) = finished {
                finished.deliver(&shared.files);
            }
        }
    }
}

/// Counts one completion of a read; true when it has to go on.
fn step(read: &mut InFlight, file: &SourceFile, result: i32) -> Result<bool, StoreError> {
    let at = read.chunk.offset + read.progress.done as u64;
    let Ok(got) = usize::try_from(result) else {
        let error = io::Error::from_raw_os_error(-result);
        let put_off = matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
        read.retries += 1;
        if put_off && read.retries < RETRIES_MAX {
            return Ok(true);
        }
        return Err(read_failed(file, at, read.progress.needed - read.progress.done, error));
    };
    match read.progress.advance(got, file.is_direct()) {
        Step::Whole => Ok(false),
        Step::Again => Ok(true),
        Step::Short => Err(short_read(file, read.chunk.offset, &read.progress)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::files::FileTable;
    use super::super::queue::{CHUNK_BYTES, Mailbox};
    use super::super::request::{Class, Completion, Pieces, Request};
    use super::*;
    use crate::memory::arena::Arena;
    use crate::model::tensors::{Extent, FileId, WeightFile};
    use crate::plan::DirectMode;

    const OFFSET: u64 = 100;
    const BYTES: usize = CHUNK_BYTES / 2;

    /// A ring that has been asked for one extent of a file of its own; `None` where there is no io_uring.
    struct Asked {
        dir: tempfile::TempDir,
        bytes: Vec<u8>,
        ring: Ring,
        shared: Shared,
        mailbox: Arc<Mailbox>,
    }

    impl Asked {
        fn new(direct: DirectMode) -> Option<Self> {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("weights");
            let bytes: Vec<u8> = (0..BYTES + 9000).map(|i| (i % 251) as u8).collect();
            std::fs::write(&path, &bytes).unwrap();
            let files = [WeightFile { path, bytes: bytes.len() as u64 }];
            let files = Arc::new(FileTable::open(&files, direct).unwrap());
            let pieces = Pieces::one(Extent { file: FileId(0), offset: OFFSET, bytes: BYTES as u64 });
            let arena = Arena::new("test", 1, pieces.slot_bytes()).unwrap();
            let (ring, bell) = Ring::new(1, &arena.region().into_iter().collect::<Vec<_>>()).ok()?;
            let shared = Shared::new(files, 1, pieces.slot_bytes(), Some(bell));
            let mailbox = Arc::new(Mailbox::new(1));
            let slot = arena.into_slots().pop().unwrap();
            let request = Request { class: Class::Trunk, pieces, checksum: None, slot, tag: 7 };
            shared.submit(request, &mailbox).unwrap();
            Some(Self { dir, bytes, ring, shared, mailbox })
        }

        /// Lets the kernel read everything, then says that it gave `result` and takes away what it gave
        /// beyond that.
        fn pretend(&mut self, result: i32) {
            assert!(self.ring.gather(&self.shared));
            while self.ring.uring.completion().next().is_none() {
                self.ring.wait();
            }
            let read = self.ring.reads[0].as_mut().unwrap();
            let kept = read.progress.done + usize::try_from(result).unwrap_or(0);
            read.chunk.part[kept..].fill(0xEE);
            self.ring.finish_read(0, result, &self.shared);
        }

        fn end(&mut self) -> Completion {
            loop {
                if let Some(done) = self.mailbox.try_pop() {
                    return done;
                }
                self.ring.wait();
                self.ring.collect(&self.shared);
            }
        }
    }

    #[test]
    fn short_and_postponed_reads_go_on_where_they_ended() {
        for direct in [DirectMode::Off, DirectMode::Auto] {
            for results in [&[1][..], &[4096, 5000], &[-libc::EAGAIN, 70_001, -libc::EINTR, 4095], &[]] {
                let Some(mut asked) = Asked::new(direct) else { return };
                for &result in results {
                    asked.pretend(result);
                }
                assert!(asked.ring.gather(&asked.shared));
                let done = asked.end();
                done.result.unwrap();
                let start = OFFSET as usize;
                assert_eq!(done.tag, 7);
                assert!(done.slot[start..start + BYTES] == asked.bytes[start..start + BYTES], "{results:?}");
            }
        }
    }

    #[test]
    fn a_read_that_gives_nothing_or_fails_is_named() {
        let Some(mut asked) = Asked::new(DirectMode::Off) else { return };
        asked.pretend(5000);
        asked.pretend(0);
        let error = asked.end().result.unwrap_err();
        assert!(matches!(error, StoreError::ShortRead { got: 5000, .. }), "{error}");
        let Some(mut asked) = Asked::new(DirectMode::Off) else { return };
        asked.pretend(-libc::EIO);
        let error = asked.end().result.unwrap_err();
        assert!(matches!(error, StoreError::Read { .. }), "{error}");
    }

    #[test]
    fn a_file_cut_off_under_a_short_read_has_changed() {
        let Some(mut asked) = Asked::new(DirectMode::Off) else { return };
        let path = asked.dir.path().join("weights");
        asked.pretend(5000);
        std::fs::File::options().write(true).open(path).unwrap().set_len(6000).unwrap();
        // Whether the read under way saw the old length or the new one.
        let error = asked.end().result.unwrap_err();
        assert!(matches!(error, StoreError::FileChanged { what: "length", .. }), "{error}");
    }
}
