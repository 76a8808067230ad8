//! Text to token ids and back, as the release does it.
//!
//! A tokenizer is two files: `tiktoken.model` (byte-pair ranks) and `tokenizer_config.json` (the
//! special tokens that follow them). The pattern that splits text before pairs are merged belongs
//! to the format and stands here. Text is ordinary unless special tokens are asked for: text that
//! spells a control token stays text.

mod error;
mod ranks;
mod special;
mod split;
mod stream;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::HashSet;
use std::path::Path;

use aho_corasick::{AhoCorasick, MatchKind};
use tiktoken_rs::CoreBPE;

pub use error::{LineProblem, RanksProblem, SpecialProblem, TokenizerError};
pub use special::TokenRoles;
pub use stream::StreamDecoder;

use crate::units::TokenId;

/// File name of the ranks.
pub const RANKS_FILE: &str = "tiktoken.model";
/// File name of the configuration that declares the special tokens.
pub const CONFIG_FILE: &str = "tokenizer_config.json";

/// How text is split before pairs are merged.
pub const SPLIT_PATTERN: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

/// Files larger than this are not tokenizers.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// A vocabulary: ids `0..rank_count` are byte strings, the ids after them special tokens.
pub struct Tokenizer {
    bpe: CoreBPE,
    /// The bytes of all tokens in the order of their ids, and where each ends.
    bytes: Vec<u8>,
    ends: Vec<usize>,
    /// The lowest special id.
    first_special: u32,
    special_contents: Vec<String>,
    /// Finds special tokens in text: leftmost first, longest of those.
    special_finder: AhoCorasick,
    roles: TokenRoles,
}

impl Tokenizer {
    /// Opens the tokenizer of a model directory; only its two tokenizer files are read.
    ///
    /// # Errors
    /// A file that cannot be read, or that is not exactly a tokenizer; the message names the file
    /// and the line or key.
    pub fn open(dir: &Path) -> Result<Self, TokenizerError> {
        let (ranks, config) = (dir.join(RANKS_FILE), dir.join(CONFIG_FILE));
        Self::parse((&ranks, &read(&ranks)?), (&config, &read(&config)?))
    }

