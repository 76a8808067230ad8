//! The ranks file: one `base64-token rank` a line.

use std::collections::HashMap;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::error::{LineProblem, RanksProblem, TokenizerError};

/// The most ids a vocabulary may have.
pub(super) const VOCABULARY_MAX: u32 = 1 << 22;
/// How much of a refused line is shown.
const SHOWN_BYTES: usize = 40;

/// The byte strings of the ranks 0, 1, 2, ... without a gap.
#[derive(Debug)]
pub(super) struct Ranks {
    pub(super) tokens: Vec<Vec<u8>>,
}

/// Reads the text of a ranks file; `path` is for messages.
///
/// Lines may come in any order; every rank from 0 to the number of lines less one must be there
/// once, every token once, and every single byte must be a token. Nothing else is accepted.
pub(super) fn parse(path: &Path, text: &[u8]) -> Result<Ranks, TokenizerError> {
    let refuse = |line, problem| TokenizerError::Line { path: path.to_path_buf(), line, problem };
    let whole = |problem| TokenizerError::Ranks { path: path.to_path_buf(), problem };
    let body = text.strip_suffix(b"\n").unwrap_or(text);
    if body.is_empty() {
        return Err(whole(RanksProblem::Empty));
    }
    let mut entries = Vec::new();
    for (index, line) in body.split(|&b| b == b'\n').enumerate() {
        entries.push(parse_line(line).map_err(|problem| refuse(index + 1, problem))?);
    }
    let count = entries.len();
    let mut line_of_rank = vec![0_usize; count];
    let mut line_of_token: HashMap<&[u8], usize> = HashMap::with_capacity(count);
    for (index, (token, rank)) in entries.iter().enumerate() {
        let (line, rank) = (index + 1, *rank);
        let slot = line_of_rank
            .get_mut(rank as usize)
            .ok_or_else(|| refuse(line, LineProblem::Gap { rank, count }))?;
        if *slot != 0 {
            return Err(refuse(line, LineProblem::DuplicateRank { rank, first: *slot }));
        }
        *slot = line;
        if let Some(first) = line_of_token.insert(token, line) {
            return Err(refuse(line, LineProblem::DuplicateToken { first }));
        }
    }
    if let Some(byte) = (0..=u8::MAX).find(|byte| !line_of_token.contains_key([*byte].as_slice())) {
        return Err(whole(RanksProblem::MissingByte { byte }));
    }
    drop(line_of_token);
    entries.sort_unstable_by_key(|(_, rank)| *rank);
    Ok(Ranks { tokens: entries.into_iter().map(|(token, _)| token).collect() })
}

fn parse_line(line: &[u8]) -> Result<(Vec<u8>, u32), LineProblem> {
    let mut fields = line.split(|&b| b == b' ');
    let (Some(token), Some(rank), None) = (fields.next(), fields.next(), fields.next()) else {
        return Err(LineProblem::Shape { found: shown(line) });
    };
    let bytes =
        STANDARD.decode(token).map_err(|source| LineProblem::Base64 { found: shown(token), source })?;
    if bytes.is_empty() {
        return Err(LineProblem::EmptyToken);
    }
    let rank =
        parse_rank(rank).ok_or_else(|| LineProblem::Rank { found: shown(rank), max: VOCABULARY_MAX })?;
    Ok((bytes, rank))
}

/// Decimal digits only: no sign, no leading zero, below `VOCABULARY_MAX`.
fn parse_rank(field: &[u8]) -> Option<u32> {
    if field.len() > 1 && field.starts_with(b"0") || !field.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let rank = std::str::from_utf8(field).ok()?.parse().ok()?;
    (rank < VOCABULARY_MAX).then_some(rank)
}

fn shown(field: &[u8]) -> String {
    let cut = field.get(..SHOWN_BYTES).unwrap_or(field);
    let mut text = String::from_utf8_lossy(cut).into_owned();
    if cut.len() < field.len() {
        text.push_str("...");
    }
    text
}
