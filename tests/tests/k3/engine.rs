//! The engine with its readers and caches: no preset, size, reader or way of feeding changes a bit, and
//! what cannot run is refused with the session unharmed.

use std::sync::atomic::Ordering;

use k3_pipeline::engine::Engine;
use k3_pipeline::forward::RunError;
use k3_pipeline::preset::Preset;
use k3_pipeline::session::{Prefill, Progress, Session};
use k3_pipeline::units::TokenId;
use k3_tests::harness::{demo_engine, preset_engine};
use k3_tests::resident::golden_model;

fn text(len: u32) -> Vec<TokenId> {
    (0..len).map(|i| TokenId((i * i + 7 * i + 3) % 251)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Logits of every position.
fn all_logits(engine: &mut Engine, text: &[TokenId], chunk: Option<usize>) -> Vec<u32> {
    let mut all = Vec::new();
    let mut observe = |seen: Progress<'_>| all.extend(bits(seen.logits.data()));
    let how = Prefill { chunk, all_logits: true, observe: Some(&mut observe), ..Prefill::default() };
    Session::new(engine).prefill(engine, text, how).unwrap();
    all
}

#[test]
fn one_digest_for_every_size_thread_count_and_reader() {
    let text = text(41);
    let want = all_logits(&mut demo_engine(&[]), &text, None);
    let cases: [(&[&str], Option<usize>); 12] = [
        (&["trunk.pinned=all", "trunk.head=pinned", "experts.cache=64 MiB"], None),
        (&["trunk.pinned=0", "trunk.ring_slots=1", "experts.cache=0", "experts.staging_slots=1"], None),
        (&["trunk.pinned=0", "trunk.ring_slots=2", "trunk.block=4 KiB"], Some(1)),
        (&["trunk.block=1 MiB", "experts.policy=lru"], Some(5)),
        (&["experts.policy=layer-lru", "experts.cache=1 MiB"], Some(16)),
        (&["reader.engine=pread", "reader.direct=off", "reader.depth=1"], Some(7)),
        (&["reader.engine=pread", "reader.direct=auto", "reader.depth=16"], Some(7)),
        (&["compute.threads=1", "pass.tokens=64"], None),
        (&["compute.threads=2", "compute.pin_threads=false"], Some(3)),
        (&["compute.threads=3"], Some(2)),
        (&["compute.threads=4", "trunk.ring_slots=1"], Some(11)),
        (&["compute.isa=scalar"], Some(16)),
    ];
    for (overrides, chunk) in cases {
        let got = all_logits(&mut demo_engine(overrides), &text, chunk);
        assert!(got == want, "{overrides:?} in chunks of {chunk:?}");
    }
}

#[test]
fn a_long_prompt_in_one_pass_gives_the_bits_of_short_chunks() {
    let text = text(150);
    for model in ["k3-tiny-a", "k3-tiny-b"] {
        let last = [16, 64, 150].map(|tokens| {
            let preset = Preset::load("demo", &[format!("pass.tokens={tokens}")]).unwrap();
            let mut engine = preset_engine(&preset, &golden_model(model));
            let mut session = Session::new(&engine);
            let row = bits(session.prefill(&mut engine, &text, Prefill::default()).unwrap().data());
            assert_eq!(engine.stats().prefill.passes, 150_u64.div_ceil(tokens));
            row
        });
        assert!(last[1..].iter().all(|row| *row == last[0]), "{model}");
    }
}

#[test]
fn every_built_in_preset_gives_the_same_bits() {
    let text = text(19);
    let want = all_logits(&mut demo_engine(&[]), &text, None);
    for name in ["pocket", "laptop", "auto"] {
        let small = ["context.tokens=1024".to_owned(), "memory.budget=700 MB".to_owned()];
        let preset = Preset::load(name, &small).unwrap();
        let mut engine = preset_engine(&preset, &golden_model("k3-tiny-a"));
        assert!(all_logits(&mut engine, &text, None) == want, "{name}");
    }
}

#[test]
fn decoding_drafting_and_recomputing_give_the_bits_of_a_prefill() {
    let text = text(24);
    let mut engine = demo_engine(&[]);
    let vocab = engine.config().vocab;
    let want = all_logits(&mut engine, &text, None);
    let row = |i: usize| &want[i * vocab..(i + 1) * vocab];
    let mut session = Session::new(&engine);
    session.prefill(&mut engine, &text[..10], Prefill::default()).unwrap();
    for (i, &token) in text.iter().enumerate().take(14).skip(10) {
        let logits = session.decode(&mut engine, token).unwrap();
        assert!(bits(logits.data()) == row(i), "token {i}");
    }
    for (first, accepted) in [(14, 0), (14, 2), (16, 4), (20, 1)] {
        let mut draft = text[first..first + 4].to_vec();
        draft[accepted..].fill(TokenId(200));
        let logits = session.draft(&mut engine, &draft).unwrap();
        for i in 0..accepted {
            assert!(bits(logits.row(i).unwrap()) == row(first + i), "draft from {first}, token {i}");
        }
        session.commit(&mut engine, accepted).unwrap();
        assert_eq!(session.tokens(), &text[..first + accepted]);
    }
    let logits = session.prefill(&mut engine, &text[21..], Prefill::default()).unwrap();
    assert!(bits(logits.data()) == row(23));
    assert_eq!(session.tokens(), text);
    assert!(bits(session.recompute(&mut engine, Some(5)).unwrap().data()) == row(23));
}

#[test]
fn a_saved_state_goes_on_as_if_never_interrupted() {
    let text = text(20);
    let mut engine = demo_engine(&[]);
    let mut session = Session::new(&engine);
    session.prefill(&mut engine, &text[..13], Prefill::default()).unwrap();
    let saved: Vec<Vec<f32>> = session.state().slices().map(<[f32]>::to_vec).collect();
    let want = bits(session.prefill(&mut engine, &text[13..], Prefill::default()).unwrap().data());

    let mut other = Session::new(&engine);
    other.prefill(&mut engine, &text[5..9], Prefill::default()).unwrap();
    let mut slices = saved.iter();
    other
        .restore(&text[..13], |slice| {
            slice.copy_from_slice(slices.next().ok_or(())?);
            Ok::<(), ()>(())
        })
        .unwrap();
    let got = bits(other.prefill(&mut engine, &text[13..], Prefill::default()).unwrap().data());
    assert!(got == want);
}

#[test]
fn refusals_come_before_any_work_and_leave_the_session_as_it_was() {
    let text = text(12);
    let mut engine = demo_engine(&["context.tokens=16"]);
    let mut session = Session::new(&engine);
    session.prefill(&mut engine, &text, Prefill::default()).unwrap();
    let passes = engine.stats().prefill.passes;
    let refused = |session: &mut Session, engine: &mut Engine, ids: &[TokenId]| {
        session.prefill(engine, ids, Prefill::default()).map(|_| ()).unwrap_err()
    };
    assert!(matches!(refused(&mut session, &mut engine, &[]), RunError::NoTokens));
    let unknown = refused(&mut session, &mut engine, &[text[0], TokenId(256)]);
    assert!(matches!(unknown, RunError::UnknownToken { id: TokenId(256), vocab: 256 }));
    let full = refused(&mut session, &mut engine, &text[..5]);
    assert!(matches!(full, RunError::ContextFull { have: 12, more: 5, context: 16 }), "{full}");
    let long = session.draft(&mut engine, &[TokenId(1); 5]).map(|_| ()).unwrap_err();
    assert!(matches!(long, RunError::ContextFull { .. } | RunError::DraftTooLong { .. }), "{long}");
    assert!(matches!(session.commit(&mut engine, 1), Err(RunError::CommitTooLong { .. })));
    assert_eq!((session.tokens(), engine.stats().prefill.passes), (&text[..], passes));
    session.prefill(&mut engine, &text[..4], Prefill::default()).unwrap();
}

#[test]
fn cancelling_ends_a_pass_and_says_what_became_of_the_session() {
    let text = text(9);
    let mut engine = demo_engine(&[]);
    let want = all_logits(&mut engine, &text, None);
    let cancel = engine.cancel_flag();
    let mut session = Session::new(&engine);
    session.prefill(&mut engine, &text[..4], Prefill::default()).unwrap();

    cancel.store(true, Ordering::SeqCst);
    // A draft leaves the state alone, whatever becomes of it.
    assert!(matches!(session.draft(&mut engine, &text[4..6]), Err(RunError::Cancelled)));
    cancel.store(false, Ordering::SeqCst);
    assert_eq!(session.len(), 4);
    session.draft(&mut engine, &text[4..6]).unwrap();
    session.commit(&mut engine, 2).unwrap();

    cancel.store(true, Ordering::SeqCst);
    assert!(matches!(session.decode(&mut engine, text[6]), Err(RunError::Cancelled)));
    cancel.store(false, Ordering::SeqCst);
    assert!(matches!(session.decode(&mut engine, text[6]), Err(RunError::Damaged)));
    session.clear();
    let logits = session.prefill(&mut engine, &text, Prefill::default()).unwrap();
    assert!(want.ends_with(&bits(logits.data())));
}

#[test]
fn a_scale_byte_that_is_no_number_is_named() {
    let preset = Preset::load("demo", &[]).unwrap();
    let mut engine = preset_engine(&preset, &golden_model("k3-tiny-nan"));
    let mut session = Session::new(&engine);
    let ids: Vec<TokenId> = (1..30).map(TokenId).collect();
    let error = session.prefill(&mut engine, &ids, Prefill::default()).map(|_| ()).unwrap_err();
    let named = error.to_string();
    assert!(named.contains("weight_scale") && named.contains("255"), "{named}");
}
