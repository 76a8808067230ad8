//! What can be wrong with the weight files of a model, as data.

use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// One thing that is wrong with a checkpoint.
#[derive(Debug, Error)]
pub enum CheckpointProblem {
    /// Neither an index nor a single weight file is there.
    #[error(
        "{}: holds neither model.safetensors.index.json nor a single model.safetensors; is it a model directory?",
        dir.display()
    )]
    NoWeights {
        /// The directory.
        dir: PathBuf,
    },
    /// The index is not what it should be.
    #[error("{}: {fault}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong.
        fault: IndexFault,
    },
    /// A weight file is not what it should be.
    #[error("{}: {fault}", path.display())]
    File {
        /// The weight file.
        path: PathBuf,
        /// What is wrong.
        fault: FileFault,
    },
    /// A weight file that the index names is nowhere.
    #[error(
        "{file}: named in model.safetensors.index.json, but not in {}; download it, or name its directory with --shards",
        dirs(searched)
    )]
    ShardMissing {
        /// Its name.
        file: String,
        /// Where it was looked for.
        searched: Vec<PathBuf>,
    },
    /// The index names a tensor that its file does not hold.
    #[error("{tensor}: the index says it lies in {file}, which does not hold it")]
    IndexedButAbsent {
        /// The tensor.
        tensor: String,
        /// The file.
        file: String,
    },
    /// A file holds a tensor that the index does not place there.
    #[error("{tensor}: lies in {file}, but the index does not say so")]
    NotIndexed {
        /// The tensor.
        tensor: String,
        /// The file.
        file: String,
    },
    /// Two files hold the same tensor.
    #[error("{tensor}: lies in both {file} and {other}")]
    TwoFiles {
        /// The tensor.
        tensor: String,
        /// The one file.
        file: String,
        /// The other.
        other: String,
    },
    /// A tensor that the model needs is in no file.
    #[error("{tensor}: missing; expected {expected}")]
    Missing {
        /// The tensor.
        tensor: String,
        /// Its type and shape.
        expected: String,
    },
    /// A tensor has the wrong shape.
    #[error("{tensor} in {file}: expected shape {expected}, found {}", Dims(found))]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its file.
        file: String,
        /// What config.json asks for.
        expected: String,
        /// What the header says.
        found: Vec<u64>,
    },
    /// A tensor has the wrong number type.
    #[error("{tensor} in {file}: expected type {expected}, found {found}")]
    Type {
        /// The tensor.
        tensor: String,
        /// Its file.
        file: String,
        /// What can be used.
        expected: &'static str,
        /// What the header says.
        found: &'static str,
    },
    /// A tensor that is no part of this model.
    #[error("{tensor} in {file}: no part of the model that config.json describes")]
    Unexpected {
        /// The tensor.
        tensor: String,
        /// Its file.
        file: String,
    },
    /// More files than can be numbered.
    #[error("{files} weight files, at most {max} are supported")]
    TooManyFiles {
        /// How many there are.
        files: usize,
        /// The most.
        max: usize,
    },
}

impl CheckpointProblem {
    /// Whether it is about one tensor of many.
    pub(super) fn is_of_tensor(&self) -> bool {
        match self {
            Self::IndexedButAbsent { .. }
            | Self::NotIndexed { .. }
            | Self::TwoFiles { .. }
            | Self::Missing { .. }
            | Self::Shape { .. }
            | Self::Type { .. }
            | Self::Unexpected { .. } => true,
            Self::NoWeights { .. }
            | Self::Index { .. }
            | Self::File { .. }
            | Self::ShardMissing { .. }
            | Self::TooManyFiles { .. } => false,
        }
    }
}

