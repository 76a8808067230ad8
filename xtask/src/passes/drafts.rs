//! What guesses gain where they are right, and cost where they are wrong.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use k3_kernel::Kernels;
use k3_pipeline::engine::Engine;
use k3_pipeline::generation::{Chosen, Generator};
use k3_pipeline::model::tensors::ModelTensors;
use k3_pipeline::sample::{Sampler, SamplingParams};
use k3_pipeline::session::{Prefill, Session};
use k3_pipeline::speculate::{Drafter, Gated, LookupParams, PromptLookup};
use k3_pipeline::store::StoreOptions;
use k3_pipeline::store::reader::PreadReader;
use k3_pipeline::store::throttled::ThrottledReader;
use k3_pipeline::units::TokenId;
use serde::Serialize;

use super::guesser::{ALWAYS, Guesser, NEVER};
use super::{Args, Goal, Model, streamed};

/// Guesses per pass; the decided token goes with them.
const GUESSES: usize = 4;
/// Tokens of the prompt.
const PROMPT: usize = 16;
/// A text that repeats itself: some code, byte by byte, then the same with another name in it.
const CODE: &str = "\
fn mean(values: &[f64]) -> f64 {
    let sum: f64 = values.iter().sum();
    sum / values.len() as f64
}
";
const RENAMED: (&str, &str) = ("values", "xs");

/// What was measured.
#[derive(Serialize)]
pub(super) struct Drafts {
    guesses_per_pass: usize,
    tokens: usize,
    plain_seconds_per_token: f64,
    /// Tokens in the time of one plain pass, with guesses that are always right.
    right_tokens_per_pass_time: f64,
    /// Seconds per token over plain ones, with guesses that are always wrong and never stop.
    wrong_cost: f64,
    /// The same behind the gate.
    wrong_gated_cost: f64,
    /// Tokens after which the gate let no wrong guess through.
    gate_closed_after: usize,
    /// Seconds of plain decoding over those with prompt lookup, for code that is written again with another
    /// name in it.
    lookup_gain: f64,
    lookup_tokens: usize,
    lookup_passes: u64,
}

impl Drafts {
    pub(super) fn goals(&self) -> Vec<Goal> {
        vec![
            Goal::at_least(
                "right guesses: tokens per pass-time of one",
                self.right_tokens_per_pass_time,
                3.3,
            ),
            Goal::at_most("wrong guesses: time over plain decoding", self.wrong_cost, 1.25),
            Goal::at_most("wrong guesses: tokens until the gate closes", self.gate_closed_after as f64, 16.0),
            Goal::at_least("prompt lookup on an edit: gain", self.lookup_gain, 1.0),
        ]
    }

    pub(super) fn text(&self) -> String {
        format!(
            "plain {:.3} s per token; {} guesses per pass: right {:.2} tokens per pass-time, wrong {:.3} times \
             the time, behind the gate {:.3}; lookup on an edit: {} tokens in {} passes, {:.2} times as fast",
            self.plain_seconds_per_token,
            self.guesses_per_pass,
            self.right_tokens_per_pass_time,
            self.wrong_cost,
            self.wrong_gated_cost,
            self.lookup_tokens,
            self.lookup_passes,
            self.lookup_gain
        )
    }
}

/// Tokens, and what decoding them took.
struct Decoded {
    ids: Vec<TokenId>,
    seconds: f64,
    passes: u64,
}

