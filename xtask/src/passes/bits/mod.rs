//! One text in every way: whatever the chunks, the guesses, the neighbours, the saves and the readers, its
//! logits have the same bits.

mod say;

use std::time::Instant;

use k3_pipeline::engine::Engine;
use k3_pipeline::model::tensors::{Fingerprint, ModelTensors};
use k3_pipeline::speculate::Drafter;
use k3_pipeline::store::StoreOptions;
use serde::Serialize;

use super::guesser::{ALWAYS, Guesser, NEVER, SOMETIMES};
use super::{Goal, Model};
use crate::verify::digest;
use say::{Said, Task, generate, joined, read, resumed, together};

/// Tokens of the prompt, and tokens generated after it; all but the last of them are read, too.
const PROMPT: usize = 12;
const GENERATED: usize = 7;

/// Every engine: room for three sequences and for the whole text in one pass, logits of all its tokens.
const COMMON: [&str; 5] = [
    "context.tokens=64",
    "context.sequences=3",
    "context.snapshots=0",
    "pass.tokens=32",
    "pass.draft_tokens=5",
];
const IN_MEMORY: [&str; 3] = ["trunk.pinned=all", "trunk.head=pinned", "experts.cache=fit"];
/// From disk, with as little as possible in memory; each with the chunks it reads the text in.
const FROM_DISK: [(&str, &[&str], usize); 2] = [
    (
        "streamed through one slot, no cache",
        &[
            "trunk.pinned=0",
            "trunk.head=streamed",
            "trunk.ring_slots=1",
            "experts.cache=0",
            "experts.staging_slots=1",
        ],
        32,
    ),
    (
        "one layer pinned, buffered reads, 1 thread",
        &[
            "trunk.pinned=1",
            "trunk.head=streamed",
            "experts.cache=0",
            "reader.engine=pread",
            "reader.direct=off",
            "compute.threads=1",
        ],
        7,
    ),
];

/// What was compared.
#[derive(Serialize)]
pub(super) struct Bits {
    prompt_tokens: usize,
    text_tokens: usize,
    ways: Vec<Way>,
}

/// One way to the logits.
#[derive(Serialize)]
struct Way {
    what: String,
    rows: usize,
    digest: String,
    passes: u64,
    seconds: f64,
    /// Whether the bits are those of the way it is compared with.
    is_same: bool,
}

impl Bits {
    /// The ways that differ.
    pub(super) fn different(&self) -> Vec<&str> {
        self.ways.iter().filter(|way| !way.is_same).map(|way| way.what.as_str()).collect()
    }

    pub(super) fn goal(&self) -> Goal {
        let same = self.ways.len() - self.different().len();
        Goal::at_least("ways that give the same bits", same as f64, self.ways.len() as f64)
    }

    pub(super) fn text(&self) -> String {
        let head = format!("a text of {}, {} of them the prompt", self.text_tokens, self.prompt_tokens);
        [head].into_iter().chain(self.ways.iter().map(Way::text)).collect::<Vec<_>>().join("\n")
    }
}

impl Way {
    fn text(&self) -> String {
        let Self { what, rows, digest, passes, seconds, is_same } = self;
        let verdict = if *is_same { "same" } else { "DIFFERENT" };
        format!("{verdict:<9} {digest}  {rows:>3} rows {passes:>3} passes {seconds:>6.1} s  {what}")
    }
}

/// Takes every way and compares it with plain decoding.
pub(super) fn measure(model: &Model) -> anyhow::Result<Bits> {
    let vocab = model.config.vocab;
    let task = Task { prompt: model.ids(PROMPT), temperature: 0.0, count: GENERATED };
    let (mut engine, fingerprint) = open(model, &IN_MEMORY)?;
    let mut ways = Ways::default();
    let plain = ways.first("prompt in one pass, then token by token", &mut engine, |engine| {
        generate(engine, &task, None)
    })?;
    let text = [&task.prompt[..], &plain.ids[..GENERATED - 1]].concat();
    for chunk in [text.len(), 5, 3, 1] {
        let what = format!("read in chunks of {chunk}");
        ways.take(what, &mut engine, &plain, |engine| read(engine, &text, chunk, &plain))?;
    }
    for (right, what) in
        [(ALWAYS, "guesses always right"), (NEVER, "guesses always wrong"), (SOMETIMES, "random guesses")]
    {
        let drafter = guesser(&task, &plain, (vocab, right));
        ways.take(what, &mut engine, &plain, |engine| generate(engine, &task, drafter))?;
    }
    for position in 1..text.len() {
        let what = format!("saved after {position}, resumed");
        ways.take(what, &mut engine, &plain, |engine| {
            resumed(engine, (&text, position), fingerprint, &plain)
        })?;
    }
    share(&mut ways, &mut engine, model, &task)?;
    drop(engine);
    for (what, sets, chunk) in FROM_DISK {
        let (mut engine, _) = open(model, sets)?;
        ways.take(what, &mut engine, &plain, |engine| read(engine, &text, chunk, &plain))?;
    }
    Ok(Bits { prompt_tokens: PROMPT, text_tokens: text.len(), ways: ways.0 })
}

