//! Packs, checkpoints spread over directories and the doctor, through the real binary.

// Helpers of tests are tests.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/models").join(name)
}

fn k3(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_k3")).args(args).output().unwrap()
}

fn stdout(args: &[&str]) -> String {
    let output = k3(args);
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&stdout(args)).unwrap()
}

/// The error of a refused command: exit code 2, nothing on stdout.
fn refusal(args: &[&str]) -> String {
    let output = k3(args);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {output:?}");
    assert!(output.stdout.is_empty(), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// A copy of a golden model, its weight files dealt out in turn to `directories`, the first of which has
/// everything else.
fn spread(name: &str, directories: &[&Path]) {
    let mut dealt = 0;
    let mut entries: Vec<PathBuf> = fs::read_dir(golden(name)).unwrap().map(|e| e.unwrap().path()).collect();
    entries.sort();
    for path in entries.iter().filter(|path| path.is_file()) {
        let is_weights = path.extension().is_some_and(|e| e == "safetensors");
        dealt += usize::from(is_weights);
        let to = if is_weights { directories[dealt % directories.len()] } else { directories[0] };
        fs::copy(path, to.join(path.file_name().unwrap())).unwrap();
    }
    assert!(dealt > directories.len());
}

/// A model in a directory of its own, with a pack in 64 KiB blocks.
struct Packed {
    dir: TempDir,
    pack: PathBuf,
}

const BLOCK: &str = "trunk.block=64 KiB";

impl Packed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        spread("k3-tiny-a", &[dir.path()]);
        let pack = dir.path().join("trunk.k3pack");
        let (model, out) = (dir.path().to_str().unwrap(), pack.to_str().unwrap());
        stdout(&["pack", "--preset", "demo", "--set", BLOCK, "--model", model, "--out", out]);
        Self { dir, pack }
    }

    fn model(&self) -> &str {
        self.dir.path().to_str().unwrap()
    }

    fn with<'a>(&'a self, command: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        [&[command, "--preset", "demo", "--set", BLOCK, "--model", self.model()], more].concat()
    }

    fn setting(&self) -> String {
        format!("trunk.pack={}", self.pack.display())
    }
}

#[test]
fn a_plan_counts_the_blocks_of_the_pack() {
    let p = Packed::new();
    let setting = p.setting();
    let plan = |more: &[&str]| json(&p.with("plan", &[&["--json"], more].concat()));
    let streamed = plan(&["--set", "trunk.pinned=0"]);
    let all = plan(&["--set", "trunk.pinned=all"]);
    let total = |plan: &Value| plan["total_bytes"].as_u64().unwrap();
    let budget = format!("{} B", (total(&streamed) + total(&all)) / 2);
    let fit = ["--set", "trunk.pinned=fit", "--memory", &budget];
    let plain = plan(&fit);
    let packed = plan(&[&fit[..], &["--set", &setting]].concat());
    let pinned = |plan: &Value| plan["trunk"]["pinned_layers"].as_array().unwrap().len();
    assert!(pinned(&plain) > 0 && pinned(&plain) < pinned(&packed), "{plain:#} {packed:#}");
    assert!(total(&packed) <= packed["ledger"]["budget_bytes"].as_u64().unwrap());
    assert_eq!(plain["model"], packed["model"], "the model itself is the same");

    // What a pass reads is what lies in the pack.
    let packed = plan(&["--set", "trunk.pinned=0", "--set", &setting]);
    let read = |plan: &Value| {
        let of = |key: &str| plan["traffic"][key].as_u64().unwrap();
        of("trunk_bytes") + of("head_bytes")
    };
    assert!(read(&packed) < read(&streamed));
    let some = ["--set", "trunk.pinned=6"];
    let dealt = read(&plan(&some));
    assert!(dealt < read(&streamed) && dealt > read(&all));
    let run = ["--ids", "1,2,3", "--max-tokens", "2", "--json"];
    let stats = &json(&p.with("generate", &[&some[..], &run].concat()))["stats"];
    assert_eq!(stats["store"]["trunk_bytes"], 2 * dealt, "a prompt and a token: {stats:#}");
    let again = p.dir.path().join("again.k3pack");
    let summary = json(&p.with("pack", &["--out", again.to_str().unwrap(), "--json"]));
    assert_eq!(summary["packed_bytes"], read(&packed));
    let run = ["--set", "trunk.pinned=0", "--set", &setting, "--ids", "1,2,3", "--max-tokens", "2", "--json"];
    let stats = &json(&p.with("generate", &run))["stats"];
    assert!(stats["store"]["trunk_bytes"].as_u64().unwrap().is_multiple_of(read(&packed)), "{stats:#}");
}

