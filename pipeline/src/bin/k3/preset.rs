//! `k3 preset`: the presets that exist, what they say, and new ones.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use k3_pipeline::machine::Machine;
use k3_pipeline::plan::plan;
use k3_pipeline::preset::{BUILTIN_NAMES, KeyInfo, LADDER, MemoryBudget, Pinned, Preset};
use k3_pipeline::units::Bytes;
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::output::{self, Existing};
use crate::preset_args::{ModelArgs, ShardArgs};

/// Arguments of `k3 preset`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 preset list
  k3 preset show laptop
  k3 preset new mine --memory 24GB")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// List the built-in presets.
    #[command(after_help = "Examples:\n  k3 preset list\n  k3 preset list --json")]
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print a preset with an explanation of each key; the text is a preset file itself.
    Show(ShowArgs),
    /// Check preset files.
    Check(CheckArgs),
    /// Write a commented preset file, fitted to this machine and, where one is given, to a model.
    New(NewArgs),
}

/// Arguments of `k3 preset show`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 preset show laptop
  k3 preset show laptop --set context.tokens=8192 > mine.toml
  k3 preset show ./mine.toml --json")]
struct ShowArgs {
    /// A built-in preset, or the path of a preset file.
    #[arg(value_name = "NAME|FILE")]
    preset: String,
    /// Change one key first.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Print every key with its value as JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `k3 preset check`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 preset check ./mine.toml
  k3 preset check ./mine.toml ./other.toml --json")]
struct CheckArgs {
    /// Names or files.
    #[arg(required = true, value_name = "NAME|FILE")]
    presets: Vec<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `k3 preset new`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 preset new mine --memory 24GB --model ~/Kimi-K3
  k3 generate --preset ./mine.toml --model ~/Kimi-K3 'Hello'")]
struct NewArgs {
    /// Name of the preset; the file is NAME.toml in the working directory.
    name: String,
    /// Memory of the whole process, as in 24GB; without it, what this machine has free now, less
    /// head-room.
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    memory: Option<String>,
    /// Preset to start from; without it, the largest built-in that the memory allows.
    #[arg(long, value_name = "NAME|FILE")]
    from: Option<String>,
    /// Change one key; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    shards: ShardArgs,
    /// Replace a file of that name.
    #[arg(long)]
    force: bool,
    /// Print one JSON object: the file, and what is in it.
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> Outcome {
    match &args.command {
        Command::List { json } => list(*json),
        Command::Show(args) => show(args),
        Command::Check(args) => check(args),
        Command::New(args) => new(args),
    }
}

#[derive(Serialize)]
struct Entry {
    name: &'static str,
    budget: Option<Bytes>,
    about: String,
}

fn list(json: bool) -> Outcome {
    let mut entries = Vec::new();
    for name in BUILTIN_NAMES {
        let preset = Preset::load(name, &[])?;
        entries.push(Entry { name, budget: limit(&preset), about: preset.about });
    }
    if json {
        return output::print_json(&entries);
    }
    let mut out = output::stdout();
    for entry in entries {
        writeln!(out, "{:<12} {}", entry.name, entry.about)?;
    }
    out.flush()?;
    Ok(())
}

fn limit(preset: &Preset) -> Option<Bytes> {
    match preset.budget {
        MemoryBudget::Auto => None,
        MemoryBudget::Limit(bytes) => Some(bytes),
    }
}

/// One key of a preset.
#[derive(Serialize)]
struct KeyEntry {
    key: &'static str,
    /// As TOML; absent where an optional key is.
    value: Option<String>,
    allowed: &'static str,
    about: &'static str,
    required: bool,
}

fn show(args: &ShowArgs) -> Outcome {
    let preset = Preset::load(&args.preset, &args.set)?;
    if args.json {
        let entry = |(key, value): (KeyInfo, Option<String>)| {
            let KeyInfo { path, allowed, about, required } = key;
            KeyEntry { key: path, value, allowed, about, required }
        };
        return output::print_json(&preset.values().map(entry).collect::<Vec<_>>());
    }
    let mut out = output::stdout();
    out.write_all(preset.to_commented_toml().as_bytes())?;
    out.flush()?;
    Ok(())
}

/// What is to say of one preset.
#[derive(Serialize)]
struct Checked<'a> {
    preset: &'a str,
    about: Option<String>,
    problem: Option<String>,
    #[serde(skip)]
    hint: Option<String>,
}

fn check(args: &CheckArgs) -> Outcome {
    let checked: Vec<Checked<'_>> = args.presets.iter().map(|name| one_checked(name)).collect();
    if args.json {
        output::print_json(&checked)?;
    } else {
        let mut out = output::stdout();
        for Checked { preset, about, .. } in &checked {
            if let Some(about) = about {
                writeln!(out, "{preset}: ok ({about})")?;
            }
        }
        out.flush()?;
    }
    let hint = checked.iter().find_map(|c| c.hint.clone());
    let wrong: Vec<String> = checked.into_iter().filter_map(|c| c.problem).collect();
    if wrong.is_empty() {
        return Ok(());
    }
    let refused = Failure::refused(anyhow!(wrong.join("\n")));
    Err(match hint {
        Some(hint) => refused.hint(hint),
        None => refused,
    })
}

fn one_checked(name: &str) -> Checked<'_> {
    match Preset::load(name, &[]) {
        Ok(preset) => Checked { preset: name, about: Some(preset.about), problem: None, hint: None },
        Err(error) => {
            Checked { preset: name, about: None, problem: Some(error.to_string()), hint: error.hint() }
        }
    }
}

/// A preset that was written.
#[derive(Serialize)]
struct Written<'a> {
    file: &'a Path,
    name: &'a str,
    /// The preset that it started from.
    from: &'a str,
    budget: Option<Bytes>,
    model: Option<&'a Path>,
}

