//! Ctrl-C: the first ends the pass under way at its next block, the second the process.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::failure::{Exit, Failure};
use crate::terminal;

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

/// Lets SIGINT and SIGTERM end the process, with a word: for what has nothing to put in order.
pub(crate) fn end_at_once() -> Result<(), Failure> {
    ctrlc::set_handler(move || {
        // Below the bar that may stand there; a closed stderr leaves nobody to tell.
        let below = if terminal::is_watched() { "\n" } else { "" };
        let _ = writeln!(std::io::stderr().lock(), "{below}k3: interrupted");
        std::process::exit(Exit::Run as i32);
    })
    .map_err(Failure::run)
}
