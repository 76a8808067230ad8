use std::io::Write;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use proptest::prelude::*;
use serde::Deserialize;

use super::*;

/// A file of the released material, which is not part of this repository: `$K3_SHARED/name`, or
/// `../shared/name` beside the repository. Prints a line and gives `None` where it is absent.
pub(crate) fn released(name: &str) -> Option<PathBuf> {
    let root = std::env::var_os("K3_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"), PathBuf::from);
    let path = root.join(name);
    if path.exists() {
        return Some(path);
    }
    say(&format!("NOT RUN: {} is absent (set K3_SHARED to the directory that holds it)", path.display()));
    None
}

/// Says how far the release was matched, past the capture that hides what a passing test prints.
pub(crate) fn say(text: &str) {
    writeln!(std::io::stderr(), "{text}").unwrap();
}

/// A small vocabulary: the 256 bytes, then `extra` tokens, then specials `[BOS]`, `<|a|>`, `<|a|>b`.
pub(crate) fn small(extra: &[&[u8]]) -> Tokenizer {
    let (ranks, config) = small_files(extra);
    open(&ranks, &config).unwrap()
}

fn small_files(extra: &[&[u8]]) -> (String, String) {
    let bytes: Vec<[u8; 1]> = (0..=255).map(|b| [b]).collect();
    let tokens = bytes.iter().map(<[u8; 1]>::as_slice).chain(extra.iter().copied());
    let ranks: String = tokens.enumerate().map(|(i, t)| format!("{} {i}\n", STANDARD.encode(t))).collect();
    let n = 256 + extra.len();
    let config = format!(
        r#"{{"tokenizer_class": "x", "bos_token": "[BOS]", "added_tokens_decoder": {{
            "{}": {{"content": "<|a|>", "special": true}},
            "{}": {{"content": "[BOS]"}},
            "{}": {{"content": "<|a|>b"}} }} }}"#,
        n + 1,
        n,
        n + 2
    );
    (ranks, config)
}

fn open(ranks: &str, config: &str) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::parse((Path::new("R"), ranks.as_bytes()), (Path::new("C"), config.as_bytes()))
}

fn ids(numbers: &[u32]) -> Vec<TokenId> {
    numbers.iter().copied().map(TokenId).collect()
}

#[derive(Deserialize)]
struct Cases {
    pattern: String,
    cases: Vec<Case>,
    long: Vec<Long>,
}

#[derive(Deserialize)]
struct Case {
    text: String,
    ids: Vec<TokenId>,
}

#[derive(Deserialize)]
struct Long {
    unit: String,
    count: usize,
    suffix: String,
    n: usize,
}

#[test]
fn the_release_is_matched_to_the_id() {
    let Some(dir) = released("tokenizer") else { return };
    let tokenizer = Tokenizer::open(&dir).unwrap();
    let cases: Cases = serde_json::from_slice(&std::fs::read(dir.join("cases.json")).unwrap()).unwrap();
    assert_eq!(cases.pattern, SPLIT_PATTERN);
    assert_eq!(tokenizer.vocabulary_len(), 163_840);
    for case in &cases.cases {
        assert_eq!(tokenizer.encode(&case.text).unwrap(), case.ids, "{:?}", case.text);
        assert_eq!(tokenizer.decode(&case.ids).unwrap(), case.text);
    }
    for case in &cases.long {
        let text = case.unit.repeat(case.count) + &case.suffix;
        let got = tokenizer.encode(&text).unwrap();
        assert_eq!(got.len(), case.n, "{:?} x {}", case.unit, case.count);
        assert_eq!(tokenizer.decode(&got).unwrap(), text);
    }
    say(&format!("tokenizer parity: {} cases and {} long inputs equal", cases.cases.len(), cases.long.len()));
    assert!(cases.cases.len() >= 74 && cases.long.len() >= 4);
}

