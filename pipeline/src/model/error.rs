//! Why a model directory was refused.

use std::path::PathBuf;

use thiserror::Error;

use super::checkpoint_error::CheckpointProblem;
use super::config_error::ConfigError;
use super::files::one_line;

/// Why a model was not opened.
#[derive(Debug, Error)]
pub enum ModelError {
    /// Its configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its weight files: everything that is wrong with them, at once.
    #[error("{}: {}", dir.display(), list(problems, *more))]
    Checkpoint {
        /// The model directory.
        dir: PathBuf,
        /// The first [`PROBLEMS_MAX`] of them, in order of the files.
        problems: Vec<CheckpointProblem>,
        /// How many more there are.
        more: usize,
    },
}

/// Problems listed in one error.
pub const PROBLEMS_MAX: usize = 24;

fn list(problems: &[CheckpointProblem], more: usize) -> String {
    if let ([one], 0) = (problems, more) {
        return one_line(one);
    }
    let mut out = format!("{} problems in the weight files", problems.len() + more);
    for p in problems {
        out.push_str("\n  ");
        out.push_str(&one_line(p));
    }
    if more > 0 {
        out.push_str(&format!("\n  and {more} more"));
    }
    out
}
