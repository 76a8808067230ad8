//! Presets: the built-ins, round trips, and every way a text or an override can be wrong.

use std::fmt::Write as _;

use proptest::prelude::*;

use super::*;

fn laptop() -> String {
    builtin("laptop").unwrap().text.to_owned()
}

/// The laptop preset with one line replaced.
fn with_line(from: &str, to: &str) -> String {
    let text = laptop();
    assert_eq!(text.matches(from).count(), 1, "{from}");
    text.replace(from, to)
}

fn problems(text: &str) -> String {
    Preset::parse("mine", "mine.toml", text).unwrap_err().to_string()
}

fn refusal_of(set: &str) -> String {
    Preset::load("laptop", &[set.to_owned()]).unwrap_err().to_string()
}

#[test]
fn builtins_are_valid_and_ordered_by_budget() {
    let mut last = 0;
    for name in BUILTIN_NAMES {
        let preset = Preset::load(name, &[]).unwrap();
        assert_eq!(preset.name, name);
        if LADDER.contains(&name) {
            let MemoryBudget::Limit(budget) = preset.budget else { panic!("{name} has no budget") };
            assert!(budget.0 > last);
            last = budget.0;
        }
    }
    let budgets: Vec<String> =
        LADDER.iter().map(|n| key("memory.budget").get_text(&Preset::load(n, &[]).unwrap())).collect();
    assert_eq!(budgets, ["1 GB", "8 GB", "32 GB", "96 GB", "128 GB", "224 GB"].map(|b| format!("\"{b}\"")));
}

#[test]
fn the_demo_finds_its_model() {
    let dir = Preset::load("demo", &[]).unwrap().model_dir().unwrap();
    assert!(dir.join("config.json").is_file(), "{}", dir.display());
    assert_eq!(Preset::load("pocket", &[]).unwrap().model_dir(), None);
}

