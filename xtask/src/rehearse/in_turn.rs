//! What computing a token takes where nothing runs beside it. In a sparse checkpoint a read takes processor time
//! and bandwidth of memory, which a disk would not: here reading and computing take turns. How fast memory is
//! read is measured between the passes, for on a machine with neighbours both change from minute to minute.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use k3_pipeline::engine::Engine;
use k3_pipeline::machine::Machine;
use k3_pipeline::model::config::ModelConfig;
use k3_pipeline::model::tensors::ModelTensors;
use k3_pipeline::plan::{ModelShape, Plan, plan};
use k3_pipeline::preset::Preset;
use k3_pipeline::sample::greedy;
use k3_pipeline::session::Session;
use k3_pipeline::store::StoreOptions;
use k3_pipeline::units::{Bytes, TokenId};
use serde::Serialize;

use crate::bench::{self, Read};
use crate::progress::Progress;

/// What is run.
pub(super) struct Run<'a> {
    pub(super) preset: &'a str,
    pub(super) set: &'a [String],
    pub(super) model: &'a Path,
    /// Fed one by one.
    pub(super) prompt: Vec<TokenId>,
    /// As many are generated after it; the last is not fed.
    pub(super) tokens: u32,
    pub(super) stop: Arc<AtomicBool>,
}

impl Run<'_> {
    fn passes(&self) -> usize {
        self.prompt.len() + self.tokens as usize - 1
    }
}

/// What was measured. The figures of a token are medians over the passes.
#[derive(Serialize)]
pub(super) struct InTurn {
    preset: String,
    threads: usize,
    /// Layers that stay in memory, the first ones.
    pinned_layers: usize,
    /// Bytes of weights and state that a token is computed from, wherever they lie.
    touched_bytes_per_token: u64,
    passes: Vec<Pass>,
    compute_seconds_per_token: f64,
    memory_bytes_per_second: f64,
    compute_over_memory: f64,
    prompt_ids: Vec<u32>,
    generated_ids: Vec<u32>,
    /// SHA-256 of the logits of every position fed, as float32.
    logits_digest: String,
}

/// One pass of one token.
#[derive(Serialize)]
struct Pass {
    /// All of it, less its waits for the disk.
    compute_seconds: f64,
    /// How fast as many threads read memory just before and just after it: the mean.
    memory_bytes_per_second: f64,
    /// The computation over reading the touched bytes once at that speed.
    compute_over_memory: f64,
}

impl InTurn {
    pub(super) fn text(&self) -> String {
        format!(
            "preset       {}, {} threads, the first {} layers in memory\n\
             computing    {:.2} s per token, {:.2} times what reading {} from memory takes at {}/s (medians of {} passes)\n\
             ids          {:?} -> {:?}\n\
             logits       sha256 {}",
            self.preset,
            self.threads,
            self.pinned_layers,
            self.compute_seconds_per_token,
            self.compute_over_memory,
            Bytes(self.touched_bytes_per_token).human(),
            Bytes(self.memory_bytes_per_second as u64).human(),
            self.passes.len(),
            self.prompt_ids,
            self.generated_ids,
            self.logits_digest
        )
    }
}

/// Runs the model in this process, one token at a time.
pub(super) fn measure(run: Run<'_>) -> anyhow::Result<InTurn> {
    // Before the plan, which takes what is left.
    let read = Read::new();
    let (config, tensors) = ModelTensors::open(run.model, &[])?;
    if let Some(id) = run.prompt.iter().find(|id| id.0 as usize >= config.vocab) {
        bail!("--ids {}: the model has {} token ids", id.0, config.vocab);
    }
    let plan = in_turn(&run, &config, &ModelShape::from_tensors(&config, &tensors))?;
    if run.passes() > plan.context_tokens {
        bail!("{} tokens are fed, and context.tokens is {}", run.passes(), plan.context_tokens);
    }
    // Nothing is left behind that an orderly end would clear away.
    let stop = Arc::clone(&run.stop);
    thread::spawn(move || {
        while !stop.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(50));
        }
        eprintln!("error: stopped");
        std::process::exit(1);
    });
    let mut progress = None;
    let mut show = |done, total| progress.get_or_insert_with(|| Progress::new("loading", total)).show(done);
    let engine = Engine::open((config, tensors), plan, &StoreOptions::default(), &mut show)?;
    if let Some(progress) = progress {
        progress.finish();
    }
    passes(&run, engine, &read)
}

