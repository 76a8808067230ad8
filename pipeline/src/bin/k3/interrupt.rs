//! Ctrl-C: the first ends the pass under way at its next block, the second the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::failure::Failure;

/// Lets SIGINT and SIGTERM set `cancel` from now on.
pub(crate) fn listen(cancel: Arc<AtomicBool>) -> Result<(), Failure> {
    ctrlc::set_handler(move || {
        if cancel.swap(true, Ordering::SeqCst) {
            // Asked twice: not even the report is wanted.
            std::process::exit(130);
        }
    })
    .map_err(Failure::run)
}
