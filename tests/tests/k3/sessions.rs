//! Sessions: saved and resumed anywhere, gone back in to a mark, reused for another text: always the bits
//! of a text that was read in one go, and never anything that came after a difference.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use k3_pipeline::engine::Engine;
use k3_pipeline::model::tensors::Fingerprint;
use k3_pipeline::preset::Preset;
use k3_pipeline::sample::RandomState;
use k3_pipeline::session::{Prefill, Session};
use k3_pipeline::session_file::{self, SessionFileError, SessionMeta};
use k3_pipeline::units::TokenId;
use k3_tests::binary::{assert_refused, is_soon, k3, run};
use k3_tests::harness::preset_engine;
use k3_tests::resident::golden_model;
use serde_json::Value;

const MODEL: Fingerprint = Fingerprint(3);
const RESIDENT: [&str; 4] =
    ["trunk.pinned=all", "trunk.head=pinned", "experts.cache=64 MiB", "compute.threads=1"];

fn engine(model: &str, more: &[&str]) -> Engine {
    let sets: Vec<String> = RESIDENT.iter().chain(more).map(|&set| set.to_owned()).collect();
    preset_engine(&Preset::load("demo", &sets).unwrap(), &golden_model(model))
}

fn text(len: u32) -> Vec<TokenId> {
    (0..len).map(|i| TokenId((i * i + 7 * i + 3) % 251)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Logits after `text`, read in one go by a fresh session.
fn fresh(engine: &mut Engine, text: &[TokenId]) -> Vec<u32> {
    bits(Session::new(engine).prefill(engine, text, Prefill::default()).unwrap().data())
}

/// Logits after `text`, of which `session` has read what [`Session::reuse`] keeps.
fn rest(engine: &mut Engine, session: &mut Session, text: &[TokenId], chunk: Option<usize>) -> Vec<u32> {
    let read = session.reuse(text);
    let how = Prefill { chunk, ..Prefill::default() };
    bits(session.prefill(engine, &text[read..], how).unwrap().data())
}

fn meta(prompt_tokens: usize) -> SessionMeta {
    let random = RandomState { seed: 1, words: 2 };
    SessionMeta { fingerprint: MODEL, model: "tiny".into(), prompt_tokens, random, notes: Vec::new() }
}

#[test]
fn saved_and_resumed_at_every_position_nothing_changes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.k3s");
    for model in ["k3-tiny-a", "k3-tiny-b"] {
        let text = text(24);
        let mut engine = engine(model, &["context.snapshots=2"]);
        let want = fresh(&mut engine, &text);
        for position in 1..text.len() {
            let mut session = Session::new(&engine);
            session.mark(position / 2);
            session.prefill(&mut engine, &text[..position], Prefill::default()).unwrap();
            session_file::save(&path, &session, &meta(position)).unwrap();
            let mut resumed = Session::new(&engine);
            resumed.prefill(&mut engine, &text[3..9], Prefill::default()).unwrap();
            assert_eq!(session_file::resume(&path, &mut resumed, MODEL).unwrap(), meta(position));
            assert_eq!(resumed.tokens(), &text[..position]);
            assert!(rest(&mut engine, &mut resumed, &text, Some(5)) == want, "{model} at {position}");
            // Its marks came with it: back to the middle, and another end.
            let other = [&text[..position / 2], &[TokenId(250), TokenId(9)]].concat();
            session_file::resume(&path, &mut resumed, MODEL).unwrap();
            assert_eq!(resumed.reuse(&other), position / 2);
            assert!(rest(&mut engine, &mut resumed, &other, None) == fresh(&mut engine, &other));
        }
    }
}

#[test]
fn a_draft_that_waits_or_was_committed_in_part_is_saved_as_what_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.k3s");
    let text = text(24);
    let mut engine = engine("k3-tiny-a", &["pass.draft_tokens=4"]);
    let want = fresh(&mut engine, &text);
    for position in 1..text.len() - 4 {
        for committed in [None, Some(0), Some(1), Some(3), Some(4)] {
            let mut session = Session::new(&engine);
            session.prefill(&mut engine, &text[..position], Prefill::default()).unwrap();
            let mut draft = text[position..position + 4].to_vec();
            let right = committed.unwrap_or(0);
            draft[right..].fill(TokenId(250));
            session.draft(&mut engine, &draft).unwrap();
            if let Some(tokens) = committed {
                session.commit(&mut engine, tokens).unwrap();
            }
            session_file::save(&path, &session, &meta(position)).unwrap();
            // A session that has a draft of its own waiting takes it all the same.
            session_file::resume(&path, &mut session, MODEL).unwrap();
            assert_eq!((session.tokens(), session.state().draft()), (&text[..position + right], 0));
            let found = rest(&mut engine, &mut session, &text, None);
            assert!(found == want, "{committed:?} of a draft after {position}");
            // A draft that waits is no part of the text, and no reason to read it again.
            session_file::resume(&path, &mut session, MODEL).unwrap();
            session.draft(&mut engine, &[TokenId(250); 3]).unwrap();
            assert_eq!(
                (session.reuse(&text), session.tokens()),
                (position + right, &text[..position + right])
            );
            assert!(rest(&mut engine, &mut session, &text, None) == want, "{committed:?} after {position}");
        }
    }
}

