//! `SHA256SUMS`: every golden file is what it was when it was made.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Why the golden files cannot be trusted.
#[derive(Debug, thiserror::Error)]
pub enum ChecksumError {
    /// A file could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A line of the list is not `digest  name`.
    #[error("{path}:{line}: expected `<64 hexadecimal digits>  <name>`")]
    Line {
        /// The list.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
    },
    /// A file has changed.
    #[error("{path}: sha256 is {found}, expected {expected}; restore it with git")]
    Changed {
        /// The file.
        path: PathBuf,
        /// Digest in the list.
        expected: String,
        /// Digest of the file.
        found: String,
    },
}

/// Checks every file named in `list` (the format of `sha256sum`; names relative to its folder) and
/// returns how many there were.
///
/// # Errors
/// At the first file that is absent or has changed, or line that cannot be read.
pub fn verify_checksums(list: &Path) -> Result<usize, ChecksumError> {
    let text = std::fs::read_to_string(list)
        .map_err(|source| ChecksumError::Read { path: list.to_path_buf(), source })?;
    let folder = list.parent().unwrap_or(Path::new("."));
    let mut count = 0;
    for (number, line) in text.lines().enumerate() {
        let bad_line = || ChecksumError::Line { path: list.to_path_buf(), line: number + 1 };
        let (expected, name) = line.split_once("  ").ok_or_else(bad_line)?;
        if expected.len() != 64 || !expected.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(bad_line());
        }
        let path = folder.join(name);
        let found = sha256(&path).map_err(|source| ChecksumError::Read { path: path.clone(), source })?;
        if found != expected {
            return Err(ChecksumError::Changed { path, expected: expected.to_owned(), found });
        }
        count += 1;
    }
    Ok(count)
}

/// A list of `names` (relative to `folder`) in the format of `sha256sum`.
///
/// # Errors
/// At the first file that cannot be read.
pub fn list_checksums(folder: &Path, names: &[String]) -> Result<String, ChecksumError> {
    let mut list = String::new();
    for name in names {
        let path = folder.join(name);
        let digest = sha256(&path).map_err(|source| ChecksumError::Read { path, source })?;
        list.extend([&digest, "  ", name, "\n"]);
    }
    Ok(list)
}

fn sha256(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..n]);
    }
}

/// SHA-256 of `bytes`, in hexadecimal digits.
#[must_use]
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a"), b"one").unwrap();
        let list = dir.path().join("SHA256SUMS");
        let digest = sha256(&dir.path().join("a")).unwrap();
        std::fs::write(&list, format!("{digest}  a\n")).unwrap();
        assert_eq!(verify_checksums(&list).unwrap(), 1);
        std::fs::write(dir.path().join("a"), b"two").unwrap();
        let error = verify_checksums(&list).unwrap_err();
        assert!(matches!(&error, ChecksumError::Changed { path, .. } if path.ends_with("a")), "{error}");
    }

    #[test]
    fn a_written_list_holds() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("b")).unwrap();
        std::fs::write(dir.path().join("a"), b"").unwrap();
        std::fs::write(dir.path().join("b/c"), b"two").unwrap();
        let names = ["a", "b/c"].map(str::to_owned);
        let text = list_checksums(dir.path(), &names).unwrap();
        assert!(text.starts_with("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  a\n"));
        let list = dir.path().join("SHA256SUMS");
        std::fs::write(&list, text).unwrap();
        assert_eq!(verify_checksums(&list).unwrap(), 2);
        std::fs::remove_file(dir.path().join("a")).unwrap();
        assert!(matches!(verify_checksums(&list), Err(ChecksumError::Read { .. })));
        assert!(matches!(list_checksums(dir.path(), &names), Err(ChecksumError::Read { .. })));
    }

    #[test]
    fn malformed_line_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let list = dir.path().join("SHA256SUMS");
        std::fs::write(&list, "abc  a\n").unwrap();
        assert!(matches!(verify_checksums(&list), Err(ChecksumError::Line { line: 1, .. })));
    }
}
