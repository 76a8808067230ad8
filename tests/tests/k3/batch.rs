//! Independent sequences that share passes: each has the bits it has alone, whoever is beside it, and a
//! request that is refused takes nobody with it.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use k3_kernel::Kernels;
use k3_pipeline::batch::{Batch, Heard, Request};
use k3_pipeline::engine::Engine;
use k3_pipeline::forward::RunError;
use k3_pipeline::generation::{Chosen, Generator};
use k3_pipeline::preset::Preset;
use k3_pipeline::sample::{Sampler, SamplingError, SamplingParams};
use k3_pipeline::session::{Prefill, Session};
use k3_pipeline::speculate::{Drafter, Gated, LookupParams, PromptLookup};
use k3_pipeline::units::TokenId;
use k3_tests::binary::{Ended, assert_refused, run};
use k3_tests::harness::preset_engine;
use k3_tests::resident::golden_model;
use serde_json::{Value, json};

/// Tokens and the bits of the rows that they were chosen from.
pub(crate) type Heard1 = (Vec<TokenId>, Vec<Vec<u32>>);

#[derive(Debug)]
struct Failure(#[allow(dead_code)] String);

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        Self(error.to_string())
    }
}

impl From<SamplingError> for Failure {
    fn from(error: SamplingError) -> Self {
        Self(error.to_string())
    }
}

pub(crate) fn engine(model: &str, overrides: &[&str]) -> Engine {
    // One thread unless a case says otherwise: teams are tested elsewhere.
    let overrides: Vec<String> =
        ["compute.threads=1"].iter().chain(overrides).map(|&o| o.to_owned()).collect();
    preset_engine(&Preset::load("demo", &overrides).unwrap(), &golden_model(model))
}

pub(crate) fn prompt(of: u32, vocab: usize) -> Vec<TokenId> {
    let len = [1, 40, 7, 19, 3, 33][of as usize % 6];
    (0..len).map(|i| TokenId((i * i * (of + 1) + 5 * i + of) % vocab as u32)).collect()
}

fn tokens(of: u32) -> usize {
    [9, 4, 14, 1, 11, 6][of as usize % 6]
}

fn lookup() -> Box<dyn Drafter> {
    Box::new(Gated::new(PromptLookup::new(LookupParams::default())))
}

fn generator(of: u32, vocab: usize, drafter: Option<Box<dyn Drafter>>) -> Generator {
    let params = SamplingParams {
        temperature: [0.0, 0.9, 1.3][of as usize % 3],
        seed: u64::from(of),
        presence_penalty: 0.2,
        ..SamplingParams::default()
    };
    let mut generator =
        Generator::new(Sampler::new(params, vocab, Kernels::detect()).unwrap(), drafter, false);
    generator.sampler_mut().begin(&prompt(of, vocab)).unwrap();
    generator
}

fn keep(heard: &mut Heard1, chosen: &Chosen<'_>) {
    heard.0.push(chosen.id);
    heard.1.push(chosen.row.iter().map(|x| x.to_bits()).collect());
}

/// A request through a session of its own, one pass after the other.
pub(crate) fn alone(engine: &mut Engine, of: u32, drafter: Option<Box<dyn Drafter>>) -> Heard1 {
    let vocab = engine.config().vocab;
    let (mut session, mut generator) = (Session::new(engine), generator(of, vocab, drafter));
    let mut heard = Heard1::default();
    let logits = session.prefill(engine, &prompt(of, vocab), Prefill::default()).unwrap();
    let chosen = generator.first(logits.last().unwrap()).unwrap();
    keep(&mut heard, &chosen);
    let mut decided = chosen.id;
    while heard.0.len() < tokens(of) {
        let mut emit = |chosen: Chosen<'_>| {
            keep(&mut heard, &chosen);
            let is_last = heard.0.len() == tokens(of);
            Ok::<_, Failure>(if is_last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        };
        match generator.step(engine, &mut session, decided, &mut emit).unwrap() {
            ControlFlow::Continue(id) | ControlFlow::Break(id) => decided = id,
        }
    }
    heard
}

/// All requests, entering as there is room.
fn together(engine: &mut Engine, requests: &[u32], drafts: bool) -> BTreeMap<u64, Heard1> {
    together_with(engine, requests, |_| drafts.then(lookup))
}

