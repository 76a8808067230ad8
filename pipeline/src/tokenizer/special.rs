//! The special tokens of `tokenizer_config.json`.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{MapAccess, Visitor};

use super::error::{SpecialProblem, TokenizerError};
use crate::units::TokenId;

/// The most special tokens a vocabulary may have.
const SPECIALS_MAX: u32 = 1 << 16;

/// The keys of `tokenizer_config.json` that the text encoder needs; the file has more, for
/// programs of other kinds, which are left alone.
#[derive(Deserialize)]
struct ConfigFile {
    added_tokens_decoder: AddedTokens,
    bos_token: Option<String>,
    eos_token: Option<String>,
    pad_token: Option<String>,
    unk_token: Option<String>,
}

#[derive(Deserialize)]
struct AddedToken {
    content: String,
}

/// A JSON object as the list of its entries, so that a key given twice is seen.
struct AddedTokens(Vec<(String, AddedToken)>);

impl<'de> Deserialize<'de> for AddedTokens {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = AddedTokens;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from token ids to {\"content\": ...}")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<AddedTokens, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(AddedTokens(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// The special tokens: ids from `first` on, without a gap.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    pub(super) first: u32,
    pub(super) contents: Vec<String>,
    pub(super) roles: TokenRoles,
}

/// The ids that `tokenizer_config.json` names by role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenRoles {
    /// Begin of text.
    pub bos: Option<TokenId>,
    /// End of text (the chat format ends a message with another token).
    pub eos: Option<TokenId>,
    /// Padding.
    pub pad: Option<TokenId>,
    /// Unknown.
    pub unk: Option<TokenId>,
}

/// Reads the text of `tokenizer_config.json`; `rank_count` is the number of ordinary tokens.
///
/// The lowest special id must follow the last rank: that is what reveals a ranks file that lost
/// its end. Ids between listed ones that are not listed are reserved, named as the release does.
pub(super) fn parse(path: &Path, text: &[u8], rank_count: u32) -> Result<SpecialTokens, TokenizerError> {
    let file: ConfigFile = serde_json::from_slice(text)
        .map_err(|source| TokenizerError::Json { path: path.to_path_buf(), source })?;
    specials(file, rank_count)
        .map_err(|problem| TokenizerError::Special { path: path.to_path_buf(), problem })
}

fn specials(file: ConfigFile, rank_count: u32) -> Result<SpecialTokens, SpecialProblem> {
    let mut listed = Vec::with_capacity(file.added_tokens_decoder.0.len());
    for (key, token) in file.added_tokens_decoder.0 {
        let Some(id) = key.parse().ok().filter(|id: &u32| id.to_string() == key) else {
            return Err(SpecialProblem::Id { key });
        };
        if token.content.is_empty() {
            return Err(SpecialProblem::EmptyContent { id });
        }
        listed.push((id, token.content));
    }
    listed.sort_unstable_by_key(|(id, _)| *id);
    let max = rank_count.saturating_add(SPECIALS_MAX);
    if let Some((id, _)) = listed.last().filter(|(id, _)| *id >= max) {
        return Err(SpecialProblem::TooManyIds { id: *id, max });
    }
    if let Some((found, _)) = listed.first().filter(|(id, _)| *id != rank_count) {
        return Err(SpecialProblem::Seam { found: *found, expected: rank_count });
    }
    let mut contents = Vec::with_capacity(listed.len());
    let mut next = rank_count;
    for (id, content) in listed {
        if id < next {
            return Err(SpecialProblem::DuplicateId { id });
        }
        contents.extend((next..id).map(|id| format!("<|reserved_token_{id}|>")));
        contents.push(content);
        next = id + 1;
    }
    let mut ids: HashMap<&str, u32> = HashMap::with_capacity(contents.len());
    for (content, id) in contents.iter().zip(rank_count..) {
        if let Some(first) = ids.insert(content, id) {
            return Err(SpecialProblem::DuplicateContent { first, second: id, content: content.clone() });
        }
    }
    let role = |key, name: Option<String>| match name {
        None => Ok(None),
        Some(content) => match ids.get(content.as_str()) {
            Some(id) => Ok(Some(TokenId(*id))),
            None => Err(SpecialProblem::Undeclared { key, content }),
        },
    };
    let roles = TokenRoles {
        bos: role("bos_token", file.bos_token)?,
        eos: role("eos_token", file.eos_token)?,
        pad: role("pad_token", file.pad_token)?,
        unk: role("unk_token", file.unk_token)?,
    };
    Ok(SpecialTokens { first: rank_count, contents, roles })
}