/// Three sequences of unequal lengths, alone and together, without and with guesses.
fn share(ways: &mut Ways, engine: &mut Engine, model: &Model, task: &Task) -> anyhow::Result<()> {
    let vocab = model.config.vocab;
    let ids = model.ids(PROMPT + 9);
    let tasks = [
        task.clone(),
        Task { prompt: ids[PROMPT..].to_vec(), temperature: 0.8, count: 4 },
        Task { prompt: ids[3..4].to_vec(), temperature: 1.2, count: 6 },
    ];
    let mut each = Vec::new();
    let alone = ways.first("three sequences, each alone", engine, |engine| {
        for task in &tasks {
            let mut said = generate(engine, task, None)?;
            // A batch gives the rows that tokens are chosen from.
            said.rows.drain(..(task.prompt.len() - 1) * vocab);
            each.push(said);
        }
        Ok(joined(&each))
    })?;
    ways.take("the three together, entering one after the other", engine, &alone, |engine| {
        together(engine, &tasks, |_| None)
    })?;
    ways.take("the same with right, wrong and random guesses", engine, &alone, |engine| {
        together(engine, &tasks, |i| guesser(&tasks[i], &each[i], (vocab, [ALWAYS, NEVER, SOMETIMES][i])))
    })
}

fn guesser(task: &Task, said: &Said, (vocab, right): (usize, u64)) -> Option<Box<dyn Drafter>> {
    Some(Box::new(Guesser::new([&task.prompt[..], &said.ids].concat(), vocab, right)))
}

/// The ways so far.
#[derive(Default)]
struct Ways(Vec<Way>);

impl Ways {
    /// A way that others are compared with.
    fn first(
        &mut self,
        what: &str,
        engine: &mut Engine,
        way: impl FnOnce(&mut Engine) -> anyhow::Result<Said>,
    ) -> anyhow::Result<Said> {
        self.run(what.to_owned(), engine, None, way)
    }

    fn take(
        &mut self,
        what: impl Into<String>,
        engine: &mut Engine,
        want: &Said,
        way: impl FnOnce(&mut Engine) -> anyhow::Result<Said>,
    ) -> anyhow::Result<()> {
        self.run(what.into(), engine, Some(want), way).map(drop)
    }

    fn run(
        &mut self,
        what: String,
        engine: &mut Engine,
        want: Option<&Said>,
        way: impl FnOnce(&mut Engine) -> anyhow::Result<Said>,
    ) -> anyhow::Result<Said> {
        let passes = |engine: &Engine| {
            let stats = engine.stats();
            stats.prefill.passes + stats.decode.passes
        };
        let (before, started) = (passes(engine), Instant::now());
        let said = way(engine)?;
        let way = Way {
            what,
            rows: said.rows.len() / engine.config().vocab,
            digest: digest(&said.rows),
            passes: passes(engine) - before,
            seconds: started.elapsed().as_secs_f64(),
            is_same: want.is_none_or(|want| said.has_bits_of(want)),
        };
        // Minutes pass on a wide model.
        eprintln!("way {}: {}", self.0.len() + 1, way.what);
        self.0.push(way);
        Ok(said)
    }
}

fn open(model: &Model, sets: &[&str]) -> anyhow::Result<(Engine, Fingerprint)> {
    let sets: Vec<String> = COMMON.iter().chain(sets).map(|&set| set.to_owned()).collect();
    let plan = model.plan(&sets)?;
    let opened = ModelTensors::open(&model.dir, &[])?;
    let fingerprint = opened.1.fingerprint;
    Ok((Engine::open(opened, plan, &StoreOptions::default(), &mut |_, _| ())?, fingerprint))
}

#[cfg(test)]
mod tests {
    use k3_pipeline::units::TokenId;

    use super::*;

    #[test]
    fn golden_models_say_the_same_in_every_way() {
        for name in ["k3-tiny-a", "k3-tiny-b"] {
            let model = Model::open(k3_golden::golden_dir().join("models").join(name)).unwrap();
            let bits = measure(&model).unwrap();
            assert!(bits.different().is_empty(), "{name}: {}", bits.text());
            assert_eq!((bits.ways.len(), bits.text_tokens), (1 + 4 + 3 + 17 + 3 + 2, 18));
            // Right guesses save passes, wrong ones do not.
            let passes = |what: &str| bits.ways.iter().find(|way| way.what == what).map(|way| way.passes);
            assert_eq!(
                (passes("guesses always right"), passes("guesses always wrong")),
                (Some(3), Some(7)),
                "{name}"
            );
        }
    }

    #[test]
    fn one_bit_is_a_difference() {
        let said = Said { ids: vec![TokenId(1)], rows: vec![1.0, 0.0] };
        let mut other = said.clone();
        assert!(said.has_bits_of(&other));
        other.rows[1] = -0.0;
        assert!(!said.has_bits_of(&other));
        let way = |is_same| Way {
            what: "x".into(),
            rows: 1,
            digest: String::new(),
            passes: 1,
            seconds: 0.0,
            is_same,
        };
        let bits = Bits { prompt_tokens: 1, text_tokens: 1, ways: vec![way(true), way(false)] };
        assert_eq!((bits.different(), bits.goal().is_met), (vec!["x"], false));
    }
}
