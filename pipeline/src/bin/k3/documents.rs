//! `k3 completions` and `k3 man`: what the command line says of itself, for shells and readers.

use std::io::Write;
use std::path::PathBuf;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::Cli;
use crate::failure::{Failure, Outcome};
use crate::output::{self, Existing};

/// Arguments of `k3 completions`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 completions bash > ~/.local/share/bash-completion/completions/k3
  k3 completions zsh > ~/.zfunc/_k3
  k3 completions fish > ~/.config/fish/completions/k3.fish")]
pub(crate) struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

/// Arguments of `k3 man`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 man | man -l -
  k3 man --dir ~/.local/share/man/man1")]
pub(crate) struct ManArgs {
    /// Write the pages of all commands to this directory, which is made if it is not there.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Prints the script.
pub(crate) fn completions(args: &CompletionsArgs) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "k3", &mut script);
    let mut out = output::stdout();
    out.write_all(&script)?;
    out.flush()?;
    Ok(())
}

/// Prints the page of `k3`, or writes the pages of all commands.
pub(crate) fn man(args: &ManArgs) -> Outcome {
    let mut root = Cli::command().disable_help_subcommand(true);
    root.build();
    let Some(dir) = &args.dir else {
        let mut out = output::stdout();
        out.write_all(&page(&root)?)?;
        out.flush()?;
        return Ok(());
    };
    std::fs::create_dir_all(dir).map_err(|error| {
        Failure::refused(anyhow::Error::new(error).context(format!("--dir: cannot make {}", dir.display())))
    })?;
    let mut out = output::stdout();
    for command in all(&root) {
        let path = dir.join(format!("{}.1", command.get_display_name().unwrap_or("k3")));
        output::write_file(&path, &page(command)?, Existing::Replace)?;
        writeln!(out, "{}", path.display())?;
    }
    out.flush()?;
    Ok(())
}

fn page(command: &clap::Command) -> Result<Vec<u8>, Failure> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    Ok(page)
}

/// A command and all below it.
fn all(command: &clap::Command) -> Vec<&clap::Command> {
    let below = command.get_subcommands().filter(|c| c.get_name() != "help").flat_map(all);
    std::iter::once(command).chain(below).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use clap::error::ErrorKind;

    use super::*;
    use crate::texts::{How, lines, lines_of};

    /// What is wrong with a command line, if anything is.
    fn problem(words: &[String], is_whole: bool) -> Option<String> {
        let error = Cli::try_parse_from(words).err()?;
        let is_part = matches!(
            error.kind(),
            ErrorKind::MissingRequiredArgument
                | ErrorKind::MissingSubcommand
                | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
        );
        let is_help = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
        (!is_help && (is_whole || !is_part)).then(|| error.to_string())
    }

    #[test]
    fn command_lines_of_the_documents() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut count = 0;
        for line in lines(&root).unwrap() {
            for words in line.arguments_of(&["k3"]) {
                let problem = problem(&words, line.how != How::Named);
                assert!(problem.is_none(), "{}: {}\n{}", line.place, line.text, problem.unwrap_or_default());
                count += 1;
            }
        }
        assert!(count > 30, "{count} command lines");
        let wrong = ["k3", "plan", "--preste", "demo"].map(str::to_owned);
        assert!(problem(&wrong, false).is_some());
    }

    #[test]
    fn every_example_parses() {
        let mut root = Cli::command();
        root.build();
        for command in all(&root) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            for example in help.lines().filter_map(|line| line.strip_prefix("  ")) {
                // What explains an example stands after it, two spaces away.
                let example = example.split("   ").next().unwrap_or_default();
                let text = format!("```sh\n{example}\n```\n");
                for line in lines_of("help", &text).unwrap() {
                    for words in line.arguments_of(&["k3"]) {
                        let problem = problem(&words, true);
                        assert!(problem.is_none(), "{example}: {}", problem.unwrap_or_default());
                    }
                }
            }
        }
    }

    /// Narrower than help is set, so that no line is broken in the middle.
    const HELP_COLUMNS_MAX: usize = 98;

    #[test]
    fn no_line_of_help_is_broken() {
        let mut root = Cli::command();
        root.build();
        for command in all(&root) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            for line in help.lines() {
                let columns = line.chars().count();
                assert!(columns <= HELP_COLUMNS_MAX, "{}: {columns}: {line}", command.get_name());
            }
        }
    }

    #[test]
    fn no_option_stands_under_a_heading_of_others() {
        let mut root = Cli::command();
        root.build();
        for command in all(&root) {
            for arg in command.get_arguments() {
                let heading = arg.get_help_heading();
                let is_common =
                    ["json", "session", "max_tokens", "quiet", "model"].contains(&arg.get_id().as_str());
                assert!(!is_common || heading.is_none(), "{}: {arg}: {heading:?}", command.get_name());
            }
        }
    }

    #[test]
    fn every_command_has_examples() {
        let mut root = Cli::command();
        root.build();
        for command in all(&root) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let name = command.get_display_name().unwrap_or("k3");
            let start = format!("Examples:\n  {}", name.replace('-', " "));
            assert!(help.starts_with(&start), "{name}: {help}");
        }
    }
}
