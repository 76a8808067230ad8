//! `k3 generate --session`: what is printed goes on at the byte, wherever a run ended: within a character,
//! within the beginning of a stop text.

use std::path::Path;

use k3_tests::binary::run;
use serde_json::Value;

/// Bytes of "é" and of "€", and two letters: what the model writes is full of characters that are not whole yet,
/// and of some that never will be.
const BYTES: [u8; 7] = [0xc3, 0xa9, 0xe2, 0x82, 0xac, b'a', b'b'];
/// Tokens of the whole text.
const TOKENS: usize = 28;

/// Runs `k3 generate` with a model that writes [`BYTES`]; gives what it printed.
fn write(dir: &Path, more: &[&str]) -> String {
    let mut args = vec!["generate", "--preset", "demo", "--temperature", "1", "--seed", "6"];
    args.extend(["--model", dir.to_str().unwrap(), "--set", "compute.threads=1"]);
    let biases = BYTES.map(|byte| format!("--logit-bias={byte}=100"));
    args.extend(biases.iter().map(String::as_str));
    args.extend(more);
    let ended = run(&args);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    ended.stdout
}

/// As JSON, with a session.
fn part(dir: &Path, session: &Path, begins: bool, more: &[&str]) -> Value {
    let mut args = vec!["--json", "--session", session.to_str().unwrap()];
    if begins {
        args.extend(["--ids", "1,2,3"]);
    }
    args.extend(more);
    serde_json::from_str(&write(dir, &args)).unwrap()
}

fn text(part: &Value) -> &str {
    part["text"].as_str().unwrap()
}

#[test]
fn one_token_at_a_time_gives_the_text_of_one_run() {
    let model = crate::conversation::model(false);
    let dir = tempfile::tempdir().unwrap();
    let all = TOKENS.to_string();
    let whole = part(model.path(), &dir.path().join("whole"), true, &["--max-tokens", &all]);
    let whole = text(&whole);
    let closed = write(model.path(), &["--ids", "1,2,3", "--max-tokens", &all]);
    assert!(closed.starts_with(whole), "{closed:?} {whole:?}");
    let is_whole = |c: char| !c.is_ascii() && c != '\u{fffd}';
    assert!(whole.contains(is_whole) && whole.contains('\u{fffd}'), "{whole:?}");
    // The first character that is whole, with the two before it.
    let at = whole.chars().position(is_whole).unwrap();
    let stop: String = whole.chars().skip(at - 2).take(3).collect();
    for stops in [&[][..], &["--stop", &stop, "--stop", "aaaaaaaa", "--stop", "éééééé"]] {
        let session = dir.path().join(format!("{} stops", stops.len()));
        let (mut found, mut tokens, mut waits, mut stopped) = (String::new(), 0, 0, false);
        while tokens < TOKENS && !stopped {
            let one = part(model.path(), &session, tokens == 0, &[&["--max-tokens", "1"], stops].concat());
            waits += usize::from(text(&one).is_empty());
            found.push_str(text(&one));
            tokens += 1;
            stopped = one["finish_reason"] == "stop";
        }
        assert!(waits > 5, "{waits} tokens of {tokens} had to wait: {found:?}");
        assert_eq!(stopped, !stops.is_empty());
        if stopped {
            let one = dir.path().join("one run");
            let one = part(model.path(), &one, true, &[&["--max-tokens", &all], stops].concat());
            assert_eq!((found.as_str(), &one["finish_reason"]), (text(&one), &Value::from("stop")));
            assert_eq!(found, whole[..whole.find(&stop).unwrap()]);
            // Without the stop text, what it held back comes first.
            let left = (TOKENS - tokens).to_string();
            found.push_str(text(&part(model.path(), &session, false, &["--max-tokens", &left])));
        }
        assert_eq!(found, whole);
    }
}

#[test]
fn a_stream_goes_on_as_the_report_does() {
    let model = crate::conversation::model(false);
    let dir = tempfile::tempdir().unwrap();
    let whole = part(model.path(), &dir.path().join("whole"), true, &["--max-tokens", "28"]);
    for first in [1, 2, 3, 5, 8] {
        let session = dir.path().join(first.to_string());
        let counts = [first, 15, 13 - first].map(|n| n.to_string());
        let mut found = String::new();
        for (at, count) in counts.iter().enumerate() {
            let mut args = vec!["--session", session.to_str().unwrap(), "--max-tokens", count];
            if at == 0 {
                args.extend(["--ids", "1,2,3"]);
            }
            found.push_str(write(model.path(), &args).strip_suffix('\n').unwrap());
        }
        assert_eq!(found, text(&whole), "{first} tokens, then 15, then the rest");
    }
}