#[test]
fn one_digest_packed_and_not_pinned_and_streamed() {
    let p = Packed::new();
    let setting = p.setting();
    let dump = |name: &str, more: &[&str]| {
        let file = p.dir.path().join(name);
        let run = ["--ids", "5,4,3,2,1,77", "--max-tokens", "5", "--dump-logits", file.to_str().unwrap()];
        stdout(&p.with("generate", &[&run[..], more].concat()));
        fs::read(file).unwrap()
    };
    let want = dump("plain", &["--set", "trunk.pinned=0"]);
    for (name, pinned, head) in
        [("streamed", "0", "streamed"), ("half", "6", "streamed"), ("all", "all", "pinned")]
    {
        let (pinned, head) = (format!("trunk.pinned={pinned}"), format!("trunk.head={head}"));
        let got = dump(name, &["--set", &pinned, "--set", &head, "--set", &setting]);
        assert!(got == want, "{name}");
    }
}

#[test]
fn a_pack_that_does_not_belong_is_refused_by_the_plan() {
    let p = Packed::new();
    let setting = p.setting();
    let refused = |model: &str, block: &str, says: &str| {
        let more = ["--preset", "demo", "--model", model, "--set", block, "--set", &setting];
        for command in [&["plan"][..], &["generate", "--ids", "1"]] {
            let error = refusal(&[command, &more].concat());
            assert!(error.contains("trunk.k3pack") && error.contains(says), "{error}");
        }
    };
    let tiny_b = golden("k3-tiny-b");
    refused(tiny_b.to_str().unwrap(), BLOCK, "another checkpoint");
    refused(p.model(), "trunk.block=128 KiB", "another block size");

    let whole = fs::read(&p.pack).unwrap();
    fs::write(&p.pack, &whole[..whole.len() - 1]).unwrap();
    refused(p.model(), BLOCK, "not a whole pack");
    fs::remove_file(&p.pack).unwrap();
    refused(p.model(), BLOCK, "cannot open");
    fs::write(&p.pack, &whole).unwrap();
    stdout(&p.with("plan", &["--set", &setting]));
    // The checkpoint changes under its pack.
    let config = p.dir.path().join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text + "\n").unwrap();
    refused(p.model(), BLOCK, "another checkpoint");

    let config = config.to_str().unwrap();
    let error = refusal(&["plan", "--preset", "demo", "--config", config, "--set", &setting]);
    assert!(error.contains("trunk.k3pack") && error.contains("config.json alone"), "{error}");
}

#[test]
fn a_pack_takes_no_place_that_is_not_its_own() {
    let p = Packed::new();
    let out = p.dir.path().join("t.k3pack");
    let partial = p.dir.path().join("t.k3pack.partial");
    let args = p.with("pack", &["--out", out.to_str().unwrap()]);
    fs::write(&partial, "somebody's").unwrap();
    assert!(refusal(&args).contains("t.k3pack.partial exists and is no pack that this program began"));
    assert_eq!(fs::read(&partial).unwrap(), b"somebody's");
    fs::remove_file(&partial).unwrap();
    assert!(Command::new("mkfifo").arg(&partial).status().unwrap().success());
    assert!(refusal(&args).contains("t.k3pack.partial exists and is no pack"));
    assert!(!p.dir.path().join("t.k3pack.journal").exists() && !out.exists());
    fs::remove_file(&partial).unwrap();
    stdout(&args);
    fs::write(&out, &fs::read(&out).unwrap()[..5000]).unwrap();
    let verify = k3(&[&args[..], &["--verify"]].concat());
    assert_eq!(verify.status.code(), Some(3), "{verify:?}");
}

#[test]
fn what_is_no_pack_is_refused_at_once() {
    let p = Packed::new();
    let fifo = p.dir.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let empty = p.dir.path().join("empty");
    fs::write(&empty, "").unwrap();
    let text = p.dir.path().join("config.json");
    for (path, says) in [
        (fifo.as_path(), "not a regular file"),
        (p.dir.path(), "not a regular file"),
        (&empty, "not a whole pack"),
        (&text, "not a whole pack"),
    ] {
        let setting = format!("trunk.pack={}", path.display());
        for command in [&["plan"][..], &["generate", "--ids", "1"]] {
            let started = Instant::now();
            let error = refusal(&p.with(command[0], &[&command[1..], &["--set", &setting]].concat()));
            assert!(error.contains(says) && error.contains(path.to_str().unwrap()), "{error}");
            assert!(started.elapsed() < Duration::from_secs(5));
        }
    }
}