/// What is wrong with `model.safetensors.index.json`.
#[derive(Debug, Error)]
pub enum IndexFault {
    /// The system refused.
    #[error("cannot be read: {0}")]
    Unreadable(#[source] io::Error),
    /// Not a file.
    #[error("expected a file, found {0}")]
    NotAFile(&'static str),
    /// Longer than any index.
    #[error("{bytes} bytes long, expected at most {max}")]
    TooLong {
        /// Its length.
        bytes: u64,
        /// The most.
        max: u64,
    },
    /// Not the JSON of an index.
    #[error("not a valid index: {0}")]
    NotJson(#[source] serde_json::Error),
    /// A key that stands twice.
    #[error("{tensor}: stands twice in weight_map")]
    Repeated {
        /// The tensor.
        tensor: String,
    },
    /// A file name with a path in it.
    #[error("{tensor}: its file is given as {file:?}, expected a plain file name")]
    BadFileName {
        /// The tensor.
        tensor: String,
        /// The name.
        file: String,
    },
    /// No `weight_map`.
    #[error("weight_map: missing or empty; expected an object from tensor names to file names")]
    NoWeightMap,
}

/// What is wrong with a weight file.
#[derive(Debug, Error)]
pub enum FileFault {
    /// The system refused.
    #[error("cannot be read: {0}")]
    Unreadable(#[source] io::Error),
    /// Not a file.
    #[error("expected a file, found {0}")]
    NotAFile(&'static str),
    /// Not even room for the header's length.
    #[error("{bytes} bytes long; a safetensors file has at least 8; download it again")]
    TooShort {
        /// Its length.
        bytes: u64,
    },
    /// The header's length is beyond the file or beyond reason.
    #[error(
        "its first 8 bytes give a header of {header} bytes, expected at most {max} (the file has {file} bytes); damaged or no safetensors file"
    )]
    HeaderLength {
        /// What the file says.
        header: u64,
        /// The most there can be.
        max: u64,
        /// Bytes of the file.
        file: u64,
    },
    /// The header is not the JSON of a safetensors header.
    #[error("its header is not valid{}: {source}", at_tensor(tensor))]
    HeaderJson {
        /// The tensor being read.
        tensor: Option<String>,
        /// What was wrong.
        source: serde_json::Error,
    },
    /// One name twice.
    #[error("tensor {tensor} stands twice in its header")]
    Repeated {
        /// The tensor.
        tensor: String,
    },
    /// A number type that the format does not know.
    #[error(
        "tensor {tensor}: unknown type {found:?}; expected one of the safetensors types, such as BF16, F32, U8"
    )]
    UnknownType {
        /// The tensor.
        tensor: String,
        /// What the header says.
        found: String,
    },
    /// `data_offsets` run backwards.
    #[error("tensor {tensor}: data_offsets {begin}..{end} end before they begin")]
    Backwards {
        /// The tensor.
        tensor: String,
        /// First byte.
        begin: u64,
        /// Past the last byte.
        end: u64,
    },
    /// Shape and type do not give the bytes between the offsets.
    #[error("tensor {tensor}: shape {} of {dtype} needs {needed} bytes, data_offsets {begin}..{end} hold {}", Dims(shape), end - begin)]
    Extent {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Its type.
        dtype: &'static str,
        /// What they need, in words: it may be beyond 64 bits.
        needed: String,
        /// First byte.
        begin: u64,
        /// Past the last byte.
        end: u64,
    },
    /// Two tensors share bytes.
    #[error("tensor {tensor}: begins at {begin}, inside {other}, which ends at {end}")]
    Overlap {
        /// The tensor.
        tensor: String,
        /// Its first byte.
        begin: u64,
        /// The tensor before it.
        other: String,
        /// Past its last byte.
        end: u64,
    },
    /// Bytes that belong to no tensor.
    #[error(
        "tensor {tensor}: begins at {begin}, but the tensor before it ends at {end}: bytes between belong to nothing"
    )]
    Hole {
        /// The tensor.
        tensor: String,
        /// Its first byte.
        begin: u64,
        /// Past the last byte of the tensor before it.
        end: u64,
    },
    /// The tensors end elsewhere than the file.
    #[error(
        "{found} bytes long, its header describes {expected}; {}",
        if found < expected { "truncated: download it again" } else { "bytes at its end belong to no tensor" }
    )]
    Length {
        /// What the header describes.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
}

fn at_tensor(tensor: &Option<String>) -> String {
    tensor.as_ref().map(|t| format!(" at tensor {t}")).unwrap_or_default()
}

fn dirs(paths: &[PathBuf]) -> String {
    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// A shape as it is shown.
pub(crate) struct Dims<'a>(pub(crate) &'a [u64]);

impl fmt::Display for Dims<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}
