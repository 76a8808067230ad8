//! What stderr may be used for beside errors: `--quiet`, terminals, colours.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether `--quiet` was given: a wish of the whole process.
static QUIET: AtomicBool = AtomicBool::new(false);

/// From now on only errors go to stderr.
pub(crate) fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Whether reports are wanted.
pub(crate) fn reports() -> bool {
    !QUIET.load(Ordering::Relaxed)
}

/// Whether somebody watches stderr: a terminal, and not `--quiet`.
pub(crate) fn is_watched() -> bool {
    reports() && io::stderr().is_terminal()
}

/// Whether stderr takes colours: a terminal, and no NO_COLOR.
pub(crate) fn takes_colour() -> bool {
    io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Text on stderr that `--quiet` keeps away. A closed stderr leaves nobody to tell.
pub(crate) fn report(text: &str) {
    if reports() {
        let _ = io::stderr().lock().write_all(text.as_bytes());
    }
}
