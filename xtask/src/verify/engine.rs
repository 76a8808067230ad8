//! Engines over golden models, and how texts are fed to them.

use std::path::Path;

use anyhow::Context;
use k3_golden::Golden;
use k3_pipeline::engine::Engine;
use k3_pipeline::machine::Machine;
use k3_pipeline::model::tensors::ModelTensors;
use k3_pipeline::plan::{ModelShape, plan};
use k3_pipeline::preset::Preset;
use k3_pipeline::session::{Prefill, Progress, Session};
use k3_pipeline::store::StoreOptions;
use k3_pipeline::units::TokenId;

/// Everything in memory, the whole text in one pass.
pub(super) const RESIDENT: &[&str] = &[
    "trunk.pinned=all",
    "trunk.head=pinned",
    "experts.cache=fit",
    "memory.budget=700 MB",
    "pass.tokens=256",
];

/// An engine over `dir` with the settings of preset `demo` and `overrides`.
pub(super) fn open(dir: &Path, overrides: &[&str]) -> anyhow::Result<Engine> {
    let overrides: Vec<String> = overrides.iter().map(|&o| o.to_owned()).collect();
    let preset = Preset::load("demo", &overrides)?;
    let (config, tensors) = ModelTensors::open(dir, &[])?;
    let shape = ModelShape::from_tensors(&config, &tensors);
    let plan = plan(&preset, &config, &shape, &Machine::detect()?)?;
    let options = StoreOptions::default();
    Ok(Engine::open((config, tensors), plan, &options, &mut |_, _| ())?)
}

/// Token ids of tensor `name`.
pub(super) fn ids(golden: &Golden, name: &str) -> anyhow::Result<Vec<TokenId>> {
    let numbers = golden.i32(name)?.data;
    numbers
        .iter()
        .map(|&id| Ok(TokenId(u32::try_from(id).with_context(|| format!("{name}: id {id} is negative"))?)))
        .collect()
}

/// Logits of every position of `text`, [tokens, V].
pub(super) fn prefill(
    engine: &mut Engine,
    text: &[TokenId],
    chunk: Option<usize>,
) -> anyhow::Result<Vec<f32>> {
    let mut all = Vec::new();
    let mut observe = |seen: Progress<'_>| all.extend_from_slice(seen.logits.data());
    let how = Prefill { chunk, all_logits: true, observe: Some(&mut observe), ..Prefill::default() };
    Session::new(engine).prefill(engine, text, how)?;
    Ok(all)
}

/// Number of the largest logit; of equal ones the lowest.
pub(super) fn most_likely(logits: &[f32]) -> TokenId {
    let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
    TokenId(u32::try_from(best).unwrap_or(u32::MAX))
}
