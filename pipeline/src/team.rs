//! A team of compute threads: fork, join, and the safe ways of cutting work between them.
//!
//! Work is cut by rows of a matrix, by heads or by tokens, never inside a sum, so results do not
//! depend on the number of threads. A fork allocates nothing: the job is a borrowed closure, a waiting
//! thread spins for a moment and then parks. Shared work waits for no thread that has not begun, so a
//! core that another program has taken costs its part of the speed and no more.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};

use k3_kernel::Out;

pub use cut::{Cut, Tile, Tiles};

mod cut;

/// Rows that a matrix product may be cut at: the height of a weight tile.
pub const ROW_GRANULE: usize = k3_kernel::TILE_ROWS;

/// In [`Shared::gate`]: the job may be entered.
const OPEN: u64 = 1 << 23;
/// In [`Shared::gate`]: how many workers are inside.
const INSIDE: u64 = OPEN - 1;
/// In [`Shared::gate`]: one in the number of the job, which fills the bits above.
const NUMBER: u64 = OPEN << 1;
/// Turns of the wait loop before a thread parks: a few tens of microseconds.
const SPINS: u32 = 2000;
/// Pieces per thread that rows are cut into, so that a delayed thread does not hold up the rest.
const PIECES_PER_THREAD: usize = 4;

