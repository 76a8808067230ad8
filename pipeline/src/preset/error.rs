//! What can be wrong with a preset: all problems of one text together, each with its place.

use std::fmt;
use std::path::PathBuf;

use super::BUILTIN_NAMES;

/// Why a preset cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PresetError {
    /// Neither a built-in nor a file.
    #[error("there is no preset \"{name}\"; built in are {known}{}; a file is given by its path, as in {path}", hint(.nearest))]
    Unknown {
        /// As asked for.
        name: String,
        /// The built-in most like it.
        nearest: Option<String>,
        /// All built-ins.
        known: String,
        /// What the path of a file would look like: that of the file of this name, where there is one.
        path: String,
    },
    /// The file cannot be read.
    #[error("cannot read preset {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Not a preset file at all.
    #[error("{} is no preset: {reason}", path.display())]
    NotAFile {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: &'static str,
    },
    /// The text is no TOML.
    #[error("{0}")]
    NotToml(Problem),
    /// The text is wrong.
    #[error("{}", list(.0))]
    Invalid(Vec<Problem>),
}

impl PresetError {
    /// What a preset is, where something else was given as one.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        let is_something_else = match self {
            Self::NotAFile { .. } | Self::NotToml(_) => true,
            Self::Invalid(problems) => problems.iter().any(|p| p.what.starts_with(NO_SCHEMA)),
            // There is a file of that name, which is not called like a preset.
            Self::Unknown { path, .. } => !path.ends_with(".toml"),
            Self::Read { .. } => false,
        };
        is_something_else.then(|| {
            format!(
                "a preset is a TOML text that says what stays in memory; built in are {}; \
                 `k3 preset show laptop` prints one",
                BUILTIN_NAMES.join(", ")
            )
        })
    }
}

/// How the problem of a text without a schema begins.
pub(super) const NO_SCHEMA: &str = "schema is missing";

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where.
    pub place: Place,
    /// What, with what is allowed.
    pub what: String,
}

/// Where a value was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a file, at a line and column counted from 1.
    File {
        /// The file, or "built-in NAME".
        name: String,
        /// Line.
        line: usize,
        /// Column, in characters.
        column: usize,
    },
    /// In a file, but nowhere in particular.
    WholeFile {
        /// The file.
        name: String,
    },
    /// In `--set`, as typed.
    Set(String),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { name, line, column } => write!(f, "{name}:{line}:{column}"),
            Self::WholeFile { name } => f.write_str(name),
            Self::Set(text) => write!(f, "--set {text}"),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.what)
    }
}

fn hint(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or_else(String::new, |n| format!(" (did you mean \"{n}\"?)"))
}

fn list(problems: &[Problem]) -> String {
    let lines: Vec<String> = problems.iter().map(Problem::to_string).collect();
    lines.join("\n")
}
