//! Golden models and vectors: where they lie and how they are read.

use std::path::{Path, PathBuf};

/// The root of the repository this package was built from.
#[must_use]
pub fn repository_root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}
