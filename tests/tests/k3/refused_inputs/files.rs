//! Weight files that cannot be read or hold values that are no numbers, prompts and outputs that have no
//! place.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use k3_tests::corrupt::Model;

use super::{Case, generating};

const SHARD: &str = "model-00002-of-000008.safetensors";
const Q_PROJ: &str = "language_model.model.layers.1.self_attn.q_proj.weight";
const HEAD: &str = "language_model.lm_head.weight";
const SCALE: &str = "language_model.model.layers.1.block_sparse_moe.experts.5.w1.weight_scale";

/// Every case; files go to `dir`.
pub fn cases(dir: &Path) -> Vec<Case> {
    let mut all = shards();
    all.extend(values());
    all.extend(prompts(dir));
    all.extend(tokenizers());
    all.extend(outputs(dir));
    all
}

/// Generation from a damaged copy of a small model; its scale byte of 255 is mended first.
fn from_model(name: &str, damage: impl FnOnce(&Model), says: &[&str]) -> Case {
    let model = Model::copy_of("k3-tiny-nan");
    model.poke(SCALE, 11, &[127]);
    damage(&model);
    let dir = model.path().to_string_lossy().into_owned();
    let ids = (1..30).map(|id| id.to_string()).collect::<Vec<_>>().join(",");
    let args = ["generate", "--preset", "demo", "--model", &dir, "--ids", &ids, "--max-tokens", "4"];
    Case { model: Some(model), ..Case::new(name, &args, 1, says) }
}

fn shards() -> Vec<Case> {
    let mut all = vec![
        from_model("a shard that is a FIFO", |m| m.make_pipe(SHARD), &[SHARD, "found a pipe"]),
        from_model("a shard that is a directory", |m| m.make_directory(SHARD), &[SHARD, "found a directory"]),
        from_model("an empty shard", |m| m.cut(SHARD, 0), &[SHARD, "0 bytes long"]),
        from_model("a truncated shard", |m| m.cut(SHARD, 40_000), &[SHARD, "truncated"]),
        from_model(
            "a shard that is a link to itself",
            |m| m.make_unreadable(SHARD),
            &[SHARD, "cannot be read"],
        ),
        from_model("a missing shard", |m| m.remove(SHARD), &[SHARD, "named in"]),
    ];
    let forbid = |m: &Model| {
        fs::set_permissions(m.file(SHARD), fs::Permissions::from_mode(0o000)).unwrap();
    };
    let case = from_model("a shard without permission", forbid, &[SHARD, "cannot be read"]);
    // Whoever can read it all the same (root) cannot be shown that it is unreadable.
    match case.model.as_ref().map(|m| fs::read(m.file(SHARD))) {
        Some(Ok(_)) => println!("skipped: {} (permissions do not bind this user)", case.name),
        _ => all.push(case),
    }
    all
}

fn values() -> Vec<Case> {
    let nan = 0x7fc0_u16.to_le_bytes();
    let infinity = 0xff80_u16.to_le_bytes();
    vec![
        from_model("a scale byte of 255", |m| m.poke(SCALE, 11, &[255]), &[SCALE, "255"]),
        from_model("NaN in the trunk", |m| m.poke(Q_PROJ, 2 * (64 * 3 + 7), &nan), &[Q_PROJ, "row 3"]),
        from_model("infinity in the trunk", |m| m.poke(Q_PROJ, 2 * 64 * 5, &infinity), &[Q_PROJ, "row 5"]),
        from_model("NaN in the head", |m| m.poke(HEAD, 2 * 64 * 9, &nan), &[HEAD, "row 9"]),
        from_model("infinity in the head", |m| m.poke(HEAD, 2, &infinity), &[HEAD, "row 0"]),
    ]
}

fn prompts(dir: &Path) -> Vec<Case> {
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.join(name);
        fs::write(&path, bytes).unwrap();
        path.to_string_lossy().into_owned()
    };
    let binary = file("prompt.bin", &[0xff, 0xfe, 0x00]);
    let absent = dir.join("no-prompt.txt").to_string_lossy().into_owned();
    let folder = dir.to_string_lossy().into_owned();
    let demo = k3_golden::golden_dir().join("demo").to_string_lossy().into_owned();
    let with = |name: &str, path: &str, says: &[&str]| {
        let args = ["generate", "--preset", "demo", "--model", &demo, "--prompt-file", path];
        Case::new(name, &args, 2, says)
    };
    let tokenize = ["tokenize", "--model", &demo, "--file", &binary];
    vec![
        Case::new("a text to tokenize that is not UTF-8", &tokenize, 2, &[&binary, "UTF-8"]),
        with("a prompt file that is not UTF-8", &binary, &[&binary, "UTF-8"]),
        with("a prompt file that is not there", &absent, &[&absent]),
        with("a prompt from standard input that is empty", "-", &["the prompt is empty"]),
        with("a prompt file that is a directory", &folder, &[&folder, "not a regular file"]),
        with("a prompt file that is a device", "/dev/zero", &["/dev/zero", "not a regular file"]),
    ]
}

