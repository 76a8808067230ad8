//! The engine against itself: whatever the memory, the readers, the threads and the way a text is cut
//! into passes, the logits have the same bits.

use std::path::Path;

use k3_golden::Golden;
use k3_pipeline::engine::Engine;
use k3_pipeline::session::{Prefill, Session};
use k3_pipeline::units::TokenId;

use super::engine::{RESIDENT, ids, open, prefill};
use super::report::Report;

/// From everything in memory to one slot and no cache; each with a chunk size of its own.
const SETTINGS: &[(&str, &[&str], usize)] = &[
    ("1 thread", &["compute.threads=1"], 256),
    ("3 threads", &["compute.threads=3"], 9),
    ("4 threads", &["compute.threads=4"], 13),
    ("scalar", &["compute.isa=scalar"], 16),
    (
        "one slot, no cache",
        &[
            "trunk.pinned=0",
            "trunk.head=streamed",
            "trunk.ring_slots=1",
            "experts.cache=0",
            "experts.staging_slots=1",
        ],
        1,
    ),
    (
        "two slots of 4 KiB",
        &["trunk.pinned=0", "trunk.ring_slots=2", "trunk.block=4 KiB", "experts.cache=0"],
        5,
    ),
    ("half pinned, small arenas", &["trunk.pinned=6", "trunk.ring_slots=3", "experts.cache=200 KiB"], 2),
    (
        "pinned prefix, layer LRU",
        &["trunk.pinned=prefix:4", "experts.policy=layer-lru", "experts.cache=400 KiB"],
        7,
    ),
    ("pinned list, global LRU", &["trunk.pinned=[1, 3]", "experts.policy=lru", "experts.cache=400 KiB"], 3),
    ("threads reading, buffered", &["reader.engine=pread", "reader.direct=off", "trunk.pinned=0"], 11),
    ("threads reading, direct", &["reader.engine=pread", "reader.direct=auto", "trunk.pinned=1"], 4),
    ("depth 1", &["reader.depth=1", "trunk.pinned=0", "experts.cache=0"], 6),
];

/// Checks every setting on the longest prompt of at most 64 tokens and its greedy continuation.
pub(super) fn check(
    dir: &Path,
    golden: &Golden,
    prompts: &[String],
    report: &mut Report,
) -> anyhow::Result<()> {
    let mut text = Vec::new();
    for prompt in prompts {
        let ids_of_prompt = ids(golden, &format!("{prompt}.ids"))?;
        if ids_of_prompt.len() <= 64 {
            text = ids_of_prompt;
            text.extend(ids(golden, &format!("{prompt}.greedy_ids"))?);
        }
    }
    let mut engine = open(dir, RESIDENT)?;
    let want = prefill(&mut engine, &text, None)?;
    let what = format!("{} tokens, digest {}", text.len(), digest(&want));
    let vocab = engine.config().vocab;

    let differences = (1..=text.len()).find_map(|chunk| {
        let found = prefill(&mut engine, &text, Some(chunk));
        found
            .map(|found| difference(&found, &want, vocab).map(|d| format!("chunks of {chunk}: {d}")))
            .transpose()
    });
    report.equal("prefill in every chunk size", &what, differences.transpose()?);
    let found = incremental(&mut engine, &text)?;
    report.equal("token by token", &what, difference(&found, &want, vocab));
    let found = recomputed(&mut engine, &text)?;
    report.equal("recomputed from the start each step", &what, difference(&found, &want, vocab));
    for (name, overrides, chunk) in SETTINGS {
        let mut engine = open(dir, overrides)?;
        let found = prefill(&mut engine, &text, Some(*chunk))?;
        report.equal(*name, &what, difference(&found, &want, vocab));
    }
    Ok(())
}

fn incremental(engine: &mut Engine, text: &[TokenId]) -> anyhow::Result<Vec<f32>> {
    let mut session = Session::new(engine);
    let mut all = Vec::new();
    for id in text {
        all.extend_from_slice(session.decode(engine, *id)?.data());
    }
    Ok(all)
}

fn recomputed(engine: &mut Engine, text: &[TokenId]) -> anyhow::Result<Vec<f32>> {
    let mut all = Vec::new();
    for end in 1..=text.len() {
        let mut session = Session::new(engine);
        all.extend_from_slice(session.prefill(engine, &text[..end], Prefill::default())?.data());
    }
    Ok(all)
}

/// First position whose bits differ.
fn difference(found: &[f32], want: &[f32], vocab: usize) -> Option<String> {
    if found.len() != want.len() {
        return Some(format!("{} rows instead of {}", found.len() / vocab, want.len() / vocab));
    }
    let at = found.iter().zip(want).position(|(f, w)| f.to_bits() != w.to_bits())?;
    let (position, token) = (at / vocab, at % vocab);
    Some(format!("position {position}, token {token}: {:e} instead of {:e}", found[at], want[at]))
}

/// A short name for the bits of `logits`.
pub(crate) fn digest(logits: &[f32]) -> String {
    let bytes: Vec<u8> = logits.iter().flat_map(|v| v.to_le_bytes()).collect();
    k3_golden::sha256_hex(&bytes)[..16].to_owned()
}
