//! The `k3` binary: argument parsing, printing, exit codes; nothing else.

mod batch;
mod chat;
mod doctor;
mod documents;
mod engine_args;
mod failure;
mod generate;
mod inspect;
mod interrupt;
mod logits_file;
mod model_summary;
mod output;
mod pack;
mod plan;
mod preset;
mod preset_args;
mod printer;
mod progress;
mod prompt_args;
mod report;
mod sampling_args;
mod terminal;
mod tokenize;

#[cfg(test)]
#[path = "../../../../tests/src/documents.rs"]
mod texts;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::failure::Outcome;

/// Exact inference for Kimi K3 from the released weights, streamed from disk.
///
/// Results go to stdout, reports and errors to stderr.
#[derive(Debug, Parser)]
#[command(
    name = "k3",
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  k3 generate --preset demo 'Shall I'
  k3 plan --preset demo
  k3 generate --preset laptop --model ~/Kimi-K3 'The capital of France is'
  k3 chat --preset laptop --model ~/Kimi-K3

Exit codes: 0 success; 1 the run failed; 2 usage, or a refused config, preset or plan;
3 a verification failed. NO_COLOR switches colours off."
)]
pub(crate) struct Cli {
    /// Nothing on stderr but errors: no reports, no progress.
    #[arg(long, short, global = true, display_order = 900)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Continue many prompts together, one JSON object per line.
    Batch(Box<batch::Args>),
    /// Talk with the model.
    Chat(Box<chat::Args>),
    /// Print a script that completes commands in a shell.
    Completions(documents::CompletionsArgs),
    /// Continue a prompt.
    Generate(Box<generate::Args>),
    /// Measure this machine and say which preset suits it, and what to type.
    Doctor(doctor::Args),
    /// Show what a model directory holds and what is missing.
    Inspect(inspect::Args),
    /// Print the manual page, or write the pages of all commands.
    Man(documents::ManArgs),
    /// Write the trunk as one file, coded and in order of execution.
    Pack(Box<pack::Args>),
    /// Show what a preset takes of memory and disk, before anything is allocated.
    Plan(Box<plan::Args>),
    /// List, explain, check and write presets.
    Preset(preset::Args),
    /// Print the token ids of a text.
    Tokenize(tokenize::TokenizeArgs),
    /// Print the text of token ids.
    Detokenize(tokenize::DetokenizeArgs),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return failure::usage(&error),
    };
    if cli.quiet {
        terminal::be_quiet();
    }
    failure::exit_code(run(&cli.command))
}

fn run(command: &Command) -> Outcome {
    match command {
        Command::Batch(args) => batch::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Completions(args) => documents::completions(args),
        Command::Generate(args) => generate::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Man(args) => documents::man(args),
        Command::Pack(args) => pack::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Preset(args) => preset::run(args),
        Command::Tokenize(args) => tokenize::tokenize(args),
        Command::Detokenize(args) => tokenize::detokenize(args),
    }
}
