//! `cargo xtask golden`: our own bit-level snapshots (digests of logits, plans, schedules, presets,
//! refusals), which are tests that use insta, and the checksums of the golden files.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use clap::{Args as ClapArgs, Subcommand};
use k3_golden::{golden_dir, list_checksums, verify_checksums};

use crate::{Failure, cargo, root};

/// Arguments of `cargo xtask golden`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  cargo xtask golden check     after a change that must not change a bit
  cargo xtask golden build     after one that must; then read `git diff` before it is committed

Exit codes: 0 all as it was; 1 could not run; 2 usage; 3 something differs.")]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Subcommand)]
enum Action {
    /// Renews every snapshot and golden/SHA256SUMS, and removes snapshots that no test asks for.
    Build,
    /// Compares everything with what is committed.
    Check,
}

/// Where the snapshot tests are: arguments of `cargo test`.
const SNAPSHOT_TESTS: [&[&str]; 2] = [
    &["-p", "k3-pipeline", "--lib", "--", "plan::tests::", "preset::tests::"],
    &["-p", "k3-tests", "--test", "k3", "--", "golden_snapshots::"],
];

/// Folders and files below `golden/` whose bytes are fixed, but for texts about them (`.md`).
const FIXED: [&str; 4] = ["demo", "k3-dimensions.json", "models", "vectors"];

/// Where insta notes the snapshots that tests have asked for.
pub const REFERENCES_ENV: &str = "INSTA_SNAPSHOT_REFERENCES_FILE";

/// The snapshots that tests asked for, noted while they run.
#[derive(Debug)]
pub struct References(PathBuf);

impl References {
    /// Begins an empty note.
    pub fn begin() -> anyhow::Result<Self> {
        let path = root().join("target/snapshot-references");
        fs::create_dir_all(root().join("target")).context("cannot create target")?;
        fs::write(&path, "").with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self(path))
    }

    /// The file, for [`REFERENCES_ENV`].
    pub fn path(&self) -> &Path {
        &self.0
    }

    fn read(&self) -> anyhow::Result<BTreeSet<PathBuf>> {
        let text =
            fs::read_to_string(&self.0).with_context(|| format!("cannot read {}", self.0.display()))?;
        text.lines()
            .map(|line| {
                fs::canonicalize(line).with_context(|| format!("a test asked for {line}, which is not there"))
            })
            .collect()
    }
}

/// Runs the task.
pub fn run(args: &Args) -> Result<(), Failure> {
    let references = References::begin()?;
    if args.action == Action::Check {
        run_tests(&references, "no").map_err(Failure::Verification)?;
        return check_files(&references);
    }
    write_list()?;
    run_tests(&references, "always")?;
    for path in snapshots_of_no_test(&references)?.into_iter().chain(pending(&root())?) {
        eprintln!("golden: removing {}", path.display());
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    check_files(&references)
}

fn run_tests(references: &References, update: &str) -> anyhow::Result<()> {
    for args in SNAPSHOT_TESTS {
        let shown = format!("cargo test --locked {}", args.join(" "));
        let status = cargo()
            .args(["test", "--quiet", "--locked"])
            .args(args)
            .env("INSTA_UPDATE", update)
            .env("INSTA_FORCE_PASS", "0")
            .env(REFERENCES_ENV, references.path())
            .status()
            .with_context(|| format!("cannot start `{shown}`"))?;
        if !status.success() {
            bail!("`{shown}` failed; where the change is meant: `cargo xtask golden build`");
        }
    }
    Ok(())
}

/// Everything but the snapshots' contents: checksums, golden files that no list covers, snapshots that
/// nobody has accepted, and snapshots that no test asks for.
pub fn check_files(references: &References) -> Result<(), Failure> {
    let files = check_list().map_err(Failure::Verification)?;
    let pending = pending(&root())?;
    let unused = snapshots_of_no_test(references)?;
    if !pending.is_empty() || !unused.is_empty() {
        let line = |why: &str, path: &PathBuf| format!("\n  {} {why}", path.display());
        let findings = pending.iter().map(|path| line("waits to be accepted", path));
        let findings: String =
            findings.chain(unused.iter().map(|path| line("is asked for by no test", path))).collect();
        let all = format!(
            "snapshots that should not be there:{findings}\nremove them, or `cargo xtask golden build`"
        );
        return Err(Failure::Verification(anyhow!(all)));
    }
    eprintln!("golden: {files} files and {} snapshots as they were", references.read()?.len());
    Ok(())
}

/// Checks golden/SHA256SUMS both ways: what it lists is unchanged, and it lists everything.
fn check_list() -> anyhow::Result<usize> {
    let list = golden_dir().join("SHA256SUMS");
    let count = verify_checksums(&list)?;
    let text = fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
    let listed: BTreeSet<&str> = text.lines().filter_map(|line| line.split_once("  ")).map(|l| l.1).collect();
    let fixed = fixed_files()?;
    match fixed.iter().find(|name| !listed.contains(name.as_str())) {
        Some(name) => {
            bail!("golden/{name} is not in golden/SHA256SUMS; remove it, or `cargo xtask golden build`")
        }
        None => Ok(count),
    }
}

fn write_list() -> anyhow::Result<()> {
    let list = golden_dir().join("SHA256SUMS");
    fs::write(&list, list_checksums(&golden_dir(), &fixed_files()?)?)
        .with_context(|| format!("cannot write {}", list.display()))
}

/// Names of the files whose bytes are fixed, relative to `golden/`, sorted.
fn fixed_files() -> anyhow::Result<Vec<String>> {
    let golden = golden_dir();
    let mut files = Vec::new();
    for name in FIXED {
        walk(&golden.join(name), &mut files)?;
    }
    let mut names: Vec<String> = files
        .iter()
        .filter_map(|file| file.strip_prefix(&golden).ok())
        .map(|name| name.to_string_lossy().into_owned())
        .filter(|name| !name.ends_with(".md"))
        .collect();
    names.sort();
    Ok(names)
}

fn snapshots_of_no_test(references: &References) -> anyhow::Result<Vec<PathBuf>> {
    let asked_for = references.read()?;
    let mut unused = source_files(&root())?;
    unused.retain(|file| file.extension().is_some_and(|e| e == "snap") && !asked_for.contains(file));
    Ok(unused)
}

/// What insta leaves behind for a human to accept.
fn pending(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = source_files(root)?;
    files.retain(|file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        name.ends_with(".snap.new") || name.ends_with(".pending-snap")
    });
    Ok(files)
}

/// Every file of the packages, canonical.
fn source_files(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let root = fs::canonicalize(root).with_context(|| format!("cannot resolve {}", root.display()))?;
    let mut files = Vec::new();
    for package in ["kernel", "pipeline", "golden", "tests", "xtask"] {
        walk(&root.join(package), &mut files)?;
    }
    Ok(files)
}

/// Adds `path`, or every file below it.
fn walk(path: &Path, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    if !path.is_dir() {
        files.push(path.to_path_buf());
        return Ok(());
    }
    let entries = fs::read_dir(path).with_context(|| format!("cannot list {}", path.display()))?;
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot list {}", path.display()))?;
        walk(&entry.path(), files)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fixed_file_is_in_the_list() {
        check_list().unwrap();
        let names = fixed_files().unwrap();
        assert!(names.iter().any(|n| n == "vectors/kernels-shared.safetensors"), "{names:?}");
        assert!(names.iter().any(|n| n.starts_with("demo/")), "{names:?}");
    }

    #[test]
    fn nothing_waits_to_be_accepted() {
        assert_eq!(pending(&root()).unwrap(), Vec::<PathBuf>::new());
    }
}