/// All requests, each with guesses of its own.
pub(crate) fn together_with(
    engine: &mut Engine,
    requests: &[u32],
    drafter: impl Fn(u32) -> Option<Box<dyn Drafter>>,
) -> BTreeMap<u64, Heard1> {
    let vocab = engine.config().vocab;
    let mut batch = Batch::new(engine);
    let mut heard: BTreeMap<u64, Heard1> = BTreeMap::new();
    let (mut waiting, mut ended, mut failures) = (requests.iter(), 0, Vec::new());
    while ended < requests.len() {
        while batch.has_room() {
            let Some(&of) = waiting.next() else { break };
            let (prompt, generator) = (prompt(of, vocab), generator(of, vocab, drafter(of)));
            let request = Request { key: u64::from(of), prompt, max_tokens: tokens(of), generator };
            batch.enter(engine, request).unwrap();
        }
        let mut hear = |key: u64, event: Heard<'_>| match event {
            Heard::Token(chosen) => {
                keep(heard.entry(key).or_default(), &chosen);
                ControlFlow::Continue(())
            }
            Heard::Failed(error) => {
                failures.push(error.to_string());
                ControlFlow::Break(())
            }
        };
        ended += batch.step(engine, &mut hear).unwrap().len();
    }
    assert!(batch.is_empty() && batch.has_room() && failures.is_empty(), "{failures:?}");
    heard
}

#[test]
fn every_mix_gives_each_sequence_the_bits_it_has_alone() {
    for model in ["k3-tiny-a", "k3-tiny-b"] {
        let mut plain = engine(model, &[]);
        let want: Vec<Heard1> = (0..6).map(|of| alone(&mut plain, of, None)).collect();
        let one_slot = ["trunk.ring_slots=1", "experts.cache=0", "experts.staging_slots=1", "trunk.pinned=0"];
        let cases: [(&[&str], &[u32], bool); 7] = [
            (&["context.sequences=1"], &[0, 1, 2], false),
            (&["context.sequences=3"], &[0, 1, 2, 3, 4, 5], false),
            (&["context.sequences=6"], &[5, 4, 3, 2, 1, 0], true),
            (&["context.sequences=4", "pass.tokens=3", "pass.draft_tokens=2"], &[1, 5, 2, 0, 4], true),
            (&["context.sequences=3", "pass.tokens=1", "pass.draft_tokens=0"], &[2, 0, 4, 3], false),
            (&["context.sequences=2", "pass.tokens=64", "compute.threads=2"], &[1, 3, 5, 2], false),
            (&["context.sequences=5", "trunk.block=4 KiB"], &[4, 2, 0, 1, 3], true),
        ];
        // Every third setting is enough for the larger model.
        let every = if model == "k3-tiny-a" { 1 } else { 3 };
        for (at, (overrides, requests, drafts)) in cases.into_iter().enumerate().step_by(every) {
            let mut all = overrides.to_vec();
            if at % 2 == 1 {
                all.extend(one_slot);
            }
            let found = together(&mut engine(model, &all), requests, drafts);
            for &of in requests {
                assert!(found[&u64::from(of)] == want[of as usize], "{model} {all:?}: request {of}");
            }
        }
    }
}

#[test]
fn a_sequence_whose_sampler_fails_leaves_and_the_others_stay_as_they_are() {
    let mut engine = engine("k3-tiny-a", &["context.sequences=3"]);
    let vocab = engine.config().vocab;
    for bad in [0, 1] {
        let want: Vec<Heard1> = [2, 4].map(|of| alone(&mut engine, of, None)).into();
        let mut batch = Batch::new(&engine);
        for (key, of) in [(2, 2), (100, bad), (4, 4)] {
            let mut generator = generator(of, vocab, Some(lookup()));
            if key == 100 {
                // A sampler of another vocabulary refuses the first row it gets.
                let params = SamplingParams::default();
                *generator.sampler_mut() = Sampler::new(params, vocab - 1, Kernels::detect()).unwrap();
            }
            let request = Request { key, prompt: prompt(of, vocab), max_tokens: tokens(of), generator };
            batch.enter(&engine, request).unwrap();
        }
        let (mut heard, mut failures): (BTreeMap<u64, Heard1>, Vec<_>) = Default::default();
        while !batch.is_empty() {
            let mut hear = |key: u64, event: Heard<'_>| {
                match event {
                    Heard::Token(chosen) => keep(heard.entry(key).or_default(), &chosen),
                    Heard::Failed(error) => failures.push((key, error)),
                }
                // Whatever is answered to a failure, the sequence leaves.
                ControlFlow::Continue(())
            };
            batch.step(&mut engine, &mut hear).unwrap();
        }
        assert_eq!(failures, [(100, SamplingError::Row { found: vocab, vocabulary: vocab - 1 })]);
        assert!(heard.len() == 2 && heard[&2] == want[0] && heard[&4] == want[1], "beside {bad}");
    }
}