/// A FIFO in the place of each tokenizer file: whoever reads it waits for ever.
fn tokenizers() -> Vec<Case> {
    let case = |(name, file): (&str, &str)| {
        let model = Model::copy_of("../demo");
        model.make_pipe(file);
        let dir = model.path().to_string_lossy().into_owned();
        let args = ["tokenize", "--model", &dir, "--text", "x"];
        Case { model: Some(model), ..Case::new(name, &args, 2, &[file]) }
    };
    let files =
        [("ranks in a FIFO", "tiktoken.model"), ("special tokens in a FIFO", "tokenizer_config.json")];
    files.map(case).into()
}

fn outputs(dir: &Path) -> Vec<Case> {
    let folder = dir.to_string_lossy().into_owned();
    let nowhere = dir.join("no/such/folder/l.safetensors").to_string_lossy().into_owned();
    let under_a_file = dir.join("file");
    fs::write(&under_a_file, "").unwrap();
    let under_a_file = under_a_file.join("l.safetensors").to_string_lossy().into_owned();
    [
        ("logits to a full device", "/dev/full"),
        ("logits to a folder", &folder),
        ("logits below a folder that is not there", &nowhere),
        ("logits below a file", &under_a_file),
        ("logits to /proc", "/proc/logits.safetensors"),
        ("logits to nowhere", ""),
    ]
    .into_iter()
    .map(|(name, path)| {
        let args = ["--ids", "1,2,3", "--max-tokens", "4", "--dump-logits", path];
        generating(name, &args, 2, &["--dump-logits", path])
    })
    .chain(over_files_of_a_model(dir))
    .chain(over_one_another(dir))
    .collect()
}

/// Two outputs in one place, however it is spelled: one of them would be lost.
fn over_one_another(dir: &Path) -> Vec<Case> {
    let one = dir.join("one").to_string_lossy().into_owned();
    let same = dir.join("./one").to_string_lossy().into_owned();
    let held = dir.join("held");
    fs::write(&held, "a prompt").unwrap();
    let link = dir.join("link-to-held");
    std::os::unix::fs::symlink(&held, &link).unwrap();
    let (held, link) = (held.to_string_lossy(), link.to_string_lossy());
    let case = |name: &str, first: [&str; 2], second: [&str; 2]| {
        let says = [first[0], second[0], "both name", second[1]];
        generating(name, &[&["--max-tokens", "1"], &first[..], &second].concat(), 2, &says)
    };
    let talk = ["chat", "--preset", "demo", "--message", "x", "--session", &one, "--trace", &same];
    let batch = ["batch", "--preset", "demo", &held, "--trace", &link];
    vec![
        case("a session over logits", ["--session", &one], ["--dump-logits", &same]),
        case("logits over a trace", ["--dump-logits", &one], ["--trace", &one]),
        case("a prompt over a session", ["--prompt-file", &held], ["--session", &link]),
        Case::new("a conversation over a trace", &talk, 2, &["--session and --trace both name"]),
        Case::new("requests over a trace", &batch, 2, &["FILE and --trace both name"]),
    ]
}

/// What a command writes must not take the place of weights, nor of a FIFO.
fn over_files_of_a_model(dir: &Path) -> Vec<Case> {
    let shard = dir.join("model-00001-of-000002.safetensors");
    fs::write(&shard, "weights").unwrap();
    let shard = shard.to_string_lossy();
    let fifo = dir.join("svg-fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let fifo = fifo.to_string_lossy();
    let demo = k3_golden::golden_dir().join("demo").to_string_lossy().into_owned();
    let says = ["a file of a model", &*shard];
    vec![
        generating("logits over a shard", &["--ids", "1", "--dump-logits", &shard], 2, &says),
        generating("a trace over a shard", &["--ids", "1", "--trace", &shard], 2, &says),
        Case::new("a map over a shard", &["plan", "--preset", "demo", "--svg", &shard], 2, &says),
        Case::new(
            "a map to nowhere",
            &["plan", "--preset", "demo", "--svg", "/nonexistent/x.svg"],
            2,
            &["--svg: cannot write /nonexistent/x.svg: No such file or directory (os error 2)\n"],
        ),
        generating(
            "logits to a name that only a directory can have",
            &["--ids", "1", "--dump-logits", "logits/"],
            2,
            &["--dump-logits: cannot write logits/: it is the name of a directory"],
        ),
        generating(
            "a session there",
            &["--ids", "1", "--session", "s/."],
            2,
            &["--session: cannot write s/.:"],
        ),
        Case::new("a map over a FIFO", &["plan", "--preset", "demo", "--svg", &fifo], 2, &["--svg", &fifo]),
        Case::new(
            "text from a FIFO",
            &["tokenize", "--model", &demo, "--file", &fifo],
            2,
            &["not a regular file", &fifo],
        ),
    ]
}