    /// Builds a tokenizer from the contents of its two files; the paths are for messages.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn parse(ranks: (&Path, &[u8]), config: (&Path, &[u8])) -> Result<Self, TokenizerError> {
        let tokens = ranks::parse(ranks.0, ranks.1)?.tokens;
        let rank_count = u32::try_from(tokens.len()).unwrap_or(ranks::VOCABULARY_MAX);
        let special = special::parse(config.0, config.1, rank_count)?;
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for token in tokens.iter().map(Vec::as_slice).chain(special.contents.iter().map(String::as_bytes)) {
            bytes.extend_from_slice(token);
            ends.push(bytes.len());
        }
        let encoder = tokens.into_iter().zip(0..).collect();
        // The library searches for its special tokens in every text, and its search may split a
        // character when there are none: it gets one that begins with ASCII and is never allowed.
        let unused = std::iter::once((String::from("\0"), u32::MAX)).collect();
        let failed = |detail: String| TokenizerError::Encoder { detail };
        Ok(Self {
            bpe: CoreBPE::new(encoder, unused, SPLIT_PATTERN).map_err(|e| failed(e.to_string()))?,
            bytes,
            ends,
            first_special: special.first,
            special_finder: AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .build(&special.contents)
                .map_err(|e| failed(e.to_string()))?,
            special_contents: special.contents,
            roles: special.roles,
        })
    }

    /// Number of ids, special tokens included.
    #[must_use]
    pub fn vocabulary_len(&self) -> usize {
        self.ends.len()
    }

    /// The ids that the configuration names by role.
    #[must_use]
    pub fn roles(&self) -> TokenRoles {
        self.roles
    }

    /// The id of the special token with this text.
    #[must_use]
    pub fn special_id(&self, content: &str) -> Option<TokenId> {
        let index = self.special_contents.iter().position(|c| c == content)?;
        Some(self.special_at(index))
    }

    /// The special tokens in the order of their ids.
    pub fn specials(&self) -> impl Iterator<Item = (TokenId, &str)> {
        self.special_contents.iter().enumerate().map(|(i, content)| (self.special_at(i), content.as_str()))
    }

    /// Whether `id` is a special token of this vocabulary.
    #[must_use]
    pub fn is_special(&self, id: TokenId) -> bool {
        id.0 >= self.first_special && (id.0 as usize) < self.ends.len()
    }

    /// Encodes text as ordinary text: no special token comes out of it.
    ///
    /// # Errors
    /// Only if the splitting pattern gives up on the text.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
        let mut ids = Vec::new();
        for piece in split::pieces(text) {
            self.encode_piece(piece, &mut ids)?;
        }
        Ok(ids)
    }

    /// Encodes text in which the spelling of a special token means that token. For markup that a
    /// program wrote; never for text that a person or a tool supplied.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_with_specials(&self, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
        let mut ids = Vec::new();
        for piece in split::pieces(text) {
            let mut start = 0;
            for found in self.special_finder.find_iter(piece) {
                self.encode_piece(&piece[start..found.start()], &mut ids)?;
                ids.push(self.special_at(found.pattern().as_usize()));
                start = found.end();
            }
            self.encode_piece(&piece[start..], &mut ids)?;
        }
        Ok(ids)
    }

    /// The bytes of one token; a special token's are its text.
    ///
    /// # Errors
    /// An id that the vocabulary does not have.
    pub fn token_bytes(&self, id: TokenId) -> Result<&[u8], TokenizerError> {
        let index = id.0 as usize;
        let unknown = || TokenizerError::UnknownId { id, vocabulary: self.ends.len() };
        let end = *self.ends.get(index).ok_or_else(unknown)?;
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        Ok(&self.bytes[start..end])
    }

    /// The bytes of many tokens.
    ///
    /// # Errors
    /// An id that the vocabulary does not have.
    pub fn decode_bytes(&self, ids: &[TokenId]) -> Result<Vec<u8>, TokenizerError> {
        let mut bytes = Vec::new();
        for id in ids {
            bytes.extend_from_slice(self.token_bytes(*id)?);
        }
        Ok(bytes)
    }

    /// The text of many tokens; bytes that are not UTF-8 become U+FFFD as
    /// [`String::from_utf8_lossy`] does it.
    ///
    /// # Errors
    /// An id that the vocabulary does not have.
    pub fn decode(&self, ids: &[TokenId]) -> Result<String, TokenizerError> {
        let bytes = self.decode_bytes(ids)?;
        Ok(String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
    }

    fn special_at(&self, index: usize) -> TokenId {
        TokenId(self.first_special + u32::try_from(index).unwrap_or(ranks::VOCABULARY_MAX))
    }

    /// Encodes a piece that is short enough for the splitting pattern.
    fn encode_piece(&self, piece: &str, ids: &mut Vec<TokenId>) -> Result<(), TokenizerError> {
        let (encoded, _) = self
            .bpe
            .encode(piece, &HashSet::new())
            .map_err(|e| TokenizerError::Encoder { detail: e.message })?;
        ids.extend(encoded.into_iter().map(TokenId));
        Ok(())
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("ranks", &self.first_special)
            .field("specials", &self.special_contents.len())
            .finish_non_exhaustive()
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TokenizerError> {
    let failed = |source| TokenizerError::Read { path: path.to_path_buf(), source };
    let meta = std::fs::metadata(path).map_err(failed)?;
    // To open a FIFO would wait for a writer.
    if !meta.is_file() {
        return Err(failed(std::io::Error::other("not a regular file")));
    }
    let bytes = meta.len();
    if bytes > FILE_BYTES_MAX {
        return Err(TokenizerError::TooLarge { path: path.to_path_buf(), bytes, max: FILE_BYTES_MAX });
    }
    std::fs::read(path).map_err(failed)
}
