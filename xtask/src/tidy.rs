//! Checks what no compiler checks: file lengths, left-overs, where `unsafe` may stand, and which way
//! imports point.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};

use crate::{Failure, root};

/// Longest source file, in lines, that needs no reason.
const FILE_LINES_MAX: usize = 500;

/// Longer files, each with its reason.
const LONG_FILES: &[(&str, &str)] = &[];

/// The only places where `unsafe` may stand (path prefixes).
const UNSAFE_PLACES: &[&str] = &[
    "kernel/src/isa/",
    "kernel/src/dispatch.rs",
    "kernel/src/out.rs",
    "pipeline/src/memory/",
    "pipeline/src/store/uring.rs",
    "pipeline/src/team.rs",
    "pipeline/src/team/cut.rs",
];

/// `(folder or file, module it must not know)` within `pipeline/src`.
const FORBIDDEN_ARROWS: &[(&str, &[&str])] = &[
    ("model", &["preset", "plan", "store", "memory", "forward", "engine", "session"]),
    ("preset", &["store", "memory", "forward", "engine", "session"]),
    ("plan", &["store", "memory", "forward", "engine", "session"]),
    ("schedule", &["store", "memory", "forward", "engine", "session"]),
    ("memory", &["store", "forward", "engine", "session"]),
    ("store", &["forward", "engine", "session", "preset"]),
    ("forward", &["store", "memory", "engine", "session", "preset"]),
    ("state", &["store", "memory", "forward", "engine", "session", "preset"]),
    ("tokenizer", &["store", "memory", "forward", "engine", "session", "plan"]),
    ("chat", &["store", "memory", "forward", "engine", "plan"]),
    ("sample", &["store", "memory", "forward", "engine", "session", "plan"]),
];

/// Words that must not be left behind.
const LEFT_OVERS: &[&str] = &["TODO", "FIXME", "XXX", "HACK"];

/// Runs every check; the error lists all findings.
pub fn run() -> Result<(), Failure> {
    let root = root();
    let mut findings = Vec::new();
    for file in rust_files(&root)? {
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let name = file.strip_prefix(&root).unwrap_or(&file).to_string_lossy().replace('\\', "/");
        check_file(&name, &text, &mut findings);
    }
    if findings.is_empty() {
        return Ok(());
    }
    Err(anyhow!("tidy found {}:\n  {}", findings.len(), findings.join("\n  ")).into())
}

fn check_file(name: &str, text: &str, findings: &mut Vec<String>) {
    let lines = text.lines().count();
    if lines > FILE_LINES_MAX && !LONG_FILES.iter().any(|(file, _)| *file == name) {
        findings.push(format!("{name}: {lines} lines, at most {FILE_LINES_MAX} without a stated reason"));
    }
    let is_test = name.contains("/tests/") || name.ends_with("tests.rs");
    if !is_test && !text.trim_start().starts_with("//!") {
        findings.push(format!("{name}: starts without a `//!` line that says what it is"));
    }
    for (number, line) in text.lines().enumerate() {
        check_line(name, number + 1, line, findings);
    }
}

fn check_line(name: &str, number: usize, line: &str, findings: &mut Vec<String>) {
    let own_word_list = name == "xtask/src/tidy.rs";
    if !own_word_list && let Some(word) = LEFT_OVERS.iter().find(|word| has_word(line, word)) {
        findings.push(format!("{name}:{number}: left-over {word}"));
    }
    let code = line.split("//").next().unwrap_or_default();
    let allowed = UNSAFE_PLACES.iter().any(|place| name.starts_with(place)) || !name.contains("/src/");
    if !own_word_list && !allowed && has_word(code, "unsafe") {
        findings.push(format!("{name}:{number}: `unsafe` outside the places kept for it"));
    }
    for module in forbidden_arrows(name) {
        if code.contains(&format!("crate::{module}::")) {
            findings.push(format!("{name}:{number}: must not know `{module}`"));
        }
    }
}

/// Modules that the file `name` must not import.
fn forbidden_arrows(name: &str) -> impl Iterator<Item = &'static str> {
    let place = name.strip_prefix("pipeline/src/").unwrap_or_default();
    let module = place.split('/').next().unwrap_or_default().trim_end_matches(".rs").to_owned();
    FORBIDDEN_ARROWS
        .iter()
        .filter(move |(from, _)| *from == module)
        .flat_map(|(_, modules)| modules.iter().copied())
}

fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        !part(before) && !part(after)
    })
}

/// Every Rust source below `root` that is ours, sorted.
fn rust_files(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for package in ["kernel", "pipeline", "golden", "tests", "xtask"] {
        collect(&root.join(package), &mut found)?;
    }
    found.sort();
    Ok(found)
}

fn collect(folder: &Path, found: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            collect(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(name: &str, text: &str) -> Vec<String> {
        let mut found = Vec::new();
        check_file(name, text, &mut found);
        found
    }

    #[test]
    fn clean_file_passes() {
        assert_eq!(
            findings("pipeline/src/forward/mod.rs", "//! A pass.\nuse crate::source::Block;\n"),
            [""; 0]
        );
    }

    #[test]
    fn each_fault_is_found() {
        let left = concat!("//! A.\n// TO", "DO later\n");
        assert!(findings("kernel/src/a.rs", left)[0].contains("left-over"));
        assert!(findings("kernel/src/a.rs", "//! A.\nunsafe fn f() {}\n")[0].contains("unsafe"));
        assert!(findings("pipeline/src/forward/a.rs", "//! A.\nuse crate::store::Q;\n")[0].contains("store"));
        assert!(findings("kernel/src/a.rs", "fn f() {}\n")[0].contains("//!"));
        let long = format!("//! A.\n{}", "\n".repeat(FILE_LINES_MAX));
        assert!(findings("kernel/src/a.rs", &long)[0].contains("lines"));
    }

    #[test]
    fn unsafe_has_its_places() {
        assert_eq!(findings("kernel/src/isa/avx2.rs", "//! A.\nunsafe fn f() {}\n"), [""; 0]);
    }
}
