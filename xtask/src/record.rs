//! `cargo xtask record`: runs a session of `k3` and writes what a user would see to docs/SESSION.md.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, anyhow, bail};

use crate::{Failure, cargo, root};

/// Arguments of `cargo xtask record`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask record
  cargo xtask record --k3 target/debug/k3

Run it again when the demo model or what a command prints has changed. Times in it are this
machine's.")]
pub struct Args {
    /// Record this binary instead of the release build.
    #[arg(long, value_name = "FILE")]
    k3: Option<PathBuf>,
}

/// What is recorded: a heading, what there is to say, the commands.
const SESSION: &[(&str, &str, &[&str])] = &[
    (
        "Text from the model that comes with the source",
        "The text goes to stdout, the report to stderr.",
        &[
            "k3 generate --preset demo --max-tokens 60 'Shall I'",
            "k3 generate --preset demo --quiet --max-tokens 60 --temperature 0.8 --seed 7 'Shall I'",
        ],
    ),
    (
        "Chat",
        "The demo model's vocabulary has no chat tokens, so it continues what is written. At a terminal the lines are \
         typed; here they come from a pipe.",
        &[
            "k3 chat --preset demo --max-tokens 40 --message 'Good morrow, my lord.'",
            "printf '%s\\n' '/set temperature 0.7' 'Shall I' '/stats' '/exit' | k3 chat --preset demo --max-tokens 40",
        ],
    ),
    (
        "Plan",
        "Every byte before it is allocated: of the demo, then of the released model from its dimensions alone. Times per \
         token are predictions for the disk that is named.",
        &[
            "k3 plan --preset demo",
            "k3 plan --compare pocket,laptop,server --config golden/k3-dimensions.json --disk 4.6GB/s",
            "k3 plan --preset laptop --config golden/k3-dimensions.json --memory 4GB",
        ],
    ),
    (
        "Inspect",
        "What a model directory holds; `--check` reads every weight.",
        &["k3 inspect golden/demo --check"],
    ),
    (
        "A preset of one's own",
        "Written for this machine, with an explanation of each key.",
        &[
            "k3 preset new mine --memory 24GB",
            "grep -v '^#\\|^$' mine.toml",
            "k3 preset check ./mine.toml",
            "k3 preset show ./mine.toml --set trunk.rnig_slots=4",
        ],
    ),
    ("Doctor", "What this machine can do, and what to type.", &["k3 doctor --model golden/demo"]),
];

/// Runs the session and writes the document.
pub fn run(args: &Args) -> Result<(), Failure> {
    let k3 = match &args.k3 {
        Some(file) => fs::canonicalize(file).with_context(|| format!("cannot find {}", file.display()))?,
        None => build()?,
    };
    let place = tempfile::tempdir().context("cannot make a temporary directory")?;
    symlink(root().join("golden"), place.path().join("golden")).context("cannot link golden")?;
    symlink(&k3, place.path().join("k3")).context("cannot link k3")?;
    let mut text = String::from(
        "# A session\n\nRecorded by `cargo xtask record`; nothing in it is written by hand. Times are those of the \
         machine that recorded it.\n",
    );
    for (heading, what, commands) in SESSION {
        // Writing to a String cannot fail.
        let _ = write!(text, "\n## {heading}\n\n{what}\n\n```console\n");
        for command in *commands {
            eprintln!("record: {command}");
            let _ = write!(text, "$ {command}\n{}", output(command, place.path())?);
        }
        text.push_str("```\n");
    }
    let path = root().join("docs/SESSION.md");
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("record: {}", path.display());
    Ok(())
}

fn build() -> anyhow::Result<PathBuf> {
    let status = cargo()
        .args(["build", "--quiet", "--locked", "--release", "-p", "k3-pipeline", "--bin", "k3"])
        .status();
    if !status.context("cannot start cargo")?.success() {
        bail!("k3 does not build");
    }
    Ok(root().join("target/release/k3"))
}

/// What a command prints, on stdout and stderr as they come, with a line end.
fn output(command: &str, place: &Path) -> anyhow::Result<String> {
    let output = Command::new("sh")
        .args(["-c", &format!("exec 2>&1; {command}")])
        .current_dir(place)
        .env("PATH", format!("{}:/usr/bin:/bin", place.display()))
        // No line of this session belongs in anybody's history.
        .env("XDG_STATE_HOME", place)
        .output()
        .with_context(|| format!("cannot run {command}"))?;
    if output.status.code().is_none_or(|code| code > 2) {
        return Err(anyhow!("{command}: {}", String::from_utf8_lossy(&output.stdout)));
    }
    let text = String::from_utf8_lossy(&output.stdout).replace(&*place.to_string_lossy(), "~");
    let end = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    Ok(format!("{text}{end}"))
}
