//! Standard output, buffered and locked once; sizes as people read them.

use std::io::{self, BufWriter, StdoutLock, Write};

use serde::Serialize;

use crate::failure::Outcome;

/// Locked, buffered stdout. Flush it before the end: a full disk must not pass unseen.
pub(crate) fn stdout() -> BufWriter<StdoutLock<'static>> {
    BufWriter::with_capacity(1 << 16, io::stdout().lock())
}

/// Prints one JSON object and a line end.
pub(crate) fn print_json(value: &impl Serialize) -> Outcome {
    let mut out = stdout();
    serde_json::to_writer_pretty(&mut out, value).map_err(io::Error::from)?;
    writeln!(out)?;
    out.flush()?;
    Ok(())
}

/// "1.19 GB", "17.55 MB", "512 B": decimal units, as disks and the model's card count.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [(&str, f64); 4] = [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
    let value = bytes as f64;
    match UNITS.iter().find(|(_, unit)| value >= *unit) {
        Some((name, unit)) => format!("{:.2} {name}", value / unit),
        None => format!("{bytes} B"),
    }
}