struct KeyText(&'static keys::Key);

fn key(path: &str) -> KeyText {
    KeyText(keys::KEYS.iter().find(|k| k.path == path).unwrap())
}

impl KeyText {
    fn get_text(&self, preset: &Preset) -> String {
        (self.0.get)(preset).unwrap()
    }
}

#[test]
fn what_is_written_reads_back() {
    let sets: [&[&str]; 4] = [
        &[],
        &["trunk.pinned=[5, 3]", "model=dir with \"quotes\"", "compute.isa=scalar", "compute.threads=3"],
        &["trunk.pinned=prefix:4", "trunk.pack=/p/pack", "experts.cache=0", "memory.budget=auto"],
        &["trunk.pinned=all", "experts.cache=17.5MB", "about=ein \\ Rückstrich", "reader.direct=off"],
    ];
    for name in BUILTIN_NAMES {
        for sets in sets {
            let sets: Vec<String> = sets.iter().map(|s| (*s).to_owned()).collect();
            let preset = Preset::load(name, &sets).unwrap();
            let text = preset.to_commented_toml();
            assert_eq!(Preset::parse(name, "written", &text).unwrap(), preset, "{text}");
        }
    }
    insta::assert_snapshot!("written", Preset::load("laptop", &[]).unwrap().to_commented_toml());
}

#[test]
fn overrides_take_toml_and_bare_words() {
    let sets =
        ["trunk.pinned = [1,2]", "trunk.block=8 MiB", "reader.engine=\"pread\"", "compute.pin_threads=false"];
    let preset = Preset::load("laptop", &sets.map(str::to_owned)).unwrap();
    assert_eq!(preset.trunk.pinned, Pinned::List(vec![1, 2]));
    assert_eq!(preset.trunk.block, Bytes(8 << 20));
    assert_eq!(preset.reader.engine, IoEngine::Pread);
    assert!(!preset.compute.pin_threads);
}

#[test]
fn wrong_texts_are_refused_with_place_and_remedy() {
    let cases = [
        ("key slip", with_line("ring_slots = 6", "rnig_slots = 6")),
        ("section slip", with_line("[experts]", "[expert]")),
        ("wrong section", with_line("ring_slots = 6", "policy = \"lru\"\nring_slots = 6")),
        ("negative", with_line("ring_slots = 6", "ring_slots = -1")),
        ("zero", with_line("ring_slots = 6", "ring_slots = 0")),
        ("nan", with_line("ring_slots = 6", "ring_slots = nan")),
        ("text for number", with_line("ring_slots = 6", "ring_slots = \"6\"")),
        ("fraction", with_line("ring_slots = 6", "ring_slots = 6.5")),
        ("overflow", with_line("ring_slots = 6", "ring_slots = 99999999999999999999999999")),
        ("float", with_line("tokens = 4096", "tokens = 1e30")),
        ("unitless size", with_line("block = \"32 MiB\"", "block = 33554432")),
        ("bad unit", with_line("block = \"32 MiB\"", "block = \"32 Mb/s\"")),
        ("tiny size", with_line("block = \"32 MiB\"", "block = \"12 B\"")),
        ("pinned word", with_line("\"fit:4\"", "\"fti\"")),
        ("pinned twice", with_line("\"fit:4\"", "[1, 7, 1]")),
        ("pinned count", with_line("\"fit:4\"", "\"prefix:-3\"")),
        ("pinned date", with_line("\"fit:4\"", "2026-01-01")),
        ("choice slip", with_line("\"layer-rank\"", "\"layer_rank\"")),
        ("kv", with_line("kv = \"f32\"", "kv = \"f16\"")),
        ("drafts", with_line("tokens = \"fit\"", "tokens = 4")),
        ("schema", with_line("schema = 1", "schema = 2")),
        ("no schema", with_line("schema = 1", "")),
        ("duplicate", with_line("ring_slots = 6", "ring_slots = 6\nring_slots = 7")),
        ("syntax", with_line("ring_slots = 6", "ring_slots = = 6")),
        ("trailing", format!("{}\n}}", laptop())),
        ("inline", "schema = 1\ntrunk = 3\n[memory]\nbudget = \"8 GB\"".to_owned()),
        ("empty", String::new()),
    ];
    let mut report = String::new();
    for (what, text) in cases {
        writeln!(report, "[{what}]\n{}\n", problems(&text)).unwrap();
    }
    insta::assert_snapshot!(report);
}

#[test]
fn wrong_overrides_are_refused_alike() {
    let mut report = String::new();
    for set in [
        "trunk.ring_slots",
        "ring_slots=4",
        "trunk.rnig_slots=4",
        "nothing.like.it=1",
        "trunk.ring_slots=-1",
        "trunk.ring_slots=nan",
        "trunk.ring_slots=abc",
        "trunk.ring_slots=0",
        "trunk.ring_slots=1e30",
        "trunk.ring_slots=18446744073709551617",
        "trunk.ring_slots=",
        "memory.budget=-1",
        "memory.budget=nan",
        "memory.budget=abc",
        "memory.budget=0",
        "memory.budget=1e30",
        "memory.budget=8",
        "memory.budget=99999999999 TB",
        "context.kv=fp8",
        "pass.tokens=4",
        "pass.tokens=2049",
        "context.snapshots=65",
        "reader.engine=io_uring",
        "compute.isa=avx512",
        "compute.pin_threads=yes",
        "experts.cache=-5",
        "schema=1",
        "=4",
    ] {
        writeln!(report, "{}", refusal_of(set)).unwrap();
    }
    insta::assert_snapshot!(report);
}

#[test]
fn names_and_files_that_are_none() {
    let unknown = Preset::load("lapotp", &[]).unwrap_err().to_string();
    assert!(unknown.contains("did you mean \"laptop\"?") && unknown.contains("pocket, laptop"), "{unknown}");
    let dir = tempfile::tempdir().unwrap();
    let load = |path: &std::path::Path| Preset::load(path.to_str().unwrap(), &[]).unwrap_err();
    assert!(matches!(load(&dir.path().join("none.toml")), PresetError::Read { .. }));
    assert!(matches!(load(dir.path()), PresetError::NotAFile { .. }));
    let big = dir.path().join("big.toml");
    std::fs::write(&big, " ".repeat((1 << 20) + 1)).unwrap();
    assert!(load(&big).to_string().ends_with("larger than 1 MiB"));
    let bytes = dir.path().join("bytes.toml");
    std::fs::write(&bytes, [0xff, 0xfe]).unwrap();
    assert!(load(&bytes).to_string().ends_with("not UTF-8 text"));
    let good = dir.path().join("mine.toml");
    std::fs::write(&good, laptop()).unwrap();
    assert_eq!(Preset::load(good.to_str().unwrap(), &[]).unwrap().name, "mine");
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,80}") {
        let _ = Preset::parse("x", "x", &text);
        let _ = Preset::load("laptop", &[text]);
    }

    #[test]
    fn no_value_panics(at in 0usize..keys::KEYS.len(), value in "[-0-9a-z:.\" \\[\\],GBMiefx]{0,12}") {
        let set = format!("{}={value}", keys::KEYS[at].path);
        if let Ok(preset) = Preset::load("laptop", &[set]) {
            let text = preset.to_commented_toml();
            prop_assert_eq!(Preset::parse("laptop", "written", &text).unwrap(), preset);
        }
    }
}