#[test]
fn a_mark_is_met_by_any_chunks_and_nothing_after_an_edit_is_reused() {
    let text = text(40);
    let mut engine = engine("k3-tiny-a", &["context.snapshots=3"]);
    for chunk in [1, 3, 7, 16] {
        for edit in [5, 9, 10, 11, 19, 20, 29, 30, 39] {
            let mut session = Session::new(&engine);
            for position in [10, 20, 30] {
                session.mark(position);
            }
            let how = Prefill { chunk: Some(chunk), ..Prefill::default() };
            session.prefill(&mut engine, &text, how).unwrap();
            assert_eq!(session.state().marked(), [10, 20, 30]);
            let mut edited = text.clone();
            edited[edit] = TokenId(edited[edit].0 ^ 1);
            let kept = session.reuse(&edited);
            assert_eq!(
                (kept, session.len()),
                (edit / 10 * 10, edit / 10 * 10),
                "chunks of {chunk}, edit at {edit}"
            );
            assert_eq!(session.tokens(), &edited[..kept]);
            let found = rest(&mut engine, &mut session, &edited, Some(chunk));
            assert!(found == fresh(&mut engine, &edited), "chunks of {chunk}, edit at {edit}");
        }
    }
}

#[test]
fn drafts_pass_a_mark_by_and_damage_is_gone_back_behind() {
    let text = text(30);
    let mut engine = engine("k3-tiny-a", &["context.snapshots=2"]);
    let mut session = Session::new(&engine);
    session.mark(8);
    session.prefill(&mut engine, &text[..12], Prefill::default()).unwrap();
    // Wanted in the middle of a draft: no copy is taken there, so there is no mark.
    session.mark(14);
    session.draft(&mut engine, &text[12..16]).unwrap();
    session.commit(&mut engine, 3).unwrap();
    assert_eq!(session.state().marked(), [8]);
    session.mark(15);
    assert_eq!(session.state().marked(), [8, 15]);
    let cancel = engine.cancel_flag();
    cancel.store(true, std::sync::atomic::Ordering::SeqCst);
    assert!(session.prefill(&mut engine, &text[15..], Prefill::default()).is_err());
    cancel.store(false, std::sync::atomic::Ordering::SeqCst);
    assert!(session.state().is_damaged());
    let dir = tempfile::tempdir().unwrap();
    let damaged = session_file::save(&dir.path().join("s"), &session, &meta(15));
    assert!(matches!(damaged, Err(SessionFileError::DamagedState)));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    assert_eq!(session.reuse(&text), 15);
    assert!(rest(&mut engine, &mut session, &text, None) == fresh(&mut engine, &text));
    // The whole text again: its last token must be read, so the last mark serves.
    assert_eq!(session.reuse(&text), 15);
    // Without room for marks, a text that goes on is all that can be reused.
    let mut engine = self::engine("k3-tiny-a", &["context.snapshots=0"]);
    let mut session = Session::new(&engine);
    session.mark(5);
    session.prefill(&mut engine, &text[..10], Prefill::default()).unwrap();
    assert_eq!((session.state().marked().len(), session.reuse(&text)), (0, 10));
    assert_eq!(session.reuse(&text[..8]), 0);
    assert!(session.is_empty());
}