/// Why a team could not be started or did not finish.
#[derive(Debug, thiserror::Error)]
pub enum TeamError {
    /// A thread could not be started.
    #[error("cannot start compute thread {index}: {source}; set fewer `compute.threads`")]
    Spawn {
        /// Its number.
        index: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// A job panicked in one of the threads; all of them have left it.
    #[error("a compute thread failed; its message is above. This is a bug of the engine")]
    Panicked,
}

/// A borrowed job with its lifetime erased; see the proof in [`Team::fork`].
struct Job {
    call: *const (dyn Fn(usize) + Sync),
    caller: Thread,
}

struct Shared {
    /// Written by the caller while the gate is closed and nobody inside, read by workers that are inside.
    job: UnsafeCell<Option<Job>>,
    /// The number of the current job, [`OPEN`], and how many are [`INSIDE`]: one word, so that a worker
    /// knows which job it has entered, and enters none twice.
    gate: AtomicU64,
    /// Workers that have finished the current job.
    finished: AtomicUsize,
    caller_parked: AtomicBool,
    panicked: AtomicBool,
    stop: AtomicBool,
    spins: u32,
    parked: Box<[AtomicBool]>,
}

// SAFETY: `job` is the only part that is not Sync by itself. The caller writes it while the gate is closed
// and nobody is inside, so that none can enter; workers read it while they are inside. Both go through
// `gate`, which orders them (Release/Acquire).
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer in `job` is only followed while the caller is inside `fork`, and what it points
// to is Sync; the rest is Send.
unsafe impl Send for Shared {}

/// Compute threads; the caller of [`Team::run`] is one of them, with number 0.
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Team {
    /// Starts `threads - 1` threads (`threads` of 0 counts as 1). With `pin` each is pinned to a core of
    /// its own, where there are enough; the caller's thread is left alone, since threads that it starts
    /// later would inherit its core.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn new(threads: usize, pin: bool) -> Result<Self, TeamError> {
        let threads = threads.max(1);
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            gate: AtomicU64::new(0),
            finished: AtomicUsize::new(0),
            caller_parked: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            spins: if threads > available { 0 } else { SPINS },
            parked: (1..threads).map(|_| AtomicBool::new(false)).collect(),
        });
        let cores = if pin { core_affinity::get_core_ids().unwrap_or_default() } else { Vec::new() };
        let mut team = Self { shared, workers: Vec::with_capacity(threads - 1) };
        for index in 1..threads {
            let shared = Arc::clone(&team.shared);
            let core = if cores.len() >= threads { cores.get(index).copied() } else { None };
            let worker = std::thread::Builder::new()
                .name(format!("k3-compute-{index}"))
                .spawn(move || {
                    if let Some(core) = core
                        && !core_affinity::set_for_current(core)
                    {
                        tracing::warn!(index, core = core.id, "thread not pinned");
                    }
                    work(&shared, index);
                })
                .map_err(|source| TeamError::Spawn { index, source })?;
            team.workers.push(worker);
        }
        Ok(team)
    }

    /// Number of threads, the caller's included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `job(i)` once in each thread i and returns when all have returned.
    ///
    /// # Errors
    /// [`TeamError::Panicked`] when the job panicked anywhere; the team can be used again.
    pub fn run(&mut self, job: &(dyn Fn(usize) + Sync)) -> Result<(), TeamError> {
        self.fork(job, Attendance::Everyone)
    }

    /// Calls `job(0)` here and `job(i)` in worker i, at most once in each, and returns when all that
    /// began have returned.
    fn fork(&mut self, job: &(dyn Fn(usize) + Sync), attendance: Attendance) -> Result<(), TeamError> {
        let (shared, workers) = (&*self.shared, self.workers.len());
        if workers > 0 {
            // SAFETY: only the lifetime is changed. The pointer is followed by workers inside the gate
            // alone, and this function does not return, not even by a panic, before the gate is closed
            // and nobody is inside; so the closure outlives every use.
            let call = unsafe {
                std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(job)
            };
            // SAFETY: `&mut self`, and at the end of every fork the gate is closed and nobody inside: no
            // worker reads `job` now.
            unsafe { *shared.job.get() = Some(Job { call, caller: std::thread::current() }) };
            shared.finished.store(0, Ordering::Relaxed);
            shared.gate.fetch_add(NUMBER | OPEN, Ordering::SeqCst);
            self.wake_parked();
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        if workers > 0 {
            if attendance == Attendance::Everyone {
                shared.wait_until(|| shared.finished.load(Ordering::SeqCst) == workers);
            }
            shared.gate.fetch_and(!OPEN, Ordering::SeqCst);
            shared.wait_until(|| shared.gate.load(Ordering::SeqCst) & INSIDE == 0);
        }
        if shared.panicked.swap(false, Ordering::AcqRel) || own.is_err() {
            return Err(TeamError::Panicked);
        }
        Ok(())
    }

    fn wake_parked(&self) {
        for (flag, worker) in self.shared.parked.iter().zip(&self.workers) {
            if flag.swap(false, Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
    }

    /// Calls `job(worker, item)` once for every item of `0..items`; threads take the next free item. A
    /// single item is not worth waking anybody: the caller runs it.
    ///
    /// # Errors
    /// As [`Team::run`].
    pub fn items(&mut self, items: usize, job: &(dyn Fn(usize, usize) + Sync)) -> Result<(), TeamError> {
        if items <= 1 {
            let alone = catch_unwind(AssertUnwindSafe(|| (0..items).for_each(|item| job(0, item))));
            return alone.map_err(|_| TeamError::Panicked);
        }
        let next = AtomicUsize::new(0);
        let work = |worker| loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                return;
            }
            job(worker, item);
        };
        self.fork(&work, Attendance::WhoeverComes)
    }

    /// Cuts the rows of all `outs`, of which there are equally many, at multiples of [`ROW_GRANULE`] and
    /// calls `job(scratch, rows, parts)` for every piece, with the scratch of the thread that runs it.
    ///
    /// # Errors
    /// As [`Team::run`].
    ///
    /// # Panics
    /// When the numbers of rows differ.
    pub fn rows<S: Send, const N: usize>(
        &mut self,
        scratch: &mut PerWorker<S>,
        outs: [Out<'_>; N],
        job: impl Fn(&mut S, Range<usize>, [Out<'_>; N]) + Sync,
    ) -> Result<(), TeamError> {
        let rows = outs.first().map_or(0, Out::rows);
        assert!(outs.iter().all(|out| out.rows() == rows), "outputs of different heights");
        let granules = rows.div_ceil(ROW_GRANULE);
        let pieces =
            granules.min(self.threads() * if self.workers.is_empty() { 1 } else { PIECES_PER_THREAD });
        let edge = |piece: usize| (granules * piece / pieces * ROW_GRANULE).min(rows);
        let scratch = scratch.lend(self.threads());
        self.items(pieces, &|worker, piece| {
            let rows = edge(piece)..edge(piece + 1);
            // SAFETY: `edge` is monotone, so the ranges of different pieces are disjoint, and `items`
            // hands out each piece once.
            let parts = std::array::from_fn(|i| unsafe { outs[i].part(rows.clone()) });
            // SAFETY: a worker number belongs to one thread, which runs one item at a time.
            let scratch = unsafe { scratch.get(worker) };
            job(scratch, rows, parts);
        })
    }

    /// Calls `job(scratch, i, part i of cut)` for every part, with the scratch of the thread that runs it.
    ///
    /// # Errors
    /// As [`Team::run`].
    pub fn parts<S: Send, C: Cut>(
        &mut self,
        scratch: &mut PerWorker<S>,
        cut: C,
        job: impl Fn(&mut S, usize, C::Part) + Sync,
    ) -> Result<(), TeamError> {
        let scratch = scratch.lend(self.threads());
        self.items(cut.count(), &|worker, item| {
            // SAFETY: `cut` is used up here, `items` hands out each item once, and parts of different
            // items are disjoint.
            let part = unsafe { cut.part(item) };
            // SAFETY: a worker number belongs to one thread, which runs one item at a time.
            let scratch = unsafe { scratch.get(worker) };
            job(scratch, item, part);
        })
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.wake_parked();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its jobs: there is nothing to learn from its result.
            let _ = worker.join();
        }
    }
}

/// Which threads a job needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attendance {
    /// All of them.
    Everyone,
    /// The caller, who can do all of it, and whoever begins before the caller is done.
    WhoeverComes,
}

impl Shared {
    /// Enters the current job, unless it is closed or number `last`; returns its number.
    fn enter(&self, last: u64) -> Option<u64> {
        let number = |gate| gate / NUMBER;
        let next = |gate| (gate & OPEN != 0 && number(gate) != last).then_some(gate + 1);
        self.gate.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).ok().map(number)
    }

    /// Waits for a job other than `last` and enters it; `None` when the team ends. `parked` is the worker's.
    fn wait_and_enter(&self, parked: &AtomicBool, last: u64) -> Option<u64> {
        loop {
            for _ in 0..self.spins {
                let entered = self.enter(last);
                if entered.is_some() || self.stop.load(Ordering::SeqCst) {
                    return entered;
                }
                std::hint::spin_loop();
            }
            // Whoever opens the gate or stops the team looks at the flag after that, and this thread at
            // both after the flag: one of them sees the other.
            parked.store(true, Ordering::SeqCst);
            let entered = self.enter(last);
            if entered.is_some() || self.stop.load(Ordering::SeqCst) {
                parked.store(false, Ordering::SeqCst);
                return entered;
            }
            std::thread::park();
        }
    }

    /// The caller's wait: spins, then parks until a worker leaves.
    fn wait_until(&self, done: impl Fn() -> bool) {
        for _ in 0..self.spins {
            if done() {
                return;
            }
            std::hint::spin_loop();
        }
        self.caller_parked.store(true, Ordering::SeqCst);
        while !done() {
            std::thread::park();
        }
        self.caller_parked.store(false, Ordering::SeqCst);
    }
}

