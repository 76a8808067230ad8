//! `k3 plan` and `k3 preset` through the real binary: output, refusals, exit codes, files.

// Helpers of tests are tests.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Output};

const DIMENSIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../golden/k3-dimensions.json");

fn k3(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_k3")).current_dir(dir).args(args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The error of a refused command: exit code 2, nothing on stdout.
fn refusal(dir: &Path, args: &[&str]) -> String {
    let output = k3(dir, args);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {output:?}");
    assert!(output.stdout.is_empty(), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn the_ledger_of_the_release_from_its_dimensions_alone() {
    let dir = tempfile::tempdir().unwrap();
    let text = stdout(&k3(
        dir.path(),
        &["plan", "--preset", "laptop", "--elsewhere", "--config", DIMENSIONS, "--disk", "3.5GB/s"],
    ));
    for (name, bytes) in [
        ("one routed expert", "17,547,264"),
        ("all routed experts", "1,446,456,066,048"),
        ("experts touched per token", "25,829,572,608"),
        ("dense trunk, 93 layers", "108.81 GB"),
        ("head", "2,348,810,240"),
        ("KDA state of a sequence", "434,110,464"),
        ("latent KV cache", "55,296"),
        ("budget", "8,000,000,000"),
    ] {
        let line = text.lines().find(|l| l.trim_start().starts_with(name)).unwrap();
        assert!(line.contains(bytes), "{line}");
    }
    let says = "predicted from bytes and rates alone: ";
    assert!(text.contains(says) && text.contains("memory unknown: give --memory-rate"), "{text}");
}

#[test]
fn json_is_one_object_whose_lines_add_up() {
    let dir = tempfile::tempdir().unwrap();
    let text = stdout(&k3(dir.path(), &["plan", "--preset", "demo", "--json"]));
    let plan: serde_json::Value = serde_json::from_str(&text).unwrap();
    let lines = plan["ledger"]["lines"].as_array().unwrap();
    let sum: u64 = lines.iter().map(|l| l["bytes"].as_u64().unwrap()).sum();
    assert_eq!(plan["total_bytes"].as_u64(), Some(sum));
    assert_eq!(plan["fits_this_machine"], true);
}

#[test]
fn refused_plans() {
    let dir = tempfile::tempdir().unwrap();
    let laptop = ["plan", "--preset", "laptop", "--config", DIMENSIONS];
    let with = |more: &[&str]| refusal(dir.path(), &[&laptop[..], more].concat());
    let short = with(&["--memory", "4GB"]);
    assert!(
        short.contains("4.00 GB") && short.contains("short") && short.contains("--preset pocket"),
        "{short}"
    );
    for (more, named) in [
        (["--memory", "-1"], "memory"),
        (["--memory", "nan"], "memory.budget"),
        (["--set", "trunk.rnig_slots=3"], "did you mean \"trunk.ring_slots\""),
        (["--set", "context.tokens=0"], "context.tokens"),
        (["--disk", "fast"], "not a rate"),
        (["--disk", "0B/s"], "zero"),
    ] {
        let error = with(&more);
        assert!(error.contains(named), "{more:?}: {error}");
    }
    assert!(refusal(dir.path(), &["plan", "--preset", "pocket"]).contains("--config FILE"));
    assert!(
        refusal(dir.path(), &["plan", "--preset", "nil", "--config", DIMENSIONS]).contains("built in are")
    );
    assert!(
        refusal(dir.path(), &["plan", "--preset", "pocket", "--config", "none.json"]).contains("none.json")
    );
}

#[test]
fn comparison_and_memory_map() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["plan", "--compare", "laptop,server", "--config", DIMENSIONS, "--svg", "map.svg"];
    let text = stdout(&k3(dir.path(), &args));
    let head: Vec<&str> = text.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(head, ["preset", "laptop", "server"]);
    let svg = std::fs::read_to_string(dir.path().join("map.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    assert!(svg.contains("laptop: ") && svg.contains("server: "));
    let predicted = |more: &[&'static str]| {
        let base = ["plan", "--compare", "laptop,server", "--config", DIMENSIONS, "--disk", "4.6GB/s"];
        stdout(&k3(dir.path(), &[&base[..], more].concat()))
    };
    let alone = predicted(&[]);
    assert!(alone.contains("predicted, disk alone") && !alone.contains("memory time"), "{alone}");
    let both = predicted(&["--memory-rate", "1GB/s"]);
    let row = |name: &str| both.lines().find(|line| line.starts_with(name)).unwrap()[26..].to_owned();
    assert_eq!(row("predicted, the longer"), row("  memory time per token"));
    assert_ne!(row("predicted, the longer"), row("  disk time per token"));
    let unwritable = k3(dir.path(), &["plan", "--preset", "demo", "--svg", "no/such/dir/map.svg"]);
    assert_eq!(unwritable.status.code(), Some(2));
}

#[test]
fn new_presets_are_whole_files_and_never_replace_one_by_accident() {
    let dir = tempfile::tempdir().unwrap();
    let new = |more: &[&'static str]| [&["preset", "new", "mine", "--memory", "16GB"], more].concat();
    assert_eq!(stdout(&k3(dir.path(), &new(&[]))), "mine.toml\n");
    let file = dir.path().join("mine.toml");
    let first = std::fs::read(&file).unwrap();
    assert!(refusal(dir.path(), &new(&["--set", "context.tokens=99"])).contains("--force"));
    assert_eq!(std::fs::read(&file).unwrap(), first);
    stdout(&k3(dir.path(), &new(&["--set", "context.tokens=99", "--force"])));
    let shown = stdout(&k3(dir.path(), &["preset", "show", "./mine.toml"]));
    assert!(shown.contains("\ntokens = 99\n") && shown.contains("budget = \"16 GB\""), "{shown}");
    assert!(stdout(&k3(dir.path(), &["preset", "check", "./mine.toml", "laptop"])).contains("mine.toml: ok"));
    std::fs::write(&file, "schema = 1\n[memory]\nbugdet = \"1 GB\"\n").unwrap();
    let wrong = k3(dir.path(), &["preset", "check", "./mine.toml"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8(wrong.stderr).unwrap().contains("mine.toml:3:1: unknown key"));
    let json = stdout(&k3(dir.path(), &new(&["--force", "--json"])));
    let written: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&written["file"], &written["from"]), (&"mine.toml".into(), &"laptop".into()), "{written}");
    for name in ["laptop", "../x", "", "a b"] {
        refusal(dir.path(), &["preset", "new", name, "--memory", "16GB"]);
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary files stay behind");
}

#[test]
fn the_list_names_every_builtin() {
    let dir = tempfile::tempdir().unwrap();
    let text = stdout(&k3(dir.path(), &["preset", "list"]));
    let names: Vec<&str> = text.lines().filter_map(|l| l.split_whitespace().next()).collect();
    assert_eq!(names, ["pocket", "laptop", "desktop", "workstation", "server", "max", "auto", "demo"]);
}