#[test]
fn a_damaged_file_is_refused_or_harmless_wherever_it_is_hit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.k3s");
    let text = text(9);
    let mut engine = engine("k3-tiny-a", &["context.snapshots=1"]);
    let mut session = Session::new(&engine);
    session.mark(4);
    session.prefill(&mut engine, &text, Prefill::default()).unwrap();
    session_file::save(&path, &session, &meta(9)).unwrap();
    let good = fs::read(&path).unwrap();
    let step = good.len() / 151;
    for at in (0..260).chain((260..good.len()).step_by(step)).chain(good.len() - 20..good.len()) {
        let mut bad = good.clone();
        bad[at] ^= 0x41;
        fs::write(&path, &bad).unwrap();
        let resumed = session_file::resume(&path, &mut session, MODEL);
        assert!(resumed.is_err(), "byte {at} of {}", good.len());
        assert!(session.is_empty() || session.tokens() == text);
    }
    // A model with more layers cannot take it even under the same name.
    fs::write(&path, &good).unwrap();
    let other = self::engine("k3-tiny-b", &["context.snapshots=1"]);
    let mut foreign = Session::new(&other);
    let error = session_file::resume(&path, &mut foreign, MODEL).unwrap_err().to_string();
    assert!(error.contains("damaged"), "{error}");
    // Less room for marks is no reason to refuse.
    let narrow = self::engine("k3-tiny-a", &["context.snapshots=0"]);
    let mut session = Session::new(&narrow);
    session_file::resume(&path, &mut session, MODEL).unwrap();
    assert_eq!(session.tokens(), text);
    let short = self::engine("k3-tiny-a", &["context.tokens=8"]);
    let error = session_file::resume(&path, &mut Session::new(&short), MODEL).unwrap_err().to_string();
    assert!(error.contains("9 tokens, the context holds 8"), "{error}");
}

/// Runs `k3 generate --json` on k3-tiny-a.
fn generate(more: &[&str]) -> Value {
    let ended = run(&arguments(more));
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    serde_json::from_str(&ended.stdout).unwrap()
}

fn arguments<'a>(more: &[&'a str]) -> Vec<&'a str> {
    static DIR: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    let dir = DIR.get_or_init(|| golden_model("k3-tiny-a").to_str().unwrap().to_owned());
    let mut all = vec!["generate", "--preset", "demo", "--json", "--model", dir];
    all.extend(RESIDENT.iter().flat_map(|set| ["--set", *set]));
    all.extend(more);
    all
}

fn ids(report: &Value) -> Vec<u64> {
    report["generated_ids"].as_array().unwrap().iter().filter_map(Value::as_u64).collect()
}

/// The bytes of the logits in a dump, without its header.
fn dumped(path: &str, rows: usize) -> Vec<u8> {
    let bytes = fs::read(path).unwrap();
    bytes[256..256 + rows * 256 * 4].to_vec()
}

#[test]
fn the_binary_goes_on_where_it_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let warm =
        ["--temperature", "0.9", "--seed", "4", "--presence-penalty", "0.5", "--repetition-penalty", "1.2"];
    for (case, sampling) in [("greedy", &[][..]), ("warm", &warm[..])] {
        let with = |more: &[&'static str]| [sampling, more].concat();
        let (whole_logits, session) = (file("whole"), file(case));
        let prompt = ["--ids", "5,6,7,8,9,10,11"];
        let mut whole = with(&["--max-tokens", "14", "--dump-logits"]);
        whole.push(&whole_logits);
        let whole = generate(&[&prompt[..], &whole].concat());
        let rows = dumped(&whole_logits, 20);
        let (mut found, mut logits) = (Vec::new(), Vec::new());
        for (part, count) in ["1", "5", "6", "2"].into_iter().enumerate() {
            let part_logits = file("part");
            let mut args = if part == 0 { prompt.to_vec() } else { Vec::new() };
            args.extend(sampling);
            args.extend(["--max-tokens", count, "--session", &session, "--dump-logits", &part_logits]);
            let report = generate(&args);
            let fed = if part == 0 { 7 } else { 1 } + ids(&report).len() - 1;
            assert_eq!(report["stats"]["prefill"]["tokens"], if part == 0 { 7 } else { 1 });
            logits.extend(dumped(&part_logits, fed));
            found.extend(ids(&report));
        }
        assert_eq!(found, ids(&whole), "{case}");
        assert!(logits == rows, "{case}");
        // With the prompt again, a session changes nothing but the time.
        let mut again = prompt.to_vec();
        again.extend(sampling);
        again.extend(["--max-tokens", "14", "--session", &session]);
        let again = generate(&again);
        assert_eq!(ids(&again), ids(&whole));
        assert_eq!(again["reused_tokens"], 6);
        let longer = generate(&["--ids", "5,6,7,8,9,10,99", "--max-tokens", "3", "--session", &session]);
        assert_eq!(ids(&longer), ids(&generate(&["--ids", "5,6,7,8,9,10,99", "--max-tokens", "3"])));
        assert_eq!(longer["reused_tokens"], 6);
        assert_eq!(
            fs::read_dir(dir.path())
                .unwrap()
                .filter(|f| f.as_ref().is_ok_and(|f| f.file_name().to_string_lossy().starts_with('.')))
                .count(),
            0
        );
    }
}

