//! `cargo xtask passes`: what a pass of many tokens costs beside one of a single token. Prompts, drafts and
//! memory, on a wide model whose trunk comes through a reader with the speed of a given disk; and that
//! however a text is cut into passes, its logits have the same bits.

mod bits;
mod drafts;
mod guesser;
mod memory;
mod prefill;

use std::path::PathBuf;

use anyhow::{Context, anyhow};
use k3_pipeline::machine::Machine;
use k3_pipeline::model::config::ModelConfig;
use k3_pipeline::model::tensors::ModelTensors;
use k3_pipeline::plan::{ModelShape, Plan, plan};
use k3_pipeline::preset::Preset;
use k3_pipeline::units::{Rate, TokenId};
use serde::Serialize;

use crate::Failure;
use crate::run_k3::{self, K3};

/// Arguments of `cargo xtask passes`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask synth && cargo xtask passes --disk 1GB/s
  cargo xtask passes --model golden/models/k3-tiny-a --disk 20MB/s --prompt 64 --only drafts
  cargo xtask passes --json --only prefill
  cargo xtask passes --only bits

Each figure stands beside its goal. Without --model, the model of `cargo xtask synth`.
Exit codes: 0 measured; 1 could not run; 2 usage; 3 bits differ.")]
pub(crate) struct Args {
    /// The model to measure with.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// How fast the trunk and the experts are read.
    #[arg(long, value_name = "RATE", default_value = "1GB/s")]
    disk: Rate,
    /// Tokens of the prompt.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u16).range(32..=2048))]
    prompt: u16,
    /// Tokens generated with drafts.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(8..=512))]
    tokens: u16,
    /// One part alone.
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// A part of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// One text in every way: chunks, guesses, batches, sessions, readers; unthrottled.
    Bits,
    /// Bytes and time of a prompt.
    Prefill,
    /// What guesses gain and cost.
    Drafts,
    /// Peak memory beside the plan's figure.
    Memory,
}

/// What was measured.
#[derive(Default, Serialize)]
struct Report {
    model: String,
    disk_bytes_per_second: u64,
    prefill: Option<prefill::Prefill>,
    drafts: Option<drafts::Drafts>,
    memory: Option<Vec<memory::Peak>>,
    bits: Option<bits::Bits>,
    goals: Vec<Goal>,
}

impl Report {
    fn print(&self) {
        println!("model {}, disk {} bytes per second", self.model, self.disk_bytes_per_second);
        self.bits.iter().for_each(|found| println!("{}", found.text()));
        self.prefill.iter().for_each(|found| println!("{}", found.text()));
        self.drafts.iter().for_each(|found| println!("{}", found.text()));
        self.goals.iter().for_each(|goal| println!("{}", goal.text()));
    }
}

/// A figure and what it should be.
#[derive(Serialize)]
struct Goal {
    what: String,
    found: f64,
    wanted: f64,
    /// Whether more is better.
    at_least: bool,
    is_met: bool,
}

impl Goal {
    fn at_least(what: &str, found: f64, wanted: f64) -> Self {
        Self { what: what.to_owned(), found, wanted, at_least: true, is_met: found >= wanted }
    }

    fn at_most(what: &str, found: f64, wanted: f64) -> Self {
        Self { what: what.to_owned(), found, wanted, at_least: false, is_met: found <= wanted }
    }

    fn text(&self) -> String {
        let Self { what, found, wanted, .. } = self;
        let (bound, met) =
            (if self.at_least { "at least" } else { "at most" }, if self.is_met { "met" } else { "MISSED" });
        format!("{met:<7} {what}: {found:.4}, goal {bound} {wanted}")
    }
}

/// The model to measure with.
struct Model {
    dir: PathBuf,
    config: ModelConfig,
    shape: ModelShape,
}

impl Model {
    fn open(dir: PathBuf) -> anyhow::Result<Self> {
        let (config, tensors) = ModelTensors::open(&dir, &[])
            .with_context(|| format!("{} (made by `cargo xtask synth`)", dir.display()))?;
        let shape = ModelShape::from_tensors(&config, &tensors);
        Ok(Self { dir, config, shape })
    }

    fn plan(&self, sets: &[String]) -> anyhow::Result<Plan> {
        Ok(plan(&Preset::load("auto", sets)?, &self.config, &self.shape, &Machine::detect()?)?)
    }

    /// Arguments of a `k3 generate` with a preset and changes of it; the logits stay where they are, so that
    /// a prompt is read in the chunks of the plan.
    fn generate(
        &self,
        (preset, sets): (&str, &[String]),
        prompt: usize,
        tokens: usize,
        throttle: Option<Rate>,
    ) -> Vec<String> {
        let ids: Vec<String> = self.ids(prompt).iter().map(ToString::to_string).collect();
        let mut args = vec!["generate".to_owned(), "--json".into()];
        let mut option = |name: &str, value: String| args.extend([format!("--{name}"), value]);
        option("preset", preset.to_owned());
        option("model", self.dir.display().to_string());
        option("ids", ids.join(","));
        option("max-tokens", tokens.to_string());
        sets.iter().for_each(|set| option("set", set.clone()));
        if let Some(rate) = throttle {
            option("throttle", format!("{}B/s", rate.0.0));
        }
        args
    }

    /// Ids that do not repeat themselves.
    fn ids(&self, count: usize) -> Vec<TokenId> {
        let id = |i: usize| (i * i * 31 + 17 * i + 5) % self.config.vocab;
        (0..count).map(|i| TokenId(u32::try_from(id(i)).unwrap_or_default())).collect()
    }
}

/// Changes of the preset: nothing of the model stays in memory.
fn streamed(pass_tokens: usize, draft_tokens: usize) -> Vec<String> {
    [
        "trunk.pinned=0".to_owned(),
        "trunk.head=streamed".into(),
        "experts.cache=0".into(),
        "context.snapshots=0".into(),
        format!("pass.tokens={pass_tokens}"),
        format!("pass.draft_tokens={draft_tokens}"),
    ]
    .into()
}

/// Measures.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let wants = |part| args.only.is_none_or(|only| only == part);
    let stop = run_k3::stop_flag()?;
    let model = Model::open(args.model.clone().unwrap_or_else(|| crate::root().join("target/synth")))?;
    let mut report = Report {
        model: model.dir.display().to_string(),
        disk_bytes_per_second: args.disk.0.0,
        ..Report::default()
    };
    if wants(Part::Bits) {
        let found = bits::measure(&model)?;
        report.goals.push(found.goal());
        report.bits = Some(found);
    }
    if wants(Part::Drafts) {
        let found = drafts::measure(&model, args)?;
        report.goals.extend(found.goals());
        report.drafts = Some(found);
    }
    if wants(Part::Prefill) || wants(Part::Memory) {
        let k3 = K3::build(stop)?;
        if wants(Part::Prefill) {
            let found = prefill::measure(&k3, &model, args)?;
            report.goals.extend(found.goals());
            report.prefill = Some(found);
        }
        if wants(Part::Memory) {
            let found = memory::measure(&k3, &model, args)?;
            report.goals.extend(found.iter().map(memory::Peak::goal));
            report.memory = Some(found);
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        report.print();
    }
    match report.bits.as_ref().map(bits::Bits::different) {
        Some(different) if !different.is_empty() => {
            Err(Failure::Verification(anyhow!("other bits: {}", different.join("; "))))
        }
        _ => Ok(()),
    }
}
