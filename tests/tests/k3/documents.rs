//! The documents say what is true: their commands run, and every key of a preset is explained.
//! (Commands that a test cannot run are parsed beside the parsers: `command_lines_of_the_documents`.)

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use k3_golden::repository_root;
use k3_pipeline::preset::key_infos;
use k3_tests::binary::k3;
use k3_tests::documents::{How, Line, lines};

/// Fewest commands that the documents show and that run.
const RUN_MIN: usize = 12;

/// A directory that looks like the repository but for what is built in it.
fn copy() -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for name in ["golden", "presets", "docs", "README.md"] {
        symlink(repository_root().join(name), copy.path().join(name)).unwrap();
    }
    copy
}

fn run(line: &Line, dir: &Path) {
    let strange = line.commands.iter().find(|words| !["k3", "echo"].contains(&words[0].as_str()));
    assert!(strange.is_none(), "{}: mark the block `sh no-run`: {}", line.place, line.text);
    let path = format!("{}:/usr/bin:/bin", k3().parent().unwrap().display());
    let output =
        Command::new("sh").args(["-e", "-c", &line.text]).env("PATH", path).current_dir(dir).output();
    let output = output.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {}\n{stderr}", line.place, line.text);
    assert!(!output.stdout.is_empty() || line.text.contains('>'), "{}: prints nothing", line.place);
}

#[test]
fn every_command_runs() {
    let dir = copy();
    let lines = lines(&repository_root()).unwrap();
    let runs: Vec<&Line> = lines.iter().filter(|line| line.how == How::Run).collect();
    assert!(runs.len() >= RUN_MIN, "{} commands", runs.len());
    for line in &runs {
        run(line, dir.path());
    }
    println!("{} commands of the documents ran", runs.len());
}

#[test]
fn programs_are_known() {
    for line in lines(&repository_root()).unwrap() {
        for words in &line.commands {
            let known = ["k3", "cargo", "git", "cd", "echo", "grep", "printf"];
            assert!(known.contains(&words[0].as_str()), "{}: {}", line.place, line.text);
        }
    }
}

#[test]
fn every_key_of_a_preset_is_explained_and_no_other() {
    let text = std::fs::read_to_string(repository_root().join("docs/PRESETS.md")).unwrap();
    let explained: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("### `")?.strip_suffix('`')).collect();
    let keys: Vec<&str> = key_infos().map(|key| key.path).collect();
    assert_eq!(explained, keys);
    for key in key_infos() {
        let section = text.split(&format!("### `{}`\n", key.path)).nth(1).unwrap();
        let section = section.split("\n### ").next().unwrap();
        let need = if key.required { "required" } else { "optional" };
        for part in [format!("| takes | {} |", key.allowed), format!("| need | {need}")] {
            assert!(section.contains(&part), "{}: no {part:?}", key.path);
        }
        for part in ["| example |", "| in `auto` |"] {
            assert!(section.contains(part), "{}: no {part:?}", key.path);
        }
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words(section).contains(&words(key.about)), "{}: {}", key.path, key.about);
    }
}
