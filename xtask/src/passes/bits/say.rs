//! The ways to say a text: read, generated with guesses, resumed, shared.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use anyhow::{anyhow, bail};
use k3_kernel::Kernels;
use k3_pipeline::batch::{Batch, Heard, Request};
use k3_pipeline::engine::Engine;
use k3_pipeline::generation::{Chosen, Generator};
use k3_pipeline::model::tensors::Fingerprint;
use k3_pipeline::sample::{RandomState, Sampler, SamplingParams};
use k3_pipeline::session::{Prefill, Progress, Session};
use k3_pipeline::session_file::{self, SessionMeta};
use k3_pipeline::speculate::Drafter;
use k3_pipeline::units::TokenId;

/// Tokens that were chosen, and rows of logits one after the other.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Said {
    pub(super) ids: Vec<TokenId>,
    pub(super) rows: Vec<f32>,
}

impl Said {
    fn keep(&mut self, chosen: &Chosen<'_>) {
        self.ids.push(chosen.id);
        self.rows.extend_from_slice(chosen.row);
    }

    pub(super) fn has_bits_of(&self, other: &Self) -> bool {
        let bits = |said: &Self| said.rows.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        self.ids == other.ids && bits(self) == bits(other)
    }
}

/// What is to be generated: a prompt and how to choose.
#[derive(Clone)]
pub(super) struct Task {
    pub(super) prompt: Vec<TokenId>,
    pub(super) temperature: f32,
    pub(super) count: usize,
}

impl Task {
    fn generator(&self, vocab: usize, drafter: Option<Box<dyn Drafter>>) -> anyhow::Result<Generator> {
        let params = SamplingParams {
            temperature: self.temperature,
            presence_penalty: 0.1,
            seed: self.prompt.len() as u64,
            ..SamplingParams::default()
        };
        let mut generator = Generator::new(Sampler::new(params, vocab, Kernels::detect())?, drafter, false);
        generator.sampler_mut().begin(&self.prompt)?;
        Ok(generator)
    }
}

pub(super) fn joined(parts: &[Said]) -> Said {
    let ids = parts.iter().flat_map(|said| said.ids.clone()).collect();
    Said { ids, rows: parts.iter().flat_map(|said| said.rows.clone()).collect() }
}

/// Adds `text` to a session; gives the logits of all its tokens.
fn add(
    engine: &mut Engine,
    session: &mut Session,
    text: &[TokenId],
    chunk: Option<usize>,
) -> anyhow::Result<Vec<f32>> {
    let mut rows = Vec::new();
    let mut observe = |seen: Progress<'_>| rows.extend_from_slice(seen.logits.data());
    let how = Prefill { chunk, all_logits: true, observe: Some(&mut observe), tap: None };
    session.prefill(engine, text, how)?;
    Ok(rows)
}

/// The text read in chunks; the tokens are given.
pub(super) fn read(
    engine: &mut Engine,
    text: &[TokenId],
    chunk: usize,
    given: &Said,
) -> anyhow::Result<Said> {
    let mut session = Session::new(engine);
    let rows = add(engine, &mut session, text, Some(chunk))?;
    Ok(Said { ids: given.ids.clone(), rows })
}

/// The text read up to `position`, saved with a draft of other tokens pending, resumed in its place, and read
/// to its end.
pub(super) fn resumed(
    engine: &mut Engine,
    (text, position): (&[TokenId], usize),
    fingerprint: Fingerprint,
    given: &Said,
) -> anyhow::Result<Said> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("text.k3s");
    let mut session = Session::new(engine);
    let mut rows = add(engine, &mut session, &text[..position], None)?;
    session.draft(engine, &text[..2])?;
    let random = RandomState { seed: 0, words: 0 };
    let meta =
        SessionMeta { fingerprint, model: String::new(), prompt_tokens: position, random, notes: Vec::new() };
    session_file::save(&path, &session, &meta)?;
    session_file::resume(&path, &mut session, fingerprint)?;
    if session.tokens() != &text[..position] {
        bail!("{} tokens saved, {} resumed", position, session.len());
    }
    rows.extend(add(engine, &mut session, &text[position..], None)?);
    Ok(Said { ids: given.ids.clone(), rows })
}

/// A prompt in one pass, then its tokens, with guesses where there is a drafter: the rows of all tokens.
pub(super) fn generate(
    engine: &mut Engine,
    task: &Task,
    drafter: Option<Box<dyn Drafter>>,
) -> anyhow::Result<Said> {
    let vocab = engine.config().vocab;
    let mut generator = task.generator(vocab, drafter)?;
    let mut session = Session::new(engine);
    let rows = add(engine, &mut session, &task.prompt, None)?;
    let mut decided = generator.first(&rows[rows.len() - vocab..])?.id;
    let mut said = Said { ids: vec![decided], rows };
    while said.ids.len() < task.count {
        let mut emit = |chosen: Chosen<'_>| {
            said.keep(&chosen);
            let is_last = said.ids.len() == task.count;
            Ok::<_, anyhow::Error>(if is_last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        };
        match generator.step(engine, &mut session, decided, &mut emit)? {
            ControlFlow::Continue(id) | ControlFlow::Break(id) => decided = id,
        }
    }
    Ok(said)
}

/// All tasks in shared passes; each enters when the one before has said something.
pub(super) fn together(
    engine: &mut Engine,
    tasks: &[Task],
    drafter: impl Fn(usize) -> Option<Box<dyn Drafter>>,
) -> anyhow::Result<Said> {
    let vocab = engine.config().vocab;
    let mut batch = Batch::new(engine);
    let mut said: BTreeMap<u64, Said> = BTreeMap::new();
    let (mut next, mut failure) = (0, None);
    while next < tasks.len() || !batch.is_empty() {
        if let Some(task) = tasks.get(next).filter(|_| said.len() == next) {
            let generator = task.generator(vocab, drafter(next))?;
            let (key, prompt, max_tokens) = (next as u64, task.prompt.clone(), task.count);
            batch.enter(engine, Request { key, prompt, max_tokens, generator })?;
            next += 1;
        }
        batch.step(engine, &mut |key, heard| match heard {
            Heard::Token(chosen) => {
                said.entry(key).or_default().keep(&chosen);
                ControlFlow::Continue(())
            }
            Heard::Failed(error) => {
                failure = Some(error);
                ControlFlow::Break(())
            }
        })?;
    }
    match failure {
        Some(error) => Err(anyhow!(error)),
        None => Ok(joined(&said.into_values().collect::<Vec<_>>())),
    }
}
