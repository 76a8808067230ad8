//! From a library error to one paragraph on stderr and an exit code.

use std::io::{self, Write};
use std::process::ExitCode;

use k3_pipeline::causes::with_causes;
use k3_pipeline::model::config_error::ConfigError;
use k3_pipeline::model::error::ModelError;

/// What a subcommand returns.
pub(crate) type Outcome = Result<(), Failure>;

/// The documented exit codes above 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The run failed.
    Run = 1,
    /// Usage, or a refused config, preset or plan.
    Refused = 2,
    /// Something verified did not hold.
    Verification = 3,
}

/// Why a subcommand ended early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An error to report.
    Error {
        /// The exit code.
        exit: Exit,
        /// The error with its causes.
        error: anyhow::Error,
        /// What the user can do, where it is known.
        hint: Option<String>,
    },
    /// The reader of stdout went away: not worth a word.
    StdoutClosed,
}

impl Failure {
    /// A failure of the run.
    pub(crate) fn run(error: impl Into<anyhow::Error>) -> Self {
        Self::Error { exit: Exit::Run, error: error.into(), hint: None }
    }

    /// A refusal before the run.
    pub(crate) fn refused(error: impl Into<anyhow::Error>) -> Self {
        Self::Error { exit: Exit::Refused, error: error.into(), hint: None }
    }

    /// A check that did not hold.
    pub(crate) fn verification(error: impl Into<anyhow::Error>) -> Self {
        Self::Error { exit: Exit::Verification, error: error.into(), hint: None }
    }

    /// Whether its cause is an error of this type and kind.
    pub(crate) fn is<E: std::error::Error + Send + Sync + 'static>(&self, kind: impl Fn(&E) -> bool) -> bool {
        match self {
            Self::Error { error, .. } => error.downcast_ref::<E>().is_some_and(kind),
            Self::StdoutClosed => false,
        }
    }

    /// Adds what the user can do about it.
    pub(crate) fn hint(self, text: impl Into<String>) -> Self {
        match self {
            Self::Error { exit, error, .. } => Self::Error { exit, error, hint: Some(text.into()) },
            Self::StdoutClosed => Self::StdoutClosed,
        }
    }
}

/// For writes to stdout; errors of other files reach [`Failure::run`] with their path.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::StdoutClosed,
            _ => Self::run(anyhow::Error::new(error).context("cannot write to standard output")),
        }
    }
}

/// A bad configuration is refused; a bad checkpoint is a failed run.
impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::Config(ConfigError::Unreadable { .. }) => Self::refused(error).hint(
                "a model is the directory that holds config.json and the weight files it was released with",
            ),
            ModelError::Config(_) => Self::refused(error),
            ModelError::Checkpoint { .. } => Self::run(error),
        }
    }
}

/// Prints what clap has to say: help and versions to stdout, errors to stderr as one paragraph.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    // A closed stdout or stderr leaves nobody to tell.
    if !error.use_stderr() {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.render().to_string();
    let paragraph: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let _ = writeln!(io::stderr().lock(), "{}", paragraph.join("\n"));
    ExitCode::from(Exit::Refused as u8)
}

/// Reports a failure and gives the exit code.
pub(crate) fn exit_code(outcome: Outcome) -> ExitCode {
    match outcome {
        Ok(()) | Err(Failure::StdoutClosed) => ExitCode::SUCCESS,
        Err(Failure::Error { exit, error, hint }) => {
            // A closed stderr leaves nobody to tell.
            let _ = writeln!(io::stderr().lock(), "{}", in_words(&error, hint.as_deref()));
            ExitCode::from(exit as u8)
        }
    }
}

/// An error with those of its causes that it does not name itself, and what to do about it, as the program's
/// own word.
pub(crate) fn in_words(error: &anyhow::Error, hint: Option<&str>) -> String {
    let hint = hint.map_or(String::new(), |hint| format!("\n  hint: {hint}"));
    format!("k3: {}{hint}", with_causes(error.as_ref()))
}