/// Measures.
pub(super) fn measure(model: &Model, args: &Args) -> anyhow::Result<Drafts> {
    let mut engine = open(model, args)?;
    let (prompt, tokens) = (model.ids(PROMPT), usize::from(args.tokens));
    let vocab = model.config.vocab;
    let plain = decode(&mut engine, &prompt, tokens, None)?;
    let guesser = |right| Guesser::new([&prompt[..], &plain.ids].concat(), vocab, right);
    let right = decode(&mut engine, &prompt, tokens, Some(Box::new(guesser(ALWAYS))))?;
    let wrong = decode(&mut engine, &prompt, tokens, Some(Box::new(guesser(NEVER))))?;
    let always_wrong = guesser(NEVER);
    let passes_with_guesses = always_wrong.passes();
    let gated = decode(&mut engine, &prompt, tokens, Some(Box::new(Gated::new(always_wrong))))?;
    if [&right, &wrong, &gated].iter().any(|other| other.ids != plain.ids) {
        bail!("guesses changed the text");
    }
    let per_pass = plain.seconds / plain.passes as f64;
    let lookup = edit(&mut engine, vocab)?;
    // One token for each pass with wrong guesses.
    let gate_closed_after = passes_with_guesses.get();
    Ok(Drafts {
        guesses_per_pass: GUESSES,
        tokens,
        plain_seconds_per_token: per_pass,
        right_tokens_per_pass_time: plain.passes as f64 / (right.seconds / per_pass),
        wrong_cost: wrong.seconds / plain.seconds,
        wrong_gated_cost: gated.seconds / plain.seconds,
        gate_closed_after,
        lookup_gain: lookup.ids.len() as f64 * per_pass / lookup.seconds,
        lookup_tokens: lookup.ids.len(),
        lookup_passes: lookup.passes,
    })
}

fn open(model: &Model, args: &Args) -> anyhow::Result<Engine> {
    let plan = model.plan(&streamed(64, GUESSES + 1))?;
    let reader = ThrottledReader::new(Arc::new(PreadReader), args.disk.0.0 as f64, Duration::ZERO);
    let options = StoreOptions { reader: Some(Arc::new(reader)), trace: None };
    let model = ModelTensors::open(&model.dir, &[])?;
    Ok(Engine::open(model, plan, &options, &mut |_, _| ())?)
}

/// Generates `count` tokens after `prompt`, the most likely ones.
fn decode(
    engine: &mut Engine,
    prompt: &[TokenId],
    count: usize,
    drafter: Option<Box<dyn Drafter>>,
) -> anyhow::Result<Decoded> {
    let sampler = Sampler::new(SamplingParams::default(), engine.config().vocab, Kernels::detect())?;
    let mut generator = Generator::new(sampler, drafter, false);
    let mut session = Session::new(engine);
    let logits = session.prefill(engine, prompt, Prefill::default())?;
    let mut ids = vec![generator.first(logits.last().unwrap_or_default())?.id];
    let before = engine.stats().decode;
    let mut flow = ControlFlow::Continue(ids[0]);
    while let ControlFlow::Continue(decided) = flow {
        let mut emit = |chosen: Chosen<'_>| {
            ids.push(chosen.id);
            let is_last = ids.len() == count;
            Ok::<_, anyhow::Error>(if is_last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        };
        flow = generator.step(engine, &mut session, decided, &mut emit)?;
    }
    let after = engine.stats().decode;
    Ok(Decoded { ids, seconds: after.seconds - before.seconds, passes: after.passes - before.passes })
}

/// Writes the code again with another name, guessing by lookup. What the model would say plays no part: the
/// text is given, and a guess is right where it agrees with it.
fn edit(engine: &mut Engine, vocab: usize) -> anyhow::Result<Decoded> {
    let ids =
        |text: &str| text.bytes().map(|byte| TokenId(u32::from(byte) % vocab as u32)).collect::<Vec<_>>();
    let (prompt, written) = (ids(CODE), ids(&CODE.replace(RENAMED.0, RENAMED.1)));
    let mut drafter = Gated::new(PromptLookup::new(LookupParams::default()));
    let mut session = Session::new(engine);
    session.prefill(engine, &prompt, Prefill::default())?;
    let before = engine.stats().decode;
    let (mut text, mut at) = (prompt, 0);
    while at < written.len() {
        text.push(written[at]);
        let mut fed = vec![written[at]];
        drafter.draft(&text, GUESSES, &mut fed);
        session.draft(engine, &fed)?;
        let right = fed.iter().zip(&written[at..]).take_while(|(a, b)| a == b).count();
        session.commit(engine, right)?;
        drafter.accepted(fed.len() - 1, right - 1);
        text.extend_from_slice(written.get(at + 1..at + right).context("a guess past the end")?);
        at += right;
    }
    let after = engine.stats().decode;
    Ok(Decoded {
        ids: written,
        seconds: after.seconds - before.seconds,
        passes: after.passes - before.passes,
    })
}