#[test]
fn the_release_has_its_special_tokens() {
    let Some(dir) = released("tokenizer") else { return };
    let tokenizer = Tokenizer::open(&dir).unwrap();
    assert_eq!(tokenizer.special_id("<|end_of_msg|>"), Some(TokenId(163_586)));
    assert_eq!(tokenizer.roles().bos, Some(TokenId(163_584)));
    assert_eq!(tokenizer.roles().pad, Some(TokenId(163_839)));
    assert_eq!(
        tokenizer.encode_with_specials("<|open|>message<|sep|>").unwrap(),
        ids(&[163_587, 2778, 163_589])
    );
    assert!(tokenizer.encode("<|open|>message<|sep|>").unwrap().iter().all(|id| !tokenizer.is_special(*id)));
    let error = tokenizer.decode(&ids(&[1, 163_840])).unwrap_err();
    assert_eq!(error.to_string(), "token id 163840 is not in the vocabulary (ids 0 to 163839)");
}

#[test]
fn a_run_of_one_character_takes_no_quadratic_time() {
    let tokenizer = small(&[b"xx", b"xxxx"]);
    let started = std::time::Instant::now();
    assert_eq!(tokenizer.encode(&"x".repeat(400_000)).unwrap().len(), 100_000);
    assert_eq!(tokenizer.encode(&" ".repeat(400_000)).unwrap().len(), 400_000);
    assert!(started.elapsed().as_secs() < 30, "{:?}", started.elapsed());
}

#[test]
fn special_tokens_come_only_where_asked_for() {
    let tokenizer = small(&[b"ab"]);
    assert_eq!(tokenizer.encode("<|a|>ab\0").unwrap().len(), 5 + 1 + 1);
    assert_eq!(tokenizer.encode_with_specials("ab<|a|>[BOS]é").unwrap(), ids(&[256, 258, 257, 0xc3, 0xa9]));
    // The longest of those that begin at one place.
    assert_eq!(tokenizer.encode_with_specials("<|a|>b").unwrap(), ids(&[259]));
    assert_eq!(tokenizer.decode(&ids(&[258, 257])).unwrap(), "<|a|>[BOS]");
    assert_eq!(tokenizer.roles().bos, Some(TokenId(257)));
    assert!(!tokenizer.is_special(TokenId(256)) && tokenizer.is_special(TokenId(259)));
    assert!(!tokenizer.is_special(TokenId(260)));
}

#[test]
fn ids_left_out_between_specials_are_reserved() {
    let (ranks, config) = small_files(&[]);
    let tokenizer = open(&ranks, &config.replace("\"258\"", "\"260\"")).unwrap();
    assert_eq!(tokenizer.vocabulary_len(), 261);
    assert_eq!(tokenizer.special_id("<|reserved_token_258|>"), Some(TokenId(258)));
}

#[test]
fn a_damaged_ranks_file_is_refused_by_line() {
    let (ranks, config) = small_files(&[b"ab"]);
    let refused = |from: &str, to: &str, message: &str| {
        let damaged = ranks.replacen(from, to, 1);
        assert_ne!(damaged, ranks);
        let error = open(&damaged, &config).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    };
    refused("Aw== 3\n", "Aw== 3 \n", "R:4: expected `<base64> <rank>` with one space, found \"Aw== 3 \"");
    refused("Aw== 3\n", "\nAw== 3\n", "R:4: expected");
    refused("Aw== 3\n", "Aw= 3\n", "R:4: the token \"Aw=\" is not base64");
    refused("Aw== 3\n", " 3\n", "R:4: the token has no bytes");
    refused("Aw== 3\n", "Aw== 3\r\n", "R:4: the rank \"3\\r\" is not a whole number");
    refused("Aw== 3\n", "Aw== +3\n", "R:4: the rank \"+3\"");
    refused("Aw== 3\n", "Aw== 99999999999\n", "R:4: the rank \"99999999999\"");
    refused("Aw== 3\n", "Aw== 2\n", "R:4: rank 2 was given on line 3 already");
    refused("Aw== 3\n", "Ag== 3\n", "R:4: this token was given on line 3 already");
    refused("Aw== 3\n", "", "R:256: rank 256 leaves a gap: 256 lines");
    refused("Aw== 3\n", "AwM= 3\n", "R: no token for the single byte 0x03");
    assert_eq!(open("", &config).unwrap_err().to_string(), "R: the file holds no tokens");
    let without_last_line = ranks.trim_end().rsplit_once('\n').unwrap().0;
    let error = open(without_last_line, &config).unwrap_err().to_string();
    assert!(error.contains("the first id is 257, expected 256"), "{error}");
}

