//! What a prompt costs: bytes per chunk, time per token beside that of a decoded one, and the arithmetic
//! beside that of the kernels alone.

use anyhow::{Context, anyhow};
use k3_pipeline::model::config::FeedForward;
use k3_pipeline::units::Rate;
use serde::Serialize;
use serde_json::Value;

use super::{Args, Goal, Model, streamed};
use crate::bench;
use crate::run_k3::K3;

/// Tokens decoded after the prompt, and fed.
const DECODED: usize = 4;

/// What was measured.
#[derive(Serialize)]
pub(super) struct Prefill {
    prompt_tokens: usize,
    chunks: Vec<Chunks>,
    /// Of the largest chunk: seconds per prompt token over seconds per decoded token.
    prompt_token_cost: f64,
    compute: Option<Compute>,
}

/// One run from the throttled disk.
#[derive(Serialize)]
struct Chunks {
    chunk_tokens: usize,
    prompt_passes: u64,
    decode_passes: u64,
    /// Bytes of trunk and head that all passes read, and those left in the ring for the next.
    trunk_bytes_read: u64,
    /// What one reading of trunk (and head, where it is needed) per pass comes to.
    trunk_bytes_of_passes: u64,
    prompt_seconds_per_token: f64,
    decode_seconds_per_token: f64,
}

/// The arithmetic of the prompt with everything in memory.
#[derive(Serialize)]
struct Compute {
    gflops: f64,
    kernel_gflops: f64,
    share: f64,
}

impl Prefill {
    pub(super) fn goals(&self) -> Vec<Goal> {
        let mut goals: Vec<Goal> = self
            .chunks
            .iter()
            .map(|c| {
                let times = c.trunk_bytes_read as f64 / c.trunk_bytes_of_passes as f64;
                Goal::at_most(&format!("chunks of {}: trunk read per pass", c.chunk_tokens), times, 1.05)
            })
            .collect();
        goals.push(Goal::at_most("prompt token over decoded token", self.prompt_token_cost, 1.0 / 50.0));
        goals
            .extend(self.compute.iter().map(|c| Goal::at_least("GFLOP/s of the kernels' own", c.share, 0.6)));
        goals
    }

    pub(super) fn text(&self) -> String {
        let mut lines: Vec<String> = self
            .chunks
            .iter()
            .map(|c| {
                format!(
                    "prompt of {} in chunks of {}: {} passes, {:.4} s per token; decode {:.3} s per token; trunk read {} of {} bytes",
                    self.prompt_tokens,
                    c.chunk_tokens,
                    c.prompt_passes,
                    c.prompt_seconds_per_token,
                    c.decode_seconds_per_token,
                    c.trunk_bytes_read,
                    c.trunk_bytes_of_passes
                )
            })
            .collect();
        lines.push(match &self.compute {
            Some(c) => format!("in memory: {:.1} GFLOP/s; kernels alone {:.1}", c.gflops, c.kernel_gflops),
            None => "in memory: not measured, the model does not fit".to_owned(),
        });
        lines.join("\n")
    }
}

/// Measures with the whole prompt in one chunk, and in four.
pub(super) fn measure(k3: &K3, model: &Model, args: &Args) -> anyhow::Result<Prefill> {
    let tokens = usize::from(args.prompt);
    let chunks = [tokens, tokens.div_ceil(4)]
        .into_iter()
        .map(|chunk| one(k3, model, args, chunk))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let prompt_token_cost = chunks[0].prompt_seconds_per_token / chunks[0].decode_seconds_per_token;
    Ok(Prefill { prompt_tokens: tokens, chunks, prompt_token_cost, compute: compute(k3, model, tokens)? })
}

fn one(k3: &K3, model: &Model, args: &Args, chunk: usize) -> anyhow::Result<Chunks> {
    let sets = streamed(chunk, 0);
    let plan = model.plan(&sets)?;
    let stats = generate(k3, model, &sets, usize::from(args.prompt), Some(args.disk))?;
    let (prompt, decode) = (&stats["prefill"], &stats["decode"]);
    let (prompt_passes, decode_passes) = (count(prompt, "passes")?, count(decode, "passes")?);
    let all = prompt_passes + decode_passes;
    Ok(Chunks {
        chunk_tokens: chunk,
        prompt_passes,
        decode_passes,
        trunk_bytes_read: count(&stats["store"], "trunk_bytes")?,
        // Only the last pass of the prompt needs the head.
        trunk_bytes_of_passes: all * plan.traffic.trunk_bytes + (1 + decode_passes) * plan.traffic.head_bytes,
        prompt_seconds_per_token: number(prompt, "seconds")? / number(prompt, "tokens")?,
        decode_seconds_per_token: number(decode, "seconds")? / number(decode, "tokens")?,
    })
}

/// The prompt with the whole model in memory; `None` where it does not fit.
fn compute(k3: &K3, model: &Model, tokens: usize) -> anyhow::Result<Option<Compute>> {
    let sets: Vec<String> = [
        "trunk.pinned=all".to_owned(),
        "trunk.head=pinned".into(),
        "experts.cache=fit".into(),
        "context.snapshots=0".into(),
        format!("pass.tokens={tokens}"),
    ]
    .into();
    let Ok(plan) = model.plan(&sets) else { return Ok(None) };
    let stats = generate(k3, model, &sets, tokens, None)?;
    let (dense, experts) = flops(model);
    let seconds = number(&stats["prefill"], "seconds")? - number(&stats["prefill"], "waited_seconds")?;
    let gflops = (dense + experts) * tokens as f64 / seconds / 1e9;
    let threads = plan.compute.threads.max(1);
    let rate =
        |kernel| bench::batch_gflops(kernel, threads).ok_or_else(|| anyhow!("no benchmark of {kernel}"));
    let kernel_gflops = (dense + experts) / (dense / rate("bf16_tiled")? + experts / rate("mxfp4")?);
    Ok(Some(Compute { gflops, kernel_gflops, share: gflops / kernel_gflops }))
}

/// Operations of the products of one prompt token, a multiply-add counted as two: trunk, experts.
fn flops(model: &Model) -> (f64, f64) {
    let config = &model.config;
    let trunk = model.shape.matrices.iter().filter(|m| m.layer.is_some());
    let dense: f64 = trunk.map(|m| 2.0 * m.rows as f64 * m.cols as f64).sum();
    let moe = config.layers.iter().filter(|l| l.feed_forward == FeedForward::Moe).count();
    let expert = 3 * config.moe.expert_width * config.expert_io_width();
    (dense, 2.0 * (moe * config.moe.experts_per_token * expert) as f64)
}

/// The statistics of a run.
fn generate(
    k3: &K3,
    model: &Model,
    sets: &[String],
    prompt: usize,
    throttle: Option<Rate>,
) -> anyhow::Result<Value> {
    let mut ended = k3.run(&model.generate(("auto", sets), prompt, DECODED + 1, throttle), None)?;
    Ok(ended.json["stats"].take())
}

fn number(object: &Value, key: &str) -> anyhow::Result<f64> {
    object[key].as_f64().with_context(|| format!("k3's report has no number {key}"))
}

fn count(object: &Value, key: &str) -> anyhow::Result<u64> {
    object[key].as_u64().with_context(|| format!("k3's report has no count {key}"))
}
