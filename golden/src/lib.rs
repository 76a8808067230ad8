//! Golden models and vectors: where they lie, their checksums, and how they are read.
//!
//! The numbers were computed with the released PyTorch modelling code on small models in the released
//! layout; `golden/README.md` says what each file holds.

mod checksums;
mod tensors;
pub mod vectors;

use std::path::{Path, PathBuf};

pub use checksums::{ChecksumError, list_checksums, sha256_hex, verify_checksums};
pub use tensors::{Golden, GoldenError, Tensor};

/// The root of the repository this package was built from.
#[must_use]
pub fn repository_root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

/// The folder `golden/` of the repository.
#[must_use]
pub fn golden_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Model directories below `golden/` whose logits must be met, in order of name.
///
/// # Errors
/// When `golden/models` cannot be listed.
pub fn model_dirs() -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for parent in [golden_dir().join("models"), golden_dir()] {
        for entry in std::fs::read_dir(parent)? {
            let path = entry?.path();
            if path.join("config.json").is_file() && path.join("golden/golden.safetensors").is_file() {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}