/// The plan of the preset with one slot for reads of each kind, and what stays in memory in front: nothing can be
/// read while something else is computed.
fn in_turn(run: &Run<'_>, config: &ModelConfig, shape: &ModelShape) -> anyhow::Result<Plan> {
    let one_slot = ["trunk.ring_slots=1", "experts.staging_slots=1"].map(str::to_owned);
    let set = [run.set, &one_slot].concat();
    let machine = Machine::detect()?;
    let planned = |set: &[String]| -> anyhow::Result<Plan> {
        Ok(plan(&Preset::load(run.preset, set)?, config, shape, &machine)?)
    };
    let most = planned(&set)?.trunk.pinned_layers.len();
    // Whole layers can take a little more room than as many that are dealt out block by block.
    let whole = |layers| planned(&[&set[..], &[format!("trunk.pinned=prefix:{layers}")]].concat());
    (0..=most).rev().find_map(|layers| whole(layers).ok()).context("no plan keeps whole layers in front")
}

/// Feeds the prompt and what follows from it.
fn passes(run: &Run<'_>, mut engine: Engine, read: &Read) -> anyhow::Result<InTurn> {
    let mut session = Session::new(&engine);
    let touched = engine.plan().traffic.touched_bytes;
    let threads = engine.plan().compute.threads.max(1);
    let count = run.passes();
    let rate = || bench::read_rate(read, threads);
    let (mut text, mut logits, mut passes) = (run.prompt.clone(), Vec::new(), Vec::new());
    let (mut computed, mut rate_before) = (0.0, rate());
    for i in 0..count {
        let found = session.decode(&mut engine, text[i])?;
        let row = found.last().context("a pass gave no logits")?;
        logits.extend(row.iter().flat_map(|v| v.to_le_bytes()));
        if text.len() == i + 1 {
            text.push(greedy(row));
        }
        let all = engine.stats().decode;
        let compute_seconds = all.seconds - all.waited_seconds - computed;
        computed += compute_seconds;
        let rate_after = rate();
        let pass = Pass::new(compute_seconds, f64::midpoint(rate_before, rate_after), touched);
        rate_before = rate_after;
        eprintln!("pass {} of {count}: {}", i + 1, pass.text());
        passes.push(pass);
    }
    let median = |of: fn(&Pass) -> f64| bench::median(passes.iter().map(of).collect());
    let (plan, numbers) = (engine.plan(), |ids: &[TokenId]| ids.iter().map(|id| id.0).collect());
    Ok(InTurn {
        preset: plan.preset.clone(),
        threads,
        pinned_layers: plan.trunk.pinned_layers.len(),
        touched_bytes_per_token: touched,
        compute_seconds_per_token: median(|pass| pass.compute_seconds),
        memory_bytes_per_second: median(|pass| pass.memory_bytes_per_second),
        compute_over_memory: median(|pass| pass.compute_over_memory),
        prompt_ids: numbers(&text[..run.prompt.len()]),
        generated_ids: numbers(&text[run.prompt.len()..]),
        logits_digest: k3_golden::sha256_hex(&logits),
        passes,
    })
}

impl Pass {
    fn new(compute_seconds: f64, memory_bytes_per_second: f64, touched: u64) -> Self {
        let once = touched as f64 / memory_bytes_per_second;
        Self { compute_seconds, memory_bytes_per_second, compute_over_memory: compute_seconds / once }
    }

    fn text(&self) -> String {
        format!(
            "{:.2} s computing, memory at {}/s, {:.2} times",
            self.compute_seconds,
            Bytes(self.memory_bytes_per_second as u64).human(),
            self.compute_over_memory
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_is_compared_with_reading_its_bytes_once() {
        let pass = Pass::new(3.0, 10e9, 20_000_000_000);
        assert_eq!(pass.compute_over_memory, 1.5);
    }

    /// The preset demo on the demo.
    fn demo<'a>(model: &'a Path, set: &'a [String], prompt: &[u32], tokens: u32) -> Run<'a> {
        let prompt = prompt.iter().map(|&id| TokenId(id)).collect();
        Run { preset: "demo", set, model, prompt, tokens, stop: Arc::default() }
    }

    #[test]
    fn the_tokens_and_logits_do_not_depend_on_where_the_prompt_ends() {
        let model = k3_golden::golden_dir().join("demo");
        let all = measure(demo(&model, &[], &[1, 2], 3)).unwrap();
        assert_eq!((all.passes.len(), all.generated_ids.len()), (4, 3));
        let fewer = measure(demo(&model, &[], &[1, 2, all.generated_ids[0]], 2)).unwrap();
        assert_eq!(fewer.generated_ids, all.generated_ids[1..]);
        assert_eq!(fewer.logits_digest, all.logits_digest);
    }

    #[test]
    fn what_cannot_be_fed_is_refused_before_loading() {
        let model = k3_golden::golden_dir().join("demo");
        let refused =
            |set: &[String], prompt: &[u32]| measure(demo(&model, set, prompt, 6)).err().unwrap().to_string();
        assert!(refused(&[], &[4_000_000_000]).contains("--ids 4000000000"));
        let context = refused(&["context.tokens=4".to_owned()], &[5, 6]);
        assert!(context.contains("7 tokens are fed, and context.tokens is 4"), "{context}");
    }
}