#[test]
fn sharing_saves_passes_and_a_refused_request_changes_nothing() {
    let mut engine = engine("k3-tiny-a", &["context.sequences=4", "context.tokens=48"]);
    let vocab = engine.config().vocab;
    let mut batch = Batch::new(&engine);
    let request =
        |prompt, max_tokens| Request { key: 0, prompt, max_tokens, generator: generator(0, vocab, None) };
    let refused = |batch: &mut Batch, engine: &Engine, r| batch.enter(engine, r).unwrap_err().to_string();
    assert!(refused(&mut batch, &engine, request(Vec::new(), 1)).contains("at least one token"));
    assert!(refused(&mut batch, &engine, request(vec![TokenId(256)], 1)).contains("vocabulary of 256"));
    assert!(refused(&mut batch, &engine, request(vec![TokenId(1); 49], 1)).contains("context of 48"));
    assert!(refused(&mut batch, &engine, request(vec![TokenId(1); 40], 10)).contains("context of 48"));
    batch.enter(&engine, request(vec![TokenId(1); 40], 9)).unwrap();
    assert_eq!(batch.len(), 1);
    batch.clear();

    let before = engine.stats().decode.passes;
    let found = together(&mut engine, &[0, 2, 4], false);
    // As many passes as the longest needs, not as all together need.
    assert_eq!(engine.stats().decode.passes - before, 13);
    assert_eq!(found.values().map(|h| h.0.len()).sum::<usize>(), 34);

    batch.enter(&engine, request(vec![TokenId(1); 4], 9)).unwrap();
    engine.cancel_flag().store(true, Ordering::SeqCst);
    let cancelled = batch.step(&mut engine, &mut |_, _| ControlFlow::Continue(()));
    assert!(matches!(cancelled, Err(RunError::Cancelled)));
    engine.cancel_flag().store(false, Ordering::SeqCst);
    batch.clear();
    assert!(together(&mut engine, &[0, 2, 4], false) == found);
}

/// Runs `k3 batch` over `lines`.
fn k3_batch(dir: &str, lines: &[&str], more: &[&str]) -> (Ended, Vec<Value>) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), lines.join("\n")).unwrap();
    let path = file.path().to_str().unwrap();
    let ended =
        run(&[&["batch", path, "--preset", "demo", "--model", dir, "--set", "compute.threads=1"], more]
            .concat());
    let mut answers: Vec<Value> =
        ended.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    answers.sort_by_key(|answer| answer["line"].as_u64());
    (ended, answers)
}