#[test]
fn a_damaged_configuration_is_refused() {
    let (ranks, config) = small_files(&[]);
    let refused = |from: &str, to: &str, message: &str| {
        let damaged = config.replacen(from, to, 1);
        assert_ne!(damaged, config);
        let error = open(&ranks, &damaged).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    };
    refused("\"258\"", "\"x\"", "key \"x\" is not a token id");
    refused("\"258\"", "\"0258\"", "key \"0258\" is not a token id");
    refused("\"258\"", "\"257\"", "id 257 is given twice");
    refused("\"258\"", "\"4000000000\"", "too far beyond the ranks");
    refused("<|a|>b", "<|a|>", "ids 257 and 258 share the text");
    refused("<|a|>b", "", "id 258 has an empty text");
    refused("\"bos_token\": \"[BOS]\"", "\"bos_token\": \"[B]\"", "bos_token: \"[B]\" is not one of");
    refused("added_tokens_decoder", "tokens", "missing field `added_tokens_decoder`");
    refused("} }", "}", "C: EOF");
    refused("\"tokenizer_class\": \"x\"", "\"bos_token\": \"[BOS]\"", "duplicate field");
}

#[test]
fn a_missing_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = Tokenizer::open(dir.path()).unwrap_err();
    assert!(error.to_string().contains(RANKS_FILE), "{error}");
    std::fs::write(dir.path().join(RANKS_FILE), small_files(&[]).0).unwrap();
    let error = Tokenizer::open(dir.path()).unwrap_err();
    assert!(error.to_string().contains(CONFIG_FILE), "{error}");
}

proptest! {
    #[test]
    fn any_text_comes_back(text in "\\PC*|[ a-c<|>\\[\\]BOS\u{0}\n]*|(\\p{Han}|\\p{M}|\\s|.)*") {
        let tokenizer = small(&[b"ab", b"  ", b"\xc3\xa9", b"<|"]);
        let plain = tokenizer.encode(&text).unwrap();
        prop_assert!(plain.iter().all(|id| !tokenizer.is_special(*id)));
        prop_assert_eq!(tokenizer.decode(&plain).unwrap(), text.clone());
        prop_assert_eq!(tokenizer.decode(&tokenizer.encode_with_specials(&text).unwrap()).unwrap(), text);
    }

    #[test]
    fn streaming_equals_the_whole(numbers in prop::collection::vec(0_u32..260, 0..40)) {
        let tokenizer = small(&["é".as_bytes()]);
        let ids = ids(&numbers);
        let (mut decoder, mut text) = (StreamDecoder::new(), String::new());
        for id in &ids {
            decoder.push(tokenizer.token_bytes(*id).unwrap(), &mut text);
        }
        decoder.finish(&mut text);
        prop_assert_eq!(text, tokenizer.decode(&ids).unwrap());
    }

    #[test]
    fn hostile_files_never_panic(ranks in prop::collection::vec(any::<u8>(), 0..200), config in ".*") {
        let _ = Tokenizer::parse((Path::new("R"), &ranks), (Path::new("C"), config.as_bytes()));
        let good = small_files(&[]).0;
        let _ = Tokenizer::parse((Path::new("R"), good.as_bytes()), (Path::new("C"), config.as_bytes()));
    }
}
