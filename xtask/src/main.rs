//! Project tasks, run as `cargo xtask TASK`: the gate, golden snapshots, verification, benchmarks.
//!
//! Exit codes: 0 done; 1 the task failed; 2 usage; 3 a verification failed.
// A task runner talks to its user on the terminal.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod cache_sim;
mod check;
mod checkpoint;
mod golden;
mod isa;
mod ladder;
mod miri;
mod no_std;
mod overlap;
mod passes;
mod progress;
mod record;
mod rehearse;
mod run_k3;
mod synth;
mod tidy;
mod traps;
mod ulp;
mod verify;

#[cfg(test)]
#[path = "../../tests/src/documents.rs"]
mod texts;

use std::path::PathBuf;
use std::process::Command;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use k3_pipeline::causes::with_causes;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Project tasks", arg_required_else_help = true, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Times every kernel beside the read bandwidth of the same run and a body with f64 lanes.
    Bench(bench::Options),
    /// Replays a trace of expert requests through the cache policies.
    CacheSim(cache_sim::Options),
    /// The whole gate: format, lints, tidy, tests, golden snapshots, docs.
    Check,
    /// Our own golden snapshots and the checksums of golden files: renewed, or compared.
    Golden(golden::Args),
    /// The kernels on every instruction set that can be run here: tests, and digests that must be equal.
    Isa(isa::Options),
    /// Time per token at every memory budget that fits, and over the split of one: a table and a picture.
    Ladder(ladder::Args),
    /// The scalar kernels, the arenas and the compute threads under Miri, where it can be had.
    Miri(miri::Options),
    /// Compares the time of a token with the longer of disk and computation, at several disk speeds.
    Overlap(overlap::Args),
    /// Measures what passes of many tokens cost: prompts, drafts, memory.
    Passes(passes::Args),
    /// Records a session of `k3` in docs/SESSION.md.
    Record(record::Args),
    /// Runs the full-scale model, laid out in sparse files, under a hard memory limit.
    Rehearse(rehearse::Args),
    /// Makes a model of the released widths that is small enough to measure with.
    Synth(synth::Args),
    /// Checks what no compiler checks: file lengths, where `unsafe` may stand, which way imports point.
    Tidy,
    /// Makes each known mistake on purpose and sees the tests fail.
    Traps(traps::Args),
    /// Accuracy of the elementary functions over every f32: takes minutes.
    Ulp,
    /// Compares the engine with the released model's own numbers, and with itself bit for bit.
    Verify(verify::Args),
}

/// What a task reports when it did not end well.
pub enum Failure {
    /// The task could not be done, or found the tree wanting: exit code 1.
    Failed(anyhow::Error),
    /// A comparison came out wrong: exit code 3.
    Verification(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// The root of the repository.
fn root() -> PathBuf {
    k3_golden::repository_root()
}

/// The cargo that runs this task, at the root of the repository.
fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Bench(options) => bench::run(&options),
        Task::CacheSim(options) => cache_sim::run(&options),
        Task::Check => check::run(),
        Task::Golden(args) => golden::run(&args),
        Task::Isa(options) => isa::run(&options),
        Task::Ladder(args) => ladder::run(&args),
        Task::Miri(options) => miri::run(&options),
        Task::Overlap(args) => overlap::run(&args),
        Task::Passes(args) => passes::run(&args),
        Task::Record(args) => record::run(&args),
        Task::Rehearse(args) => rehearse::run(&args),
        Task::Synth(args) => synth::run(&args),
        Task::Tidy => tidy::run(),
        Task::Traps(args) => traps::run(&args),
        Task::Ulp => ulp::run(),
        Task::Verify(args) => verify::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Failed(error)) => {
            eprintln!("error: {}", with_causes(error.as_ref()));
            ExitCode::from(1)
        }
        Err(Failure::Verification(error)) => {
            eprintln!("error: {}", with_causes(error.as_ref()));
            ExitCode::from(3)
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use clap::error::ErrorKind;

    use super::*;
    use crate::texts::{How, lines, lines_of};

    /// Narrower than help is set, so that no line is broken in the middle.
    const HELP_COLUMNS_MAX: usize = 98;

    #[test]
    fn no_line_of_help_is_broken() {
        let root = Cli::command();
        for task in root.get_subcommands() {
            let help = task.get_after_help().map(ToString::to_string).unwrap_or_default();
            for line in help.lines() {
                let columns = line.chars().count();
                assert!(columns <= HELP_COLUMNS_MAX, "{}: {columns}: {line}", task.get_name());
            }
        }
    }

    #[test]
    fn command_lines_of_the_documents() {
        let mut count = 0;
        for line in lines(&root()).unwrap() {
            for words in line.arguments_of(&["cargo", "xtask"]) {
                let kind = Cli::try_parse_from(&words).err().map(|error| error.kind());
                let is_part = matches!(
                    kind,
                    Some(
                        ErrorKind::MissingRequiredArgument
                            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
                    )
                );
                let holds = kind.is_none() || (line.how == How::Named && is_part);
                assert!(holds, "{}: {}: {kind:?}", line.place, line.text);
                count += 1;
            }
        }
        assert!(count > 10, "{count} command lines");
        let wrong = lines_of("x", "`cargo xtask verfy`").unwrap();
        assert!(Cli::try_parse_from(&wrong[0].arguments_of(&["cargo", "xtask"])[0]).is_err());
    }
}
