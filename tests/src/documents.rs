//! The commands that stand in the documents: fenced blocks of `sh` (run by a test), of `sh no-run` and
//! `console` (parsed), and code within a line that begins with `k3` or `cargo xtask` (parsed as far as
//! it goes).

use std::fs;
use std::io;
use std::path::Path;

/// What a test does with a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// It is run.
    Run,
    /// It is whole and must parse.
    Parse,
    /// It is named in a sentence: what is required may be missing.
    Named,
}

/// One line of commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// File and line number.
    pub place: String,
    /// As a shell takes it, with `k3` for the binary.
    pub text: String,
    /// What a test does with it.
    pub how: How,
    /// The words of each command in it, without redirections.
    pub commands: Vec<Vec<String>>,
}

impl Line {
    fn new(place: String, text: &str, how: How) -> Self {
        let text = text.replace("cargo run --release -- ", "k3 ");
        let commands = words(&text);
        Self { place, text, how, commands }
    }

    /// Arguments of the commands that begin with `program`, which are part of what they are parsed as.
    pub fn arguments_of(&self, program: &[&str]) -> Vec<Vec<String>> {
        let begins = |words: &&Vec<String>| {
            words.iter().map(String::as_str).take(program.len()).eq(program.iter().copied())
        };
        self.commands.iter().filter(begins).map(|words| words[program.len() - 1..].to_vec()).collect()
    }
}

/// Every command line of README.md, ARCHITECTURE.md, CONTRIBUTING.md and docs/*.md below `root`.
///
/// # Errors
/// A document that cannot be read, and a fenced block of commands that does not say what it is.
pub fn lines(root: &Path) -> io::Result<Vec<Line>> {
    let mut names: Vec<String> =
        ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(str::to_owned).into();
    for entry in fs::read_dir(root.join("docs"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".md") {
            names.push(format!("docs/{name}"));
        }
    }
    names.sort();
    let mut all = Vec::new();
    for name in names {
        all.extend(lines_of(&name, &fs::read_to_string(root.join(&name))?)?);
    }
    Ok(all)
}

/// The command lines of one document.
///
/// # Errors
/// A fenced block of commands that does not say what it is.
pub fn lines_of(name: &str, text: &str) -> io::Result<Vec<Line>> {
    let mut found = Vec::new();
    let mut fence: Option<&str> = None;
    let mut begun = String::new();
    for (number, line) in text.lines().enumerate() {
        let place = || format!("{name}:{}", number + 1);
        if let Some(kind) = line.trim_start().strip_prefix("```") {
            fence = if fence.is_some() { None } else { Some(kind.trim()) };
            continue;
        }
        let how = match fence {
            None => {
                found.extend(named(line).map(|code| Line::new(place(), code, How::Named)));
                continue;
            }
            Some("sh") => How::Run,
            Some("sh no-run") => How::Parse,
            Some("console") => match line.strip_prefix("$ ") {
                Some(command) => {
                    found.push(Line::new(place(), command, How::Parse));
                    continue;
                }
                None => continue,
            },
            Some(kind) if is_command(line) => {
                return Err(io::Error::other(format!("{}: a command in a block of {kind:?}", place())));
            }
            Some(_) => continue,
        };
        let line = without_comment(line).trim();
        if let Some(part) = line.strip_suffix('\\') {
            begun.push_str(part);
        } else if !line.is_empty() || !begun.is_empty() {
            found.push(Line::new(place(), &(std::mem::take(&mut begun) + line), how));
        }
    }
    Ok(found)
}

fn is_command(line: &str) -> bool {
    ["k3 ", "cargo ", "$ ", "target/release/k3 "].iter().any(|start| line.trim_start().starts_with(start))
}

/// Code within a sentence that is a command with something after its name.
fn named(line: &str) -> impl Iterator<Item = &str> {
    let code = line.split('`').skip(1).step_by(2);
    code.filter(|code| code.starts_with("k3 ") || code.starts_with("cargo xtask "))
}

/// The part of a line before a `#` that stands after a space and outside quotes.
fn without_comment(line: &str) -> &str {
    let mut quote = None;
    let mut before = ' ';
    for (at, c) in line.char_indices() {
        match quote {
            None if c == '#' && before.is_whitespace() => return &line[..at],
            None if matches!(c, '\'' | '"') => quote = Some(c),
            Some(q) if c == q => quote = None,
            _ => {}
        }
        before = c;
    }
    line
}

/// The words of every command of a line: quotes taken off, redirections left out.
fn words(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut quote = None;
    let end = |word: &mut Option<String>, commands: &mut Vec<Vec<String>>| {
        if let (Some(word), Some(command)) = (word.take(), commands.last_mut()) {
            command.push(word);
        }
    };
    for c in line.chars() {
        match (quote, c) {
            (Some(q), c) if q == c => quote = None,
            (Some(_), c) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '|' | ';' | '&') => {
                end(&mut word, &mut commands);
                commands.push(Vec::new());
            }
            (None, c) if c.is_whitespace() => end(&mut word, &mut commands),
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    end(&mut word, &mut commands);
    for command in &mut commands {
        if let Some(at) = command.iter().position(|word| word == ">" || word == "<") {
            command.truncate(at);
        }
    }
    commands.retain(|command| !command.is_empty());
    commands
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_found_with_what_is_to_be_done_with_them() {
        let text = "Say `k3 plan --json` or `--json`.\n```sh\nk3 a 'b # c' \\\n  d  # e\n\n```\n```sh no-run\n\
                    cargo run --release -- x | k3 y > z\n```\n```console\n$ k3 w\nk3 output\n```\n```toml\nx = 1\n```\n";
        let found = lines_of("f", text).unwrap();
        let shown: Vec<(&str, How, Vec<String>)> = found
            .iter()
            .map(|l| (l.place.as_str(), l.how, l.commands.iter().map(|c| c.join("+")).collect()))
            .collect();
        let commands = |texts: &[&str]| texts.iter().map(|&t| t.to_owned()).collect::<Vec<_>>();
        assert_eq!(
            shown,
            [
                ("f:1", How::Named, commands(&["k3+plan+--json"])),
                ("f:4", How::Run, commands(&["k3+a+b # c+d"])),
                ("f:8", How::Parse, commands(&["k3+x", "k3+y"])),
                ("f:11", How::Parse, commands(&["k3+w"])),
            ]
        );
        assert_eq!(found[2].arguments_of(&["k3"]), [["k3", "x"], ["k3", "y"]]);
        assert!(lines_of("f", "```\nk3 x\n```\n").is_err());
    }
}