#[test]
fn the_binary_answers_each_line_and_survives_bad_ones() {
    let model = crate::conversation::model(true);
    let dir = model.path().to_str().unwrap();
    let lines = [
        r#"{"id": "first", "ids": [1, 2, 3], "max_tokens": 7}"#,
        r#"{"id": "bad json", "#,
        "",
        r#"{"id": 4, "prompt": "hi there", "temperature": 0.9, "seed": 3, "max_tokens": 5, "logprobs": 1}"#,
        r#"{"id": "no such id", "ids": [320]}"#,
        r#"{"id": "typo", "ids": [1], "max_token": 3}"#,
        r#"{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 1}"#,
        r#"{"id": "range", "ids": [1], "top_p": 2}"#,
        r#"{"id": "long", "ids": [1, 2], "max_tokens": 5000}"#,
        r#"{"id": "last", "ids": [9, 8, 7, 6]}"#,
    ];
    let (ended, answers) = k3_batch(dir, &lines, &["--parallel", "3", "--max-tokens", "4"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("5 of 9 requests failed"), "{}", ended.stderr);
    let numbers: Vec<u64> = answers.iter().filter_map(|a| a["line"].as_u64()).collect();
    assert_eq!(numbers, [1, 2, 4, 5, 6, 7, 8, 9, 10]);
    for (at, says) in [
        (1, "line 2, column 18: EOF"),
        (3, "token 320 is not in the vocabulary"),
        (4, "line 6, column 38: unknown field `max_token`"),
        (6, "top_p is 2"),
        (7, "context of 1024"),
    ] {
        let error = answers[at]["error"].as_str().unwrap();
        assert!(error.contains(says), "{error}");
    }
    assert_eq!(answers[3]["id"], "no such id");
    // Alone, through `k3 generate`.
    let generate = |more: &[&str]| {
        let args = [&["generate", "--preset", "demo", "--model", dir, "--json"], more].concat();
        serde_json::from_str::<Value>(&run(&args).stdout).unwrap()
    };
    let same = |answer: &Value, alone: &Value| {
        for key in ["generated_ids", "text", "finish_reason", "logprobs"] {
            assert_eq!(answer[key], alone[key], "{key}: {answer}");
        }
    };
    same(&answers[0], &generate(&["--ids", "1,2,3", "--max-tokens", "7"]));
    let warm = ["--temperature", "0.9", "--seed", "3", "--max-tokens", "5", "--logprobs", "1"];
    same(&answers[2], &generate(&[&["--prompt", "hi there"][..], &warm].concat()));
    same(&answers[8], &generate(&["--ids", "9,8,7,6", "--max-tokens", "4"]));
    let chat = ["--message", "hi", "--max-tokens", "6", "--preset", "demo", "--model", dir, "--json"];
    let chat: Value = serde_json::from_str(&run(&[&["chat"][..], &chat].concat()).stdout).unwrap();
    assert_eq!((&answers[5]["text"], &answers[5]["thinking"]), (&chat["response"], &chat["thinking"]));

    let (ended, answers) = k3_batch(dir, &[lines[0], lines[3]], &["--stop-id", "306"]);
    assert_eq!((ended.code, answers.len()), (Some(0), 2), "{ended:?}");
}

#[test]
fn what_cannot_run_is_refused_before_anything_is_read() {
    let dir = golden_model("k3-tiny-a");
    let dir = dir.to_str().unwrap();
    let with =
        |more: &'static [&'static str]| [&["batch", "--preset", "demo", "--model", dir], more].concat();
    assert_refused("file", &with(&["/nowhere.jsonl"]), 2, &["/nowhere.jsonl"]);
    assert_refused(
        "memory",
        &with(&["--parallel", "256", "--memory", "64MB", "-"]),
        2,
        &["KDA state", "short"],
    );
    assert_refused("parallel", &with(&["--parallel", "300", "-"]), 2, &["context.sequences", "1 to 256"]);
    assert_refused("zero", &with(&["--parallel", "0", "-"]), 2, &["context.sequences"]);
    // Standard input that has ended holds no request.
    let ended = run(&with(&["-"]));
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), ""), "{ended:?}");
    let (ended, answers) = k3_batch(dir, &[r#"{"prompt": "x"}"#, r#"{"ids": [1], "stop": ["x"]}"#], &[]);
    assert_eq!(ended.code, Some(1));
    assert_eq!(
        answers[0],
        json!({"line": 1, "id": null, "error": "prompt needs a tokenizer, and the model has none"})
    );
    assert_eq!(answers[1]["error"], "stop needs a tokenizer, and the model has none");

    let long = format!("{{\"ids\": {:?}}}", vec![7; 1030]);
    let lines = ["[1, 2]", "\"x\"", r#"{"ids": []}"#, &long, r#"{"messages": [3]}"#];
    let (ended, answers) = k3_batch(dir, &lines, &[]);
    assert_eq!(ended.code, Some(1));
    for (at, says) in [
        (0, "line 1: expected an object with prompt, ids or messages"),
        (1, "line 2: expected an object with prompt, ids or messages"),
        (2, "the prompt is empty"),
        (
            3,
            "the prompt is 6 tokens too long: it has 1030 tokens, the context holds 1024; raise `context.tokens`",
        ),
        (4, "expected a message: an object with role and content"),
    ] {
        let error = answers[at]["error"].as_str().unwrap();
        assert!(error.contains(says) && !error.contains("struct"), "{error}");
    }
}
