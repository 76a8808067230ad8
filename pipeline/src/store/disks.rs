//! The disks that weights lie on, each with a queue and readers of its own.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use serde::Serialize;

use super::error::StoreError;
use super::files::FileTable;
use super::pread;
use super::queue::{Mailbox, Shared};
use super::reader::{BlockReader, PreadReader};
use super::request::{Completion, Request};
use super::uring;
use crate::memory::arena::{ArenaRegion, SlotBuf};
use crate::model::tensors::WeightFile;
use crate::plan::{IoEngine, ReaderPlan};

/// How the disks are to be read.
#[derive(Clone)]
pub struct DiskOptions<'a> {
    /// The plan's.
    pub plan: &'a ReaderPlan,
    /// Requests of all clients that may be outstanding at once.
    pub requests_max: usize,
    /// Bytes of the largest slot.
    pub slot_bytes_max: usize,
    /// Arenas to register with the kernel's I/O rings.
    pub regions: &'a [ArenaRegion],
    /// A reader of one's own (throttled, failing); it runs under the thread engine.
    pub reader: Option<Arc<dyn BlockReader>>,
}

/// What is really in force on one disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DiskReport {
    /// Directory of the first file.
    pub directory: PathBuf,
    /// Weight files on it.
    pub files: usize,
    /// Those read with O_DIRECT.
    pub direct_files: usize,
    /// "io_uring" or "pread".
    pub engine: &'static str,
    /// Reads under way at once.
    pub depth: usize,
    /// Whether slots are registered with the ring.
    pub registered: bool,
    /// Why it is not io_uring, when that was wished for.
    pub fallback: Option<String>,
}

struct Disk {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    report: DiskReport,
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.shared.close();
        for thread in self.threads.drain(..) {
            // A reader that panicked outside a read has been reported by the panic hook already.
            let _ = thread.join();
        }
    }
}

/// All disks of a model. Dropping the last handle stops and joins every reader.
pub struct Disks {
    files: Arc<FileTable>,
    disks: Vec<Disk>,
    /// Disk of each file.
    disk_of: Vec<usize>,
}

impl Disks {
    /// Opens the files and starts the readers: one queue for each device that files lie on.
    ///
    /// # Errors
    /// A file that cannot be opened or changed; an engine or mode demanded and not to be had.
    pub fn open(files: &[WeightFile], options: &DiskOptions<'_>) -> Result<Arc<Self>, StoreError> {
        let files = Arc::new(FileTable::open(files, options.plan.direct)?);
        let mut devices: Vec<u64> = Vec::new();
        let mut disk_of = Vec::with_capacity(files.files().len());
        for file in files.files() {
            let known = devices.iter().position(|&d| d == file.device());
            disk_of.push(known.unwrap_or(devices.len()));
            if known.is_none() {
                devices.push(file.device());
            }
        }
        let disks = (0..devices.len()).map(|disk| start_disk(&files, &disk_of, disk, options));
        let disks = disks.collect::<Result<_, _>>()?;
        Ok(Arc::new(Self { files, disks, disk_of }))
    }

    /// The files.
    #[must_use]
    pub fn files(&self) -> &FileTable {
        &self.files
    }

    /// What is in force, disk by disk.
    pub fn reports(&self) -> impl Iterator<Item = &DiskReport> {
        self.disks.iter().map(|d| &d.report)
    }
}

fn start_disk(
    files: &Arc<FileTable>,
    disk_of: &[usize],
    disk: usize,
    options: &DiskOptions<'_>,
) -> Result<Disk, StoreError> {
    let mine = || files.files().iter().zip(disk_of).filter(|&(_, &d)| d == disk).map(|(f, _)| f);
    let directory = mine().next().and_then(|f| f.path().parent()).map(PathBuf::from).unwrap_or_default();
    let depth = options.plan.depth.max(1);
    let mut report = DiskReport {
        directory,
        files: mine().count(),
        direct_files: mine().filter(|f| f.is_direct()).count(),
        engine: "pread",
        depth,
        registered: false,
        fallback: None,
    };
    let shared =
        |bell| Arc::new(Shared::new(Arc::clone(files), options.requests_max, options.slot_bytes_max, bell));
    if options.plan.engine != IoEngine::Pread {
        let ring = match &options.reader {
            Some(_) => Err(std::io::Error::other("a throttled or failing reader runs on threads")),
            None => uring::Ring::new(depth, options.regions),
        };
        match ring {
            Ok((ring, bell)) => {
                report.engine = "io_uring";
                report.registered = ring.is_registered();
                let shared = shared(Some(bell));
                let threads = vec![ring.start(&shared)?];
                return Ok(Disk { shared, threads, report });
            }
            Err(source) if options.plan.engine == IoEngine::Uring => {
                return Err(StoreError::EngineUnavailable { engine: "io_uring", source });
            }
            Err(source) => report.fallback = Some(source.to_string()),
        }
    }
    let reader = options.reader.clone().unwrap_or_else(|| Arc::new(PreadReader));
    let mut disk = Disk { shared: shared(None), threads: Vec::with_capacity(depth), report };
    pread::start(&disk.shared, &reader, depth, &mut disk.threads)?;
    Ok(disk)
}

/// One reader's customer: issues requests and gets its own completions back.
pub struct Client {
    disks: Arc<Disks>,
    mailbox: Arc<Mailbox>,
    outstanding: usize,
}

impl Client {
    /// A client with at most `requests_max` outstanding requests.
    #[must_use]
    pub fn new(disks: &Arc<Disks>, requests_max: usize) -> Self {
        let mailbox = Arc::new(Mailbox::new(requests_max));
        Self { disks: Arc::clone(disks), mailbox, outstanding: 0 }
    }

    /// The disks it reads from.
    #[must_use]
    pub fn disks(&self) -> &Disks {
        &self.disks
    }

    /// Requests whose completions have not been taken.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Issues a read.
    ///
    /// # Errors
    /// An extent outside its file, a slot too small, a full queue: the slot comes back.
    pub fn submit(&mut self, request: Request) -> Result<(), (SlotBuf, StoreError)> {
        let disk = match self.check(&request) {
            Ok(disk) => disk,
            Err(error) => return Err((request.slot, error)),
        };
        self.disks.disks[disk].shared.submit(request, &self.mailbox)?;
        self.outstanding += 1;
        Ok(())
    }

    fn check(&self, request: &Request) -> Result<usize, StoreError> {
        let expected = request.pieces.slot_bytes();
        if expected > request.slot.len() {
            let (expected, got) = (expected as u64, request.slot.len() as u64);
            return Err(StoreError::SlotTooSmall { purpose: "a read", expected, got });
        }
        let mut disk = None;
        for piece in request.pieces.as_slice() {
            self.disks.files.locate(&piece.extent)?;
            disk.get_or_insert(self.disks.disk_of[usize::from(piece.extent.file.0)]);
        }
        disk.ok_or(StoreError::NoSlot { purpose: "a read of nothing" })
    }

    /// The next completion; `None` when nothing is outstanding. Waits.
    pub fn wait(&mut self) -> Option<Completion> {
        self.outstanding = self.outstanding.checked_sub(1)?;
        Some(self.mailbox.pop())
    }

    /// A completion that is there already.
    pub fn poll(&mut self) -> Option<Completion> {
        let completion = self.mailbox.try_pop()?;
        self.outstanding -= 1;
        Some(completion)
    }

    /// Withdraws what is not under way yet. Every request still completes, some with
    /// [`StoreError::Cancelled`].
    pub fn cancel(&mut self) {
        for disk in &self.disks.disks {
            disk.shared.cancel(&self.mailbox);
        }
    }
}
