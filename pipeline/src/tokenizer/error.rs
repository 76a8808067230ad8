//! What can be wrong with a tokenizer's files, with a text, or with a list of ids.

use std::path::PathBuf;

use crate::units::TokenId;

/// Why a tokenizer could not be opened, or refused its input.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file could not be read.
    #[error("{path}: cannot read the tokenizer file: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file is larger than any tokenizer.
    #[error("{path}: {bytes} bytes is too large for a tokenizer file (at most {max})", path = path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The largest size that is read.
        max: u64,
    },
    /// A line of the ranks file is refused.
    #[error("{path}:{line}: {problem}", path = path.display())]
    Line {
        /// The ranks file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// What is wrong with it.
        problem: LineProblem,
    },
    /// The ranks file as a whole is refused.
    #[error("{path}: {problem}", path = path.display())]
    Ranks {
        /// The ranks file.
        path: PathBuf,
        /// What is wrong with it.
        problem: RanksProblem,
    },
    /// `tokenizer_config.json` is not the JSON that a tokenizer needs.
    #[error("{path}: {source}", path = path.display())]
    Json {
        /// The configuration file.
        path: PathBuf,
        /// Position and reason.
        source: serde_json::Error,
    },
    /// A special token of `tokenizer_config.json` is refused.
    #[error("{path}: {problem}", path = path.display())]
    Special {
        /// The configuration file.
        path: PathBuf,
        /// What is wrong with it.
        problem: SpecialProblem,
    },
    /// The splitting pattern or the pair encoder refused what it was given.
    #[error("the text encoder failed: {detail}")]
    Encoder {
        /// The encoder's own words.
        detail: String,
    },
    /// An id that the vocabulary does not have.
    #[error("token id {id} is not in the vocabulary (ids 0 to {last})", last = vocabulary.saturating_sub(1))]
    UnknownId {
        /// The id.
        id: TokenId,
        /// Number of ids in the vocabulary.
        vocabulary: usize,
    },
}

/// Why a line of the ranks file is refused.
#[derive(Debug, thiserror::Error)]
pub enum LineProblem {
    /// Not `base64 rank`.
    #[error("expected `<base64> <rank>` with one space, found {found:?}")]
    Shape {
        /// The line, shortened.
        found: String,
    },
    /// The token is not base64.
    #[error("the token {found:?} is not base64: {source}")]
    Base64 {
        /// The token's field, shortened.
        found: String,
        /// The decoder's reason.
        source: base64::DecodeError,
    },
    /// The token has no bytes.
    #[error("the token has no bytes")]
    EmptyToken,
    /// The rank is not a decimal number.
    #[error("the rank {found:?} is not a whole number below {max}")]
    Rank {
        /// The rank's field, shortened.
        found: String,
        /// Ranks are below this.
        max: u32,
    },
    /// The rank was given before.
    #[error("rank {rank} was given on line {first} already")]
    DuplicateRank {
        /// The rank.
        rank: u32,
        /// The line that gave it first.
        first: usize,
    },
    /// The token was given before.
    #[error("this token was given on line {first} already")]
    DuplicateToken {
        /// The line that gave it first.
        first: usize,
    },
    /// The rank lies beyond the number of lines.
    #[error("rank {rank} leaves a gap: {count} lines must hold the ranks 0 to {last} (is the file whole?)", last = count.saturating_sub(1))]
    Gap {
        /// The rank.
        rank: u32,
        /// Number of tokens in the file.
        count: usize,
    },
}

/// Why a ranks file as a whole is refused.
#[derive(Debug, thiserror::Error)]
pub enum RanksProblem {
    /// Nothing in it.
    #[error("the file holds no tokens")]
    Empty,
    /// A text with this byte could not be encoded.
    #[error("no token for the single byte 0x{byte:02x}: byte-level text cannot be encoded without all 256")]
    MissingByte {
        /// The first byte that has no token.
        byte: u8,
    },
}

/// Why the special tokens of a configuration are refused.
#[derive(Debug, thiserror::Error)]
pub enum SpecialProblem {
    /// A key of `added_tokens_decoder` is not an id.
    #[error("added_tokens_decoder: key {key:?} is not a token id")]
    Id {
        /// The key.
        key: String,
    },
    /// An id is given twice.
    #[error("added_tokens_decoder: id {id} is given twice")]
    DuplicateId {
        /// The id.
        id: u32,
    },
    /// Two ids share a text.
    #[error("added_tokens_decoder: ids {first} and {second} share the text {content:?}")]
    DuplicateContent {
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
        /// Their text.
        content: String,
    },
    /// A special token without text.
    #[error("added_tokens_decoder: id {id} has an empty text")]
    EmptyContent {
        /// The id.
        id: u32,
    },
    /// The special tokens do not follow the ranks directly.
    #[error(
        "added_tokens_decoder: the first id is {found}, expected {expected}, the number of ranks in the \
         ranks file (is that file whole, and of this model?)"
    )]
    Seam {
        /// The lowest special id.
        found: u32,
        /// The number of ranks.
        expected: u32,
    },
    /// More special ids than a vocabulary may have.
    #[error("added_tokens_decoder: id {id} is too far beyond the ranks (ids below {max} are accepted)")]
    TooManyIds {
        /// The highest id.
        id: u32,
        /// Ids are below this.
        max: u32,
    },
    /// `bos_token` and the like name a token that is not declared.
    #[error("{key}: {content:?} is not one of added_tokens_decoder")]
    Undeclared {
        /// The key.
        key: &'static str,
        /// What it names.
        content: String,
    },
}
