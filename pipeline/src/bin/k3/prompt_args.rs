//! Where a prompt comes from.

use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use k3_pipeline::tokenizer::Tokenizer;
use k3_pipeline::units::TokenId;

use crate::failure::Failure;

/// A prompt larger than this is no prompt.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// One of several ways to give a prompt.
#[derive(Clone, Debug, clap::Args)]
#[group(multiple = false)]
pub(crate) struct PromptArgs {
    /// The prompt; one that begins with a dash follows --.
    #[arg(value_name = "PROMPT")]
    text: Option<String>,
    /// The prompt, as an option.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// A file that holds the prompt (UTF-8), as it is; - is standard input.
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// The prompt as token ids, as in 1,2,3; needs no tokenizer.
    #[arg(long, value_name = "ID,ID", allow_hyphen_values = true)]
    ids: Option<String>,
}

impl PromptArgs {
    /// Whether no prompt is given.
    pub(crate) fn is_absent(&self) -> bool {
        self.text.is_none() && self.prompt.is_none() && self.prompt_file.is_none() && self.ids.is_none()
    }

    /// The file that the prompt comes from.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.prompt_file.as_deref()
    }

    /// The ids of the prompt; at least one, all below `vocab`. `tokenizer` is asked for when the prompt
    /// is a text.
    pub(crate) fn ids<'t>(
        &self,
        vocab: usize,
        tokenizer: impl FnOnce() -> Result<&'t Tokenizer, Failure>,
    ) -> Result<Vec<TokenId>, Failure> {
        if self.is_absent() {
            return Err(Failure::refused(anyhow!(
                "a prompt is required: PROMPT, --prompt, --prompt-file or --ids"
            )));
        }
        let ids = if let Some(list) = &self.ids {
            parse_ids(list)?
        } else {
            let text = match (&self.prompt_file, self.prompt.as_ref().or(self.text.as_ref())) {
                (Some(path), _) => read_text("--prompt-file", path)?,
                (None, text) => text.cloned().unwrap_or_default(),
            };
            tokenizer()?.encode(&text)?
        };
        if ids.is_empty() {
            return Err(Failure::refused(anyhow!("the prompt is empty"))
                .hint("give a text, or token ids as in --ids 1,2,3"));
        }
        match ids.iter().find(|id| id.0 as usize >= vocab) {
            Some(id) => Err(Failure::refused(anyhow!(
                "token id {id} is not in the vocabulary of {vocab} ids (0 to {})",
                vocab - 1
            ))),
            None => Ok(ids),
        }
    }
}

/// The text of a regular file; of standard input where `path` is "-". `option` is the argument that named
/// it.
pub(crate) fn read_text(option: &str, path: &Path) -> Result<String, Failure> {
    if path.as_os_str() == "-" {
        return read_stdin(&format!("{option} -"));
    }
    let shown = path.display();
    let meta = std::fs::metadata(path)
        .with_context(|| format!("{shown}: cannot read it"))
        .map_err(Failure::refused)?;
    if !meta.is_file() {
        return Err(Failure::refused(anyhow!("{shown}: not a regular file")));
    }
    if meta.len() > FILE_BYTES_MAX {
        return Err(Failure::refused(anyhow!("{shown}: {} bytes is too much for a text", meta.len())));
    }
    std::fs::read_to_string(path)
        .with_context(|| format!("{shown}: cannot read UTF-8 text"))
        .map_err(Failure::refused)
}

/// The text of standard input, which must not be a terminal: nobody would know what it waits for.
/// `what` names it in errors.
pub(crate) fn read_stdin(what: &str) -> Result<String, Failure> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Err(Failure::refused(anyhow!("{what} is a terminal, expected a text"))
            .hint("pipe the text into the command, as in `cat FILE | k3 ...`, or name its file"));
    }
    let mut text = String::new();
    stdin
        .lock()
        .take(FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .with_context(|| format!("{what}: cannot read UTF-8 text"))
        .map_err(Failure::refused)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(Failure::refused(anyhow!(
            "{what}: more than {FILE_BYTES_MAX} bytes are too much for a text"
        )));
    }
    Ok(text)
}

/// `1,2,3`: whole numbers separated by single commas, spaces around them allowed.
pub(crate) fn parse_ids(list: &str) -> Result<Vec<TokenId>, Failure> {
    if list.trim().is_empty() {
        return Ok(Vec::new());
    }
    let one = |(index, field): (usize, &str)| {
        let field = field.trim();
        let digits = !field.is_empty() && field.bytes().all(|b| b.is_ascii_digit());
        let id = if digits { field.parse().ok() } else { None };
        id.map(TokenId).ok_or_else(|| {
            Failure::refused(anyhow!("--ids: entry {} is {field:?}, which is not a token id", index + 1))
                .hint("ids are whole numbers from 0 separated by commas, as in --ids 1,2,3")
        })
    };
    list.split(',').enumerate().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_whole_numbers_between_commas() {
        let ids = |numbers: &[u32]| numbers.iter().copied().map(TokenId).collect::<Vec<_>>();
        assert_eq!(parse_ids("1, 2 ,3").unwrap(), ids(&[1, 2, 3]));
        assert_eq!(parse_ids(" ").unwrap(), []);
        assert_eq!(parse_ids("4294967295").unwrap(), ids(&[u32::MAX]));
        for bad in ["-1", "+1", "4294967296", "4294967297", "1.5,2", "1 2 x", "1 2", "1,,2", "1,", "0x1"] {
            assert!(parse_ids(bad).is_err(), "{bad}");
        }
    }
}