/// A prompt of forty passes, from a disk that makes each of them slow.
#[test]
fn a_prompt_that_was_killed_goes_on_behind_the_last_pass_that_was_saved() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.k3s");
    let session = ["--session", path.to_str().unwrap()];
    let prompt = (1..200).map(|id| id.to_string()).collect::<Vec<_>>().join(",");
    let slow = ["--set", "pass.tokens=5", "--set", "trunk.pinned=0", "--throttle", "40MB/s"];
    let sampling =
        ["--temperature", "0.9", "--seed", "4", "--presence-penalty", "0.9", "--frequency-penalty", "0.3"];
    let whole = generate(&[&["--ids", &prompt, "--max-tokens", "8"][..], &sampling].concat());

    let mut killed =
        background(&[&["--ids", &prompt, "--max-tokens", "8"][..], &sampling, &slow, &session].concat());
    let begun = Instant::now();
    while !path.exists() {
        assert!(killed.try_wait().unwrap().is_none(), "it ended before it saved anything");
        assert!(is_soon(begun.elapsed()), "nothing is saved");
        std::thread::sleep(Duration::from_millis(1));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();

    let rest = generate(&[&["--max-tokens", "8"][..], &sampling, &session].concat());
    assert_eq!(ids(&rest), ids(&whole));
    let reused = rest["reused_tokens"].as_u64().unwrap();
    assert!((1..199).contains(&reused), "{reused} tokens were read before");
    assert_eq!(rest["prompt_ids"], whole["prompt_ids"]);

    // Another prompt leaves what is saved alone until it is done: by then it has read a few parts of it.
    let saved = fs::read(&path).unwrap();
    let other = (1..200).rev().map(|id| id.to_string()).collect::<Vec<_>>().join(",");
    let mut killed = background(&[&["--ids", &other, "--max-tokens", "8"][..], &slow, &session].concat());
    std::thread::sleep(Duration::from_millis(800));
    assert!(killed.try_wait().unwrap().is_none(), "it was to be killed in the middle");
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(fs::read(&path).unwrap() == saved);
}

/// Files end after 20 KB: a save on the way fails, and the last one.
#[test]
fn a_save_that_fails_costs_no_text() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.k3s");
    let prompt = (1..200).map(|id| id.to_string()).collect::<Vec<_>>().join(",");
    let limited = r#"trap '' XFSZ; ulimit -f 40; exec "$@""#;
    let asked = ["--ids", &prompt, "--max-tokens", "4", "--set", "pass.tokens=5"];
    let ended = Command::new("sh")
        .args(["-c", limited, "sh"])
        .arg(k3())
        .args(arguments(&[&asked[..], &["--session", path.to_str().unwrap()]].concat()))
        .output()
        .unwrap();
    let (stdout, stderr) =
        (String::from_utf8(ended.stdout).unwrap(), String::from_utf8(ended.stderr).unwrap());
    assert_eq!(ended.status.code(), Some(1), "{stderr}");
    assert_eq!(stderr.matches("is read on, but not saved on the way").count(), 1, "{stderr}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(ids(&report), ids(&generate(&asked)));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// `k3 generate --json` on k3-tiny-a, not waited for.
fn background(more: &[&str]) -> Child {
    let mut command = Command::new(k3());
    command.args(arguments(more)).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn a_session_that_is_none_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.k3s");
    let name = path.to_str().unwrap();
    fs::write(&path, "not a session").unwrap();
    let with = |more: &[&'static str]| {
        let mut all: Vec<&str> = arguments(more);
        all.extend(["--session"]);
        all
    };
    let refused = |case, more: &[&'static str], place: &str, says: &[&str]| {
        let mut args = with(more);
        args.push(place);
        assert_refused(case, &args, 2, says);
    };
    refused("text", &["--ids", "1"], name, &["not a session file"]);
    assert_eq!(fs::read(&path).unwrap(), b"not a session");
    refused("directory", &["--ids", "1"], dir.path().to_str().unwrap(), &["not a regular file"]);
    refused("nowhere", &["--ids", "1"], "/nowhere/s.k3s", &["--session: cannot write /nowhere/s.k3s"]);
    refused("no prompt", &[], dir.path().join("none").to_str().unwrap(), &["required", "PROMPT", "--ids"]);
    fs::remove_file(&path).unwrap();
    generate(&["--ids", "1,2", "--max-tokens", "2", "--session", name]);
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    refused("cut", &[], name, &["damaged", "cut off"]);
    fs::write(&path, &bytes).unwrap();
    refused("too many", &["--max-tokens", "1023"], name, &["4 prompt tokens and 1023 more"]);
    let golden = golden_model("k3-tiny-b");
    let foreign = ["generate", "--preset", "demo", "--model", golden.to_str().unwrap(), "--session", name];
    assert_refused("foreign", &foreign, 2, &["is of model \"k3-tiny-a\""]);
}