#[test]
fn a_flipped_bit_in_a_pack_ends_generation_and_names_the_block() {
    let p = Packed::new();
    let setting = p.setting();
    let whole = fs::read(&p.pack).unwrap();
    let manifest = u64::from_le_bytes(whole[8..16].try_into().unwrap()) as usize;
    let manifest: Value = serde_json::from_slice(&whole[manifest..]).unwrap();
    let blocks = manifest["blocks"].as_array().unwrap();
    for number in [0, blocks.len() / 2, blocks.len() - 1] {
        let mut bytes = whole.clone();
        bytes[blocks[number]["offset"].as_u64().unwrap() as usize] ^= 4;
        fs::write(&p.pack, bytes).unwrap();
        for pinned in ["0", "all"] {
            let pinned = format!("trunk.pinned={pinned}");
            let run = ["--set", &setting, "--set", &pinned, "--ids", "1,2", "--max-tokens", "2"];
            let output = k3(&p.with("generate", &run));
            assert_eq!(output.status.code(), Some(1), "{output:?}");
            assert!(output.stdout.is_empty(), "no token comes of it");
            let error = String::from_utf8(output.stderr).unwrap();
            assert!(error.contains(&format!("block {number} ")), "block {number}: {error}");
        }
    }
}

#[test]
fn packing_that_is_killed_goes_on_to_the_same_pack() {
    let p = Packed::new();
    let want = fs::read(&p.pack).unwrap();
    let out = p.dir.path().join("killed.k3pack");
    let args = p.with("pack", &["--out", out.to_str().unwrap()]);
    let started = Instant::now();
    stdout(&args);
    let whole_run = started.elapsed();
    for moment in 1..=20 {
        fs::remove_file(&out).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_k3"))
            .args(&args)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(whole_run * moment / 21);
        child.kill().unwrap();
        child.wait().unwrap();
        // A pack is there whole, or under its name not at all.
        assert!(!out.exists() || fs::read(&out).unwrap() == want, "killed at {moment} of 21");
        stdout(&args);
        assert!(fs::read(&out).unwrap() == want, "killed at {moment} of 21");
    }
}

#[test]
fn weight_files_may_lie_in_several_directories() {
    let dirs: Vec<TempDir> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let paths: Vec<&Path> = dirs.iter().map(TempDir::path).collect();
    spread("k3-tiny-a", &paths);
    let path = |n: usize| paths[n].to_str().unwrap();
    let model = ["--preset", "demo", "--model", path(0)];
    let list = format!("{},{}", path(1), path(2));
    let run = ["--ids", "9,8,7", "--max-tokens", "4", "--json"];
    let ids =
        |more: &[&str]| json(&[&["generate"], &model[..], &run, more].concat())["generated_ids"].clone();
    let whole = golden("k3-tiny-a");
    let run_whole = ["generate", "--preset", "demo", "--model", whole.to_str().unwrap()];
    let want = json(&[&run_whole[..], &run].concat())["generated_ids"].clone();
    assert_eq!(want.as_array().unwrap().len(), 4);
    assert_eq!(ids(&["--shards", &list]), want);
    assert_eq!(ids(&["--shards", path(2), "--shards", path(1)]), want);

    stdout(&[&["plan"], &model[..], &["--shards", &list]].concat());
    stdout(&["inspect", path(0), "--shards", &list]);
    let pack = paths[0].join("trunk.k3pack");
    let pack = pack.to_str().unwrap();
    stdout(&[&["pack"], &model[..], &["--shards", &list, "--out", pack]].concat());
    let setting = format!("trunk.pack={pack}");
    assert_eq!(ids(&["--shards", &list, "--set", &setting]), want);

    let missing = k3(&[&["plan"], &model[..], &["--shards", path(1)]].concat());
    assert_eq!(missing.status.code(), Some(1), "{missing:?}");
    assert!(String::from_utf8(missing.stderr).unwrap().contains(path(1)), "the places searched are named");
    let nowhere = paths[0].join("nowhere");
    let error = refusal(&[&["plan"], &model[..], &["--shards", nowhere.to_str().unwrap()]].concat());
    assert!(error.contains("nowhere is no directory"), "{error}");
    let config = paths[0].join("config.json");
    let config = config.to_str().unwrap();
    let error = refusal(&["plan", "--preset", "demo", "--config", config, "--shards", path(1)]);
    assert!(error.contains("--shards"), "{error}");
}

