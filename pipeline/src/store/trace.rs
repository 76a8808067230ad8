//! Traces of expert requests: what `k3 generate --trace FILE` records and `cargo xtask cache-sim` replays.
//!
//! Tab-separated text with a head line: pass number, layer (from 0), and the wanted experts, best rank
//! first, separated by commas. An expert whose rank is not its place in the list (as in passes of more
//! than one token) is written `expert:rank`.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::error::StoreError;
use crate::source::ExpertRequest;
use crate::units::{ExpertId, LayerIndex};

const HEAD: &str = "position\tlayer\texperts_in_router_rank_order";

/// One request: the experts one layer wanted in one pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// Number of the pass; of the token, in one-token passes.
    pub position: u64,
    /// The layer.
    pub layer: LayerIndex,
    /// Distinct experts, best rank first.
    pub wanted: Vec<ExpertRequest>,
}

/// A trace file is not one.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("line {line}: {what} is {got:?}; expected {expected}")]
pub struct TraceError {
    /// Line, from 1.
    pub line: usize,
    /// Which part of it.
    pub what: &'static str,
    /// What stands there.
    pub got: String,
    /// What should.
    pub expected: &'static str,
}

/// Reads a whole trace.
///
/// # Errors
/// The first line that is no record.
pub fn parse(text: &str) -> Result<Vec<TraceRecord>, TraceError> {
    let mut lines = text.lines().enumerate().map(|(i, line)| (i + 1, line));
    match lines.next() {
        Some((_, head)) if head == HEAD => {}
        other => {
            let got = other.map_or(String::new(), |(_, line)| line.to_owned());
            return Err(TraceError { line: 1, what: "head line", got, expected: HEAD });
        }
    }
    lines.map(|(line, text)| parse_record(line, text)).collect()
}

fn parse_record(line: usize, text: &str) -> Result<TraceRecord, TraceError> {
    let mut fields = text.split('\t');
    let mut field =
        |what| fields.next().ok_or(TraceError { line, what, got: text.to_owned(), expected: "three fields" });
    let (position, layer, experts) = (field("position")?, field("layer")?, field("experts")?);
    if let Some(extra) = fields.next() {
        return Err(TraceError {
            line,
            what: "fourth field",
            got: extra.to_owned(),
            expected: "no such field",
        });
    }
    let mut wanted: Vec<ExpertRequest> = Vec::new();
    for (place, item) in experts.split(',').enumerate() {
        let (expert, rank) = item.split_once(':').unwrap_or((item, ""));
        let expert = ExpertId(number(line, "expert", expert, "a number below 65536")?);
        let rank = if item.contains(':') {
            number(line, "rank", rank, "a number below 256")?
        } else {
            u8::try_from(place).unwrap_or(u8::MAX)
        };
        if wanted.iter().any(|w| w.expert == expert) {
            let got = item.to_owned();
            return Err(TraceError { line, what: "expert", got, expected: "each expert once" });
        }
        wanted.push(ExpertRequest { expert, rank });
    }
    Ok(TraceRecord {
        position: number(line, "position", position, "a number")?,
        layer: LayerIndex(number(line, "layer", layer, "a number below 65536")?),
        wanted,
    })
}

fn number<T: std::str::FromStr>(
    line: usize,
    what: &'static str,
    text: &str,
    expected: &'static str,
) -> Result<T, TraceError> {
    text.parse().map_err(|_| TraceError { line, what, got: text.to_owned(), expected })
}

/// Writes a trace while an engine runs. Allocates at construction only.
#[derive(Debug)]
pub struct TraceWriter {
    path: PathBuf,
    out: BufWriter<File>,
    position: u64,
    last_layer: Option<LayerIndex>,
}

impl TraceWriter {
    /// Creates the file and writes the head line.
    ///
    /// # Errors
    /// When the file cannot be made or written.
    pub fn create(path: &Path) -> Result<Self, StoreError> {
        let failed = |source| StoreError::Trace { path: path.to_owned(), source };
        let mut out = BufWriter::new(File::create(path).map_err(failed)?);
        writeln!(out, "{HEAD}").map_err(failed)?;
        Ok(Self { path: path.to_owned(), out, position: 0, last_layer: None })
    }

    /// Adds one request. A layer that is not past the one before begins a new pass.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn record(&mut self, layer: LayerIndex, wanted: &[ExpertRequest]) -> Result<(), StoreError> {
        if self.last_layer.is_some_and(|last| layer <= last) {
            self.position += 1;
            self.flush()?;
        }
        self.last_layer = Some(layer);
        self.write(layer, wanted).map_err(|source| StoreError::Trace { path: self.path.clone(), source })
    }

    fn write(&mut self, layer: LayerIndex, wanted: &[ExpertRequest]) -> io::Result<()> {
        write!(self.out, "{}\t{layer}\t", self.position)?;
        for (place, w) in wanted.iter().enumerate() {
            let comma = if place == 0 { "" } else { "," };
            write!(self.out, "{comma}{}", w.expert)?;
            if usize::from(w.rank) != place {
                write!(self.out, ":{}", w.rank)?;
            }
        }
        writeln!(self.out)
    }

    /// Writes what is buffered.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn flush(&mut self) -> Result<(), StoreError> {
        self.out.flush().map_err(|source| StoreError::Trace { path: self.path.clone(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(list: &[(u16, u8)]) -> Vec<ExpertRequest> {
        list.iter().map(|&(e, rank)| ExpertRequest { expert: ExpertId(e), rank }).collect()
    }

    #[test]
    fn what_is_recorded_is_what_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.tsv");
        let mut w = TraceWriter::create(&path).unwrap();
        let records = [
            (0, 1, wanted(&[(5, 0), (3, 1), (900, 2)])),
            (0, 2, wanted(&[(7, 0)])),
            (1, 1, wanted(&[(1, 0), (2, 0), (9, 1), (4, 1)])),
            (2, 1, wanted(&[(1, 0)])),
        ];
        for (_, layer, experts) in &records {
            w.record(LayerIndex(*layer), experts).unwrap();
        }
        w.flush().unwrap();
        let read = parse(&std::fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(read.len(), records.len());
        for (r, (position, layer, experts)) in read.iter().zip(&records) {
            assert_eq!((r.position, r.layer.0, &r.wanted), (*position, *layer, experts));
        }
    }

    #[test]
    fn a_bad_line_is_named() {
        for (body, what) in [
            ("0\t1", "experts"),
            ("x\t1\t2", "position"),
            ("0\t70000\t2", "layer"),
            ("0\t1\t2,,3", "expert"),
            ("0\t1\t2:300", "rank"),
            ("0\t1\t2,3,2", "expert"),
            ("0\t1\t2\t3", "fourth field"),
        ] {
            let e = parse(&format!("{HEAD}\n0\t1\t2\n{body}\n")).unwrap_err();
            assert_eq!((e.line, e.what), (3, what), "{body}");
        }
        assert_eq!(parse("nonsense").unwrap_err().line, 1);
    }
}