fn work(shared: &Shared, index: usize) {
    let mut last = 0;
    while let Some(number) = shared.wait_and_enter(&shared.parked[index - 1], last) {
        last = number;
        // SAFETY: inside, so `fork` has written the job and does not write again before this worker has
        // left.
        let job = unsafe { &*shared.job.get() };
        let caller = job.as_ref().map(|job| {
            // SAFETY: `fork` keeps the closure alive until this worker has left.
            if catch_unwind(AssertUnwindSafe(|| unsafe { (*job.call)(index) })).is_err() {
                shared.panicked.store(true, Ordering::Release);
            }
            job.caller.clone()
        });
        shared.finished.fetch_add(1, Ordering::SeqCst);
        shared.gate.fetch_sub(1, Ordering::SeqCst);
        if let Some(caller) = caller
            && shared.caller_parked.load(Ordering::SeqCst)
        {
            caller.unpark();
        }
    }
}

/// One value for each thread of a team: scratch memory that needs no lock.
pub struct PerWorker<S> {
    values: Box<[UnsafeCell<S>]>,
}

impl<S> PerWorker<S> {
    /// `make()` for each of `threads` threads.
    pub fn new(threads: usize, mut make: impl FnMut() -> S) -> Self {
        Self { values: (0..threads.max(1)).map(|_| UnsafeCell::new(make())).collect() }
    }

    /// The first thread's value, for work outside a team.
    pub fn first(&mut self) -> &mut S {
        self.values[0].get_mut()
    }

    /// # Panics
    /// When there are fewer values than threads.
    fn lend(&mut self, threads: usize) -> Lent<'_, S> {
        assert!(self.values.len() >= threads, "scratch for {} threads, team of {threads}", self.values.len());
        Lent { values: &self.values }
    }
}

/// A [`PerWorker`] borrowed for one run of a team.
struct Lent<'a, S> {
    values: &'a [UnsafeCell<S>],
}

// SAFETY: `get` is unsafe and its callers give each value to one thread only.
unsafe impl<S: Send> Sync for Lent<'_, S> {}

impl<S> Lent<'_, S> {
    /// # Safety
    /// No two live references to the value of one worker.
    #[allow(clippy::mut_from_ref)]
    unsafe fn get(&self, worker: usize) -> &mut S {
        // SAFETY: the exclusive borrow of the PerWorker lives as long as self; the caller's promise
        // excludes a second reference.
        unsafe { &mut *self.values[worker].get() }
    }
}

#[cfg(test)]
mod tests;
