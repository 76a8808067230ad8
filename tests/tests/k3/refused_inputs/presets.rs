//! Preset files and overrides: wrong keys, values, places.

use std::fs;
use std::path::Path;

use k3_pipeline::preset::builtin;
use k3_tests::resident::golden_model;

use super::{Case, generating};

/// Every case; the files go to `dir`.
pub fn cases(dir: &Path) -> Vec<Case> {
    let mut all = texts(dir);
    all.extend(overrides());
    all.extend(names(dir));
    all
}

/// A case of `k3 generate` on a sound tiny model with another preset.
fn with_preset(name: &str, preset: &str, says: &[&str]) -> Case {
    let model = golden_model("k3-tiny-a").to_string_lossy().into_owned();
    Case::new(name, &["generate", "--preset", preset, "--model", &model, "--ids", "1"], 2, says)
}

/// The laptop preset with `from`, which it holds once, replaced.
fn edited(from: &str, to: &str) -> String {
    let text = builtin("laptop").unwrap().text;
    assert_eq!(text.matches(from).count(), 1, "{from}");
    text.replace(from, to)
}

/// Line (from 1) of the laptop preset that begins with `start`.
fn line(start: &str) -> usize {
    1 + builtin("laptop").unwrap().text.lines().position(|l| l.starts_with(start)).unwrap()
}

fn texts(dir: &Path) -> Vec<Case> {
    let slots = line("ring_slots");
    let at = |line: usize, column: usize, says: &str| format!(":{line}:{column}: {says}");
    let table: [(&str, String, String); 15] = [
        (
            "an unknown key",
            edited("ring_slots = 6", "rnig_slots = 6"),
            at(slots, 1, "unknown key \"trunk.rnig_slots\"; did you mean \"trunk.ring_slots\"?"),
        ),
        ("a missing key", edited("ring_slots = 6\n", ""), ": trunk.ring_slots is missing".to_owned()),
        (
            "a text for a number",
            edited("ring_slots = 6", "ring_slots = \"6\""),
            at(slots, 14, "trunk.ring_slots cannot be \"6\""),
        ),
        (
            "a list for a number",
            edited("ring_slots = 6", "ring_slots = [6]"),
            at(slots, 14, "trunk.ring_slots cannot be"),
        ),
        (
            "a fraction for a count",
            edited("ring_slots = 6", "ring_slots = 6.5"),
            at(slots, 14, "trunk.ring_slots cannot be 6.5"),
        ),
        (
            "a negative count",
            edited("ring_slots = 6", "ring_slots = -6"),
            at(slots, 14, "trunk.ring_slots cannot be -6"),
        ),
        (
            "a size without a unit",
            edited("budget = \"8 GB\"", "budget = 8"),
            at(line("budget"), 10, "memory.budget cannot be 8"),
        ),
        (
            "a bad unit",
            edited("budget = \"8 GB\"", "budget = \"8 Gbit\""),
            at(line("budget"), 10, "memory.budget cannot be \"8 Gbit\""),
        ),
        ("another schema", edited("schema = 1", "schema = 2"), at(1, 10, "schema 2 is unknown")),
        ("no schema", edited("schema = 1\n", ""), at(1, 1, "schema is missing; write schema = 1")),
        (
            "a duplicate key",
            edited("ring_slots = 6", "ring_slots = 6\nring_slots = 6"),
            at(slots + 1, 1, "duplicate key"),
        ),
        (
            "an unknown section",
            edited("[experts]", "[expert]"),
            at(line("[experts]"), 2, "unknown section [expert]; did you mean [experts]?"),
        ),
        (
            "text after the end",
            format!("{}and so on\n", builtin("laptop").unwrap().text),
            at(builtin("laptop").unwrap().text.lines().count() + 1, 5, "key with no value"),
        ),
        ("no TOML", "{\"schema\": 1}".to_owned(), at(1, 1, "")),
        ("an empty file", String::new(), at(1, 1, "schema is missing")),
    ];
    let case = |(i, (name, text, says)): (usize, &(&str, String, String))| {
        let path = dir.join(format!("{i}.toml"));
        fs::write(&path, text).unwrap();
        let path = path.to_string_lossy();
        with_preset(&format!("preset with {name}"), &path, &[&format!("{path}{says}")])
    };
    table.iter().enumerate().map(case).collect()
}

fn overrides() -> Vec<Case> {
    let table: [(&str, &str); 10] = [
        ("trunk.rnig_slots=4", "unknown key \"trunk.rnig_slots\"; did you mean \"trunk.ring_slots\"?"),
        ("ring_slots=4", "did you mean \"trunk.ring_slots\"?"),
        ("threads.count=2", "did you mean \"compute.threads\"?"),
        ("reader.queue_depht=2", "did you mean \"reader.depth\"?"),
        ("trunk.ring_slots", "write key=value"),
        ("=4", "unknown key \"\""),
        ("experts.policy=belady", "experts.policy cannot be belady"),
        ("compute.isa=avx512", "compute.isa cannot be avx512"),
        ("context.kv=fp8", "context.kv cannot be fp8"),
        ("trunk.pinned=[0, 99]", "99"),
    ];
    let case = |(set, says): &(&str, &str)| {
        generating(&format!("--set {set}"), &["--ids", "1", "--set", set], 2, &[says])
    };
    table.iter().map(case).collect()
}

fn names(dir: &Path) -> Vec<Case> {
    let lost = dir.join("lost-model.toml");
    let text = edited("[memory]", "model = \"/nonexistent/model\"\n[memory]");
    fs::write(&lost, text).unwrap();
    let lost = lost.to_string_lossy();
    let directory = dir.to_string_lossy();
    let readme = k3_golden::repository_root().join("README.md").to_string_lossy().into_owned();
    let what_one_is = ["a preset is a TOML text", "pocket, laptop", "k3 preset show"];
    let absent = dir.join("absent.toml");
    let absent = absent.to_string_lossy();
    vec![
        with_preset("an unknown preset", "labtop", &["labtop", "laptop"]),
        with_preset("an empty preset name", "", &["preset"]),
        with_preset("a preset file that is not there", &absent, &[&absent]),
        with_preset("a directory as a preset", &directory, &[&directory]),
        Case::new(
            "a preset whose model is not there",
            &["generate", "--preset", &lost, "--ids", "1"],
            2,
            &["/nonexistent/model"],
        ),
        Case::new("preset show: unknown", &["preset", "show", "labtop"], 2, &["labtop", "laptop"]),
        Case::new("preset check: a directory", &["preset", "check", &directory], 2, &what_one_is),
        Case::new(
            "preset check: a README",
            &["preset", "check", &readme],
            2,
            &[&what_one_is[..], &[&readme]].concat(),
        ),
        // The tests run in the directory of their package.
        Case::new(
            "a file that is there, named without its path",
            &["preset", "check", "src"],
            2,
            &["there is no preset \"src\"", "as in ./src\n", "a preset is a TOML text"],
        ),
        Case::new("preset show: a README", &["preset", "show", &readme], 2, &what_one_is),
        Case::new("preset check: unknown", &["preset", "check", "labtop"], 2, &["labtop"]),
    ]
}
