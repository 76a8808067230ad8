//! The blocking engine: a few threads per disk that call a [`BlockReader`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use super::error::StoreError;
use super::queue::{Chunk, Shared};
use super::reader::{BlockReader, read_exact_at, read_failed};

/// Starts `depth` reader threads.
pub(crate) fn start(
    shared: &Arc<Shared>,
    reader: &Arc<dyn BlockReader>,
    depth: usize,
    threads: &mut Vec<JoinHandle<()>>,
) -> Result<(), StoreError> {
    for _ in 0..depth.max(1) {
        let (shared, reader) = (Arc::clone(shared), Arc::clone(reader));
        let run = move || work(&shared, &*reader);
        let thread = thread::Builder::new().name("k3-read".to_owned()).spawn(run);
        threads.push(thread.map_err(|source| StoreError::Thread { source })?);
    }
    Ok(())
}

fn work(shared: &Shared, reader: &dyn BlockReader) {
    let mut pending = shared.pending();
    while !pending.closed {
        let Some(mut chunk) = pending.take_chunk() else {
            pending = shared.wait_for_work(pending);
            continue;
        };
        drop(pending);
        let result = read(shared, reader, &mut chunk);
        let finished = shared.pending().finish(chunk, result);
        if let Some(finished) = finished {
            finished.deliver(&shared.files);
        }
        pending = shared.pending();
    }
}

fn read(shared: &Shared, reader: &dyn BlockReader, chunk: &mut Chunk) -> Result<(), StoreError> {
    let file = shared.files.get(chunk.file)?;
    let (offset, needed) = (chunk.offset, chunk.needed);
    // A reader that panics must not leave a waiter without an answer.
    let read = AssertUnwindSafe(|| read_exact_at(reader, file, offset, &mut chunk.part, needed));
    match catch_unwind(read) {
        Ok(result) => result?,
        Err(_) => {
            return Err(read_failed(file, offset, needed, std::io::Error::other("the reader panicked")));
        }
    }
    file.check_unchanged()
}
