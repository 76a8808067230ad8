//! `--dump-logits`: a safetensors file of ids and logits, written as they come, there whole or not at all.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use k3_pipeline::units::TokenId;
use tempfile::TempPath;

use crate::failure::Failure;
use crate::output;

/// Bytes before the data: the length of the header, and the header, padded with spaces. The data comes
/// first and its length is known last.
const HEADER_BYTES: usize = 256;

/// A file under way.
pub(crate) struct LogitsFile {
    path: PathBuf,
    file: BufWriter<File>,
    /// Its name until it is whole.
    temporary: TempPath,
    vocab: usize,
    rows: usize,
}

impl LogitsFile {
    /// Begins the file; refuses a place that cannot be written.
    pub(crate) fn create(path: &Path, vocab: usize) -> Result<Self, Failure> {
        let (file, temporary) = output::place("--dump-logits", path)?;
        let mut file = BufWriter::new(file);
        file.write_all(&[b' '; HEADER_BYTES]).map_err(|error| failed(path, error))?;
        Ok(Self { path: path.to_owned(), file, temporary, vocab, rows: 0 })
    }

    /// Adds rows of logits [rows, V].
    pub(crate) fn push(&mut self, logits: &[f32]) -> Result<(), Failure> {
        self.rows += logits.len() / self.vocab;
        for value in logits {
            self.file.write_all(&value.to_le_bytes()).map_err(|error| failed(&self.path, error))?;
        }
        Ok(())
    }

    /// Adds the ids, one for each row, and puts the file in its place.
    pub(crate) fn finish(mut self, ids: &[TokenId]) -> Result<(), Failure> {
        let path = self.path.clone();
        self.write_end(&ids[..self.rows.min(ids.len())]).map_err(|error| failed(&path, error))?;
        let file = self.file.into_inner().map_err(|error| failed(&path, error.into_error()))?;
        file.sync_all().map_err(|error| failed(&path, error))?;
        self.temporary.persist(&path).map_err(|error| failed(&path, error.error))
    }

    fn write_end(&mut self, ids: &[TokenId]) -> io::Result<()> {
        for id in ids {
            self.file.write_all(&id.0.to_le_bytes())?;
        }
        let header = header(self.rows, self.vocab);
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&(HEADER_BYTES as u64 - 8).to_le_bytes())?;
        self.file.write_all(header.as_bytes())?;
        self.file.flush()
    }
}

/// The header without its padding; at most 200 bytes for any sizes that fit 64 bits.
fn header(rows: usize, vocab: usize) -> String {
    let logits = rows * vocab * 4;
    let end = logits + rows * 4;
    format!(
        r#"{{"logits":{{"dtype":"F32","shape":[{rows},{vocab}],"data_offsets":[0,{logits}]}},"ids":{{"dtype":"I32","shape":[{rows}],"data_offsets":[{logits},{end}]}}}}"#
    )
}

fn failed(path: &Path, error: io::Error) -> Failure {
    Failure::run(anyhow::Error::new(error).context(format!("--dump-logits: cannot write {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_leaves_room_for_any_size() {
        let longest = header(1 << 31, 1 << 20);
        assert!(longest.len() <= HEADER_BYTES - 8, "{} bytes", longest.len());
    }

    #[test]
    fn nothing_is_there_until_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("logits.safetensors");
        let mut file = LogitsFile::create(&path, 2).unwrap();
        file.push(&[1.0, 2.0, 3.0, 4.0]).unwrap();
        assert!(!path.exists());
        file.finish(&[TokenId(7), TokenId(9)]).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len(), HEADER_BYTES + 16 + 8);
        let json: serde_json::Value = serde_json::from_slice(&bytes[8..HEADER_BYTES]).unwrap();
        assert_eq!(json["ids"]["data_offsets"][1], 24);
        assert_eq!(bytes[HEADER_BYTES + 16..], [7, 0, 0, 0, 9, 0, 0, 0]);
    }

    #[test]
    fn a_place_that_cannot_be_written_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(LogitsFile::create(dir.path(), 2).is_err());
        assert!(LogitsFile::create(Path::new("/dev/null"), 2).is_err());
        assert!(LogitsFile::create(&dir.path().join("absent/file"), 2).is_err());
    }
}
