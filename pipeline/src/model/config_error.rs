//! What can be wrong with a `config.json`, as data.

use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::files::one_line;

/// Why a configuration was refused.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The path leads to a directory, a pipe or a device.
    #[error("{}: expected a file, found {found}", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// The file is longer than any configuration.
    #[error("{}: {bytes} bytes long, expected at most {max}; is this a model's config.json?", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// The most that is read.
        max: u64,
    },
    /// The text is not UTF-8.
    #[error("{}: not UTF-8 text: first bad byte at offset {offset}", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// Offset of the first byte that is no UTF-8.
        offset: usize,
    },
    /// The text is not JSON.
    #[error("{}: not valid JSON: {source}{}", path.display(), near(excerpt))]
    NotJson {
        /// The file.
        path: PathBuf,
        /// Line, column and cause.
        source: serde_json::Error,
        /// The line at fault, shortened.
        excerpt: String,
    },
    /// The text is JSON, but not the configuration of a model that can be run; everything that is
    /// wrong with it, at once.
    #[error("{}: {}", path.display(), list(problems))]
    Problems {
        /// The file.
        path: PathBuf,
        /// All of them, in order of the fields.
        problems: Vec<ConfigProblem>,
    },
}

fn near(excerpt: &str) -> String {
    if excerpt.is_empty() { String::new() } else { format!(", in the line `{excerpt}`") }
}

fn list(problems: &[ConfigProblem]) -> String {
    match problems {
        [one] => one_line(one),
        many => {
            let mut out = format!("{} problems", many.len());
            for p in many {
                out.push_str("\n  ");
                out.push_str(&one_line(p));
            }
            out
        }
    }
}

/// One thing that is wrong with a configuration. `field` is the path of the key from the top.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ConfigProblem {
    /// A field the model cannot be built without.
    #[error("{field}: missing; expected {expected} (nothing is defaulted)")]
    Missing {
        /// The field.
        field: String,
        /// What belongs there.
        expected: Expected,
    },
    /// A key that stands twice in its object.
    #[error("{field}: stands twice; remove one, which of the two counts is not guessed")]
    Duplicate {
        /// The field.
        field: String,
    },
    /// A value of the wrong kind or out of its range.
    #[error("{field}: expected {expected}, found {found}")]
    Invalid {
        /// The field.
        field: String,
        /// What belongs there.
        expected: Expected,
        /// What is there.
        found: String,
    },
    /// A value that means a model this engine does not compute.
    #[error("{field}: {found} is not supported; this engine computes {supported}")]
    Unsupported {
        /// The field.
        field: String,
        /// What is there.
        found: String,
        /// What is computed.
        supported: &'static str,
    },
    /// Two fields that cannot both hold.
    #[error("{field} = {found} contradicts {other} = {other_found}: {rule}")]
    Contradiction {
        /// The one field.
        field: String,
        /// Its value.
        found: String,
        /// The other.
        other: String,
        /// Its value.
        other_found: String,
        /// What must hold.
        rule: &'static str,
    },
    /// A width of the routed experts that MXFP4 groups do not divide.
    #[error("{field}: {found} is not a multiple of {divisor}, the MXFP4 group that shares a scale byte")]
    NotDivisible {
        /// The field.
        field: String,
        /// Its value.
        found: usize,
        /// What must divide it.
        divisor: usize,
    },
    /// The layer lists do not partition the layers.
    #[error(
        "{field} and {other} must together name every layer 1..{layers} exactly once: {}",
        layer_faults(unnamed, twice, outside)
    )]
    LayerLists {
        /// The list of full-attention layers.
        field: String,
        /// The list of linear-attention layers.
        other: String,
        /// Number of layers.
        layers: usize,
        /// Layers in neither list, counted from 1.
        unnamed: Vec<u64>,
        /// Layers named more than once.
        twice: Vec<u64>,
        /// Entries that are no layer.
        outside: Vec<u64>,
    },
    /// Fields that are fine one by one but make a model beyond any storage.
    #[error(
        "the tensors of this model would take {bytes} bytes, at most {max} are supported; check {fields}"
    )]
    TooLarge {
        /// Bytes of all tensors.
        bytes: u128,
        /// The most.
        max: u128,
        /// The fields to look at.
        fields: &'static str,
    },
}

fn layer_faults(unnamed: &[u64], twice: &[u64], outside: &[u64]) -> String {
    let parts = [("not named", unnamed), ("named twice", twice), ("no such layer", outside)];
    let texts = parts.iter().filter(|(_, l)| !l.is_empty()).map(|(what, layers)| {
        let shown: Vec<String> = layers.iter().take(LAYERS_SHOWN_MAX).map(u64::to_string).collect();
        let more = layers.len().saturating_sub(LAYERS_SHOWN_MAX);
        let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{what}: {}{rest}", shown.join(", "))
    });
    texts.collect::<Vec<_>>().join("; ")
}

/// Layers shown in one error.
const LAYERS_SHOWN_MAX: usize = 12;

/// What a field takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Expected {
    /// An integer in a range, bounds included.
    Count {
        /// Least.
        min: u64,
        /// Most.
        max: u64,
    },
    /// A number above `above`, up to `max`.
    Number {
        /// Excluded lower bound.
        above: f64,
        /// Included upper bound.
        max: f64,
    },
    /// A number at or above `min`, below 0.
    Below0 {
        /// Included lower bound.
        min: f64,
    },
    /// `true` or `false`.
    Bool,
    /// A string.
    Text,
    /// A list of layers counted from 1.
    LayerList,
    /// An object.
    Object,
    /// `null`, or an integer in a range.
    CountOrNull {
        /// Least.
        min: u64,
        /// Most.
        max: u64,
    },
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count { min, max } => write!(f, "an integer from {min} to {max}"),
            Self::CountOrNull { min, max } => write!(f, "null or an integer from {min} to {max}"),
            Self::Number { above, max } => write!(f, "a number above {above} and at most {max}"),
            Self::Below0 { min } => write!(f, "a number from {min} to below 0"),
            Self::Bool => f.write_str("true or false"),
            Self::Text => f.write_str("a string"),
            Self::LayerList => f.write_str("a list of layers, integers counted from 1"),
            Self::Object => f.write_str("an object"),
        }
    }
}