#[test]
fn the_doctor_measures_and_says_what_to_type() {
    let model = golden("k3-tiny-a");
    let model = model.to_str().unwrap();
    let report = json(&["doctor", "--model", model, "--disk-test-bytes", "1000000", "--json"]);
    let positive = |path: &str| {
        let figure = report.pointer(path).and_then(Value::as_f64);
        assert!(figure.is_some_and(|f| f > 0.0 && f.is_finite()), "{path}: {report:#}");
    };
    for path in [
        "/cores",
        "/memory/total_bytes",
        "/memory/available_bytes",
        "/memory/plan_bytes_max",
        "/memory_speed/read_bytes_per_second",
        "/memory_speed/product_bytes_per_second",
        "/space/total_bytes",
        "/disk/bytes_per_second",
        "/disk/seconds",
        "/disk/extents_at_once",
        "/disk/disks/0/depth",
        "/presets/0/outlook/planned_bytes",
        "/advice/seconds_per_token",
    ] {
        positive(path);
    }
    assert!(report["isa"].is_string() && report["disk"]["disks"][0]["engine"].is_string());
    let read = report["disk"]["bytes"].as_u64().unwrap();
    let extent = report["disk"]["extent_bytes"].as_u64().unwrap();
    // All the bytes allowed, or as many as the time did; the extent under way may go beyond.
    assert!(read >= extent.min(1_000_000) && read < 1_000_000 + extent, "{read}");

    // What it says to type runs.
    let command = report["advice"]["commands"][0].as_str().unwrap();
    let words: Vec<&str> = command.split(' ').skip(1).chain(["--max-tokens", "1"]).collect();
    assert!(command.contains(model), "{command}");
    stdout(&words);
    let text = stdout(&["doctor", "--model", model, "--disk-test-bytes", "1"]);
    let parts = ["cores", "disk speed", "pocket", "from bytes and speeds alone", "k3 generate --preset"];
    for part in parts {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn an_interrupted_doctor_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_k3"))
        .args([
            "doctor",
            "--model",
            golden("k3-tiny-a").to_str().unwrap(),
            "--disk-test-bytes",
            "1000000000000",
        ])
        .current_dir(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It takes signals once that thread is there, and measures for seconds.
    let threads = format!("/proc/{}/task", child.id());
    let listens = |thread: std::io::Result<fs::DirEntry>| {
        fs::read_to_string(thread.unwrap().path().join("comm")).is_ok_and(|name| name.trim() == "ctrl-c")
    };
    while !fs::read_dir(&threads).unwrap().any(listens) {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it could be interrupted");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "k3: interrupted\n");
    assert!(output.stdout.is_empty());
}

#[test]
fn the_doctor_without_a_model_says_what_it_cannot_tell() {
    let report = json(&["doctor", "--json"]);
    assert!(report["disk"].is_null() && report["presets"].as_array().unwrap().is_empty());
    assert!(report["unknown"].to_string().contains("--model DIR"), "{report:#}");
    assert!(report["memory_speed"]["read_bytes_per_second"].as_f64().unwrap() > 0.0);
    let dir = tempfile::tempdir().unwrap();
    let dimensions = golden("../k3-dimensions.json");
    let config = ["doctor", "--config", dimensions.to_str().unwrap(), "--json"];
    let without_disk = json(&config);
    assert!(without_disk["disk"].is_null() && without_disk["unknown"].to_string().contains("--probe DIR"));
    assert!(without_disk["presets"][0]["outlook"]["prediction"].is_null(), "{without_disk:#}");
    let test = ["--probe", dir.path().to_str().unwrap(), "--disk-test-bytes", "20000000"];
    let probed = json(&[&config[..], &test].concat());
    assert!(probed["advice"]["seconds_per_token"].as_f64().unwrap() > 0.0, "{probed:#}");
    assert_eq!(probed["disk"]["disks"][0]["directory"], test[1]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "the file it read is gone");
    let command = probed["advice"]["commands"][0].as_str().unwrap();
    stdout(&command.split(' ').skip(1).collect::<Vec<_>>());

    refusal(&["doctor", "--disk-test-bytes", "0"]);
    refusal(&["doctor", "--model", test[1], "--probe", test[1]]);
    let absent = dir.path().join("absent");
    assert!(refusal(&["doctor", "--probe", absent.to_str().unwrap()]).contains("absent is no directory"));
    assert!(refusal(&["doctor", "--shards", "/tmp"]).contains("--model"));
    assert_eq!(k3(&["doctor", "--model", "/no/such/model"]).status.code(), Some(2));
}
