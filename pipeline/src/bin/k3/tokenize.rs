//! `k3 tokenize` and `k3 detokenize`: text to token ids and back.

use std::io::Write;
use std::path::{Path, PathBuf};

use k3_pipeline::tokenizer::{Tokenizer, TokenizerError};
use k3_pipeline::units::TokenId;
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::output;
use crate::prompt_args::{read_stdin, read_text};

/// Arguments of `k3 tokenize`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 tokenize --model ~/Kimi-K3 --text 'The capital of France is'
  k3 tokenize --model ~/Kimi-K3 --file prompt.txt --json
  echo '<|open|>message' | k3 tokenize --model ~/Kimi-K3 --special")]
pub(crate) struct TokenizeArgs {
    /// Directory with tiktoken.model and tokenizer_config.json; nothing else in it is read.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// The text; without --text and --file it is read from standard input.
    #[arg(long, conflicts_with = "file")]
    text: Option<String>,
    /// A file that holds the text (UTF-8); - is standard input.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// The spelling of a special token means that token.
    #[arg(long)]
    special: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Arguments of `k3 detokenize`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 detokenize --model ~/Kimi-K3 --ids 1008,10484,318
  k3 tokenize --model ~/Kimi-K3 --text hello | k3 detokenize --model ~/Kimi-K3

The text is written as the tokens' own bytes, without a line end; --json has U+FFFD in place of
bytes that are not UTF-8. A file or a pipe without ids gives an empty text.")]
pub(crate) struct DetokenizeArgs {
    /// Directory with tiktoken.model and tokenizer_config.json; nothing else in it is read.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Token ids, separated by commas; without --ids and --file they are read from standard input.
    #[arg(long, conflicts_with = "file")]
    ids: Option<String>,
    /// A file of token ids, separated by commas or white space; - is standard input.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Tokenized {
    count: usize,
    ids: Vec<TokenId>,
}

#[derive(Serialize)]
struct Detokenized {
    count: usize,
    text: String,
}

/// A tokenizer file or an id that is refused.
impl From<TokenizerError> for Failure {
    fn from(error: TokenizerError) -> Self {
        Self::refused(error)
    }
}

/// Runs `k3 tokenize`.
pub(crate) fn tokenize(args: &TokenizeArgs) -> Outcome {
    let tokenizer = Tokenizer::open(&args.model)?;
    let text = input(args.text.as_deref(), args.file.as_deref())?;
    let ids = if args.special { tokenizer.encode_with_specials(&text)? } else { tokenizer.encode(&text)? };
    if args.json {
        return output::print_json(&Tokenized { count: ids.len(), ids });
    }
    let mut out = output::stdout();
    for (index, id) in ids.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        write!(out, "{comma}{id}")?;
    }
    writeln!(out)?;
    out.flush()?;
    Ok(())
}

const IDS_HINT: &str = "ids are whole numbers separated by commas, such as 1008,10484,318";

/// Runs `k3 detokenize`.
pub(crate) fn detokenize(args: &DetokenizeArgs) -> Outcome {
    let tokenizer = Tokenizer::open(&args.model)?;
    let ids = parse_ids(&input(args.ids.as_deref(), args.file.as_deref())?)?;
    if args.ids.is_some() && ids.is_empty() {
        return Err(
            Failure::refused(anyhow::anyhow!("--ids: no token ids, expected at least one")).hint(IDS_HINT)
        );
    }
    if args.json {
        return output::print_json(&Detokenized { count: ids.len(), text: tokenizer.decode(&ids)? });
    }
    let bytes = tokenizer.decode_bytes(&ids)?;
    let mut out = output::stdout();
    out.write_all(&bytes)?;
    out.flush()?;
    Ok(())
}

/// The argument, else the file, else standard input.
fn input(argument: Option<&str>, file: Option<&Path>) -> Result<String, Failure> {
    if let Some(text) = argument {
        return Ok(text.to_owned());
    }
    match file {
        Some(path) => read_text("--file", path),
        None => read_stdin("standard input"),
    }
}

/// Ids separated by commas or white space.
fn parse_ids(text: &str) -> Result<Vec<TokenId>, Failure> {
    let fields = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|field| !field.is_empty());
    let number = |(index, field): (usize, &str)| {
        field.parse().map(TokenId).map_err(|_| {
            Failure::refused(anyhow::anyhow!("id {}: {field:?} is not a token id", index + 1)).hint(IDS_HINT)
        })
    };
    fields.enumerate().map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_separated_by_commas_or_space() {
        let ids = |numbers: &[u32]| numbers.iter().copied().map(TokenId).collect::<Vec<_>>();
        assert_eq!(parse_ids(" 1, 2\n3,,4 ").unwrap(), ids(&[1, 2, 3, 4]));
        assert_eq!(parse_ids("").unwrap(), []);
        for bad in ["1,x", "-1", "4294967296", "1.5"] {
            assert!(parse_ids(bad).is_err(), "{bad}");
        }
    }
}
