//! Why a model directory was refused.

use std::mem::discriminant;
use std::path::{Path, PathBuf};

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
    #[error("{}", list(dir, problems, *more))]
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

/// Problems of one kind with tensors that are shown: one cause has many of them.
const TENSORS_SHOWN_MAX: usize = 3;

fn list(dir: &Path, problems: &[CheckpointProblem], more: usize) -> String {
    let dir = dir.display().to_string();
    if let ([one], 0) = (problems, more) {
        let text = one_line(one);
        return if text.contains(&dir) { text } else { format!("{dir}: {text}") };
    }
    let mut out = format!("{dir}: {} problems in the weight files", problems.len() + more);
    let mut shown: Vec<&CheckpointProblem> = Vec::new();
    for problem in problems {
        let of_its_kind = shown.iter().filter(|s| discriminant(**s) == discriminant(problem)).count();
        if !problem.is_of_tensor() || of_its_kind < TENSORS_SHOWN_MAX {
            shown.push(problem);
        }
    }
    for problem in &shown {
        out.push_str("\n  ");
        out.push_str(&one_line(problem));
    }
    let more = more + problems.len() - shown.len();
    if more > 0 {
        out.push_str(&format!("\n  and {more} more"));
    }
    if more > 0 && shown.iter().any(|problem| matches!(problem, CheckpointProblem::Shape { .. })) {
        out.push_str("\n  the shapes do not follow from config.json: is it that of these weight files?");
    }
    out
}