fn new(args: &NewArgs) -> Outcome {
    let path = file_for(&args.name)?;
    let machine = Machine::detect().map_err(Failure::run)?;
    let (preset, from) = fitted(args, &machine)?;
    let existing = if args.force { Existing::Replace } else { Existing::Keep };
    let text = format!(
        "# {}: made by `k3 preset new`. Use it with --preset ./{}\n\n{}",
        args.name,
        path.display(),
        preset.to_commented_toml()
    );
    output::write_file(&path, text.as_bytes(), existing)?;
    if args.json {
        return output::print_json(&Written {
            file: &path,
            name: &preset.name,
            from: &from,
            budget: limit(&preset),
            model: preset.model.as_deref(),
        });
    }
    let mut out = output::stdout();
    writeln!(out, "{}", path.display())?;
    out.flush()?;
    Ok(())
}

fn file_for(name: &str) -> Result<PathBuf, Failure> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) || name.starts_with('-') {
        return Err(Failure::refused(anyhow!(
            "\"{name}\" is no name for a preset: use at most 64 letters, digits, - and _"
        )));
    }
    if BUILTIN_NAMES.contains(&name) {
        return Err(Failure::refused(anyhow!("\"{name}\" is a built-in preset: choose another name")));
    }
    Ok(PathBuf::from(format!("{name}.toml")))
}

/// The preset to write, shown to fit this machine where a model is known; and the one it started from.
fn fitted(args: &NewArgs, machine: &Machine) -> Result<(Preset, String), Failure> {
    let memory = match &args.memory {
        Some(size) => size.clone(),
        None => Bytes(k3_pipeline::plan::machine_budget_bytes(machine) / (1 << 20) * (1 << 20)).to_string(),
    };
    let mut sets = vec![format!("memory.budget={memory}")];
    let asked = Preset::load(LADDER[0], &sets)?;
    let from = args.from.clone().unwrap_or_else(|| rung_below(&asked).to_owned());
    sets.push(format!("about={memory}, from {from}"));
    sets.extend(args.set.iter().cloned());
    let mut preset = Preset::load(&from, &sets)?;
    preset.name.clone_from(&args.name);
    let own_pins = args.set.iter().any(|s| s.trim_start().starts_with("trunk.pinned"));
    if args.from.is_none() && !own_pins {
        // The rung's own lower bound was meant for its own budget.
        preset.trunk.pinned = Pinned::Fit { at_least: 0 };
    }
    preset.model.clone_from(&args.model.model);
    if args.model.model.is_some() || args.model.config.is_some() {
        let model = args.model.load(&preset, &args.shards)?;
        plan(&preset, &model.config, &model.shape(&preset)?, machine).map_err(Failure::refused)?;
    }
    Ok((preset, from))
}

/// The largest rung of the ladder whose budget is within the preset's.
fn rung_below(preset: &Preset) -> &'static str {
    let fits = |name: &&'static str| {
        let rung = Preset::load(name, &[]).ok().and_then(|rung| limit(&rung));
        matches!((rung, limit(preset)), (Some(rung), Some(asked)) if rung <= asked)
    };
    LADDER.into_iter().rev().find(fits).unwrap_or(LADDER[0])
}
