//! `k3 plan`: what a preset takes of this machine, before anything is allocated.

mod compare;
mod map;
mod table;

use std::path::PathBuf;

use anyhow::anyhow;
use k3_pipeline::machine::Machine;
use k3_pipeline::plan::{Plan, Prediction, Rates, plan};
use k3_pipeline::preset::{MemoryBudget, Preset};
use k3_pipeline::units::Rate;
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::output;
use crate::preset_args::{ModelArgs, PlannedModel, PresetArgs, ShardArgs};

/// Arguments of `k3 plan`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 plan --preset demo
  k3 plan --preset laptop --model ~/Kimi-K3 --disk 3.5GB/s
  k3 plan --preset server --config config.json --elsewhere
  k3 plan --compare laptop,server --config config.json --svg memory.svg")]
pub(crate) struct Args {
    #[command(flatten)]
    preset: PresetArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    shards: ShardArgs,
    /// Speed of the disk, as in 3.5GB/s: predicts the time per token.
    #[arg(long, value_name = "RATE", allow_hyphen_values = true)]
    disk: Option<Rate>,
    /// Speed at which the cores read weights from memory, as in 40GB/s: part of the prediction.
    #[arg(long, value_name = "RATE", requires = "disk", allow_hyphen_values = true)]
    memory_rate: Option<Rate>,
    /// Plan for a machine that has the memory the preset asks for, not for this one.
    #[arg(long)]
    elsewhere: bool,
    /// Several presets side by side, for machines that have the memory they ask for.
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',', conflicts_with = "preset")]
    compare: Vec<String>,
    /// Also draw a map of the memory.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A plan with what can be said about its speed.
#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    plan: Plan,
    total_bytes: u64,
    disk_bytes_per_token_max: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    prediction: Option<Prediction>,
    fits_this_machine: bool,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> Outcome {
    if let Some(file) = &args.svg {
        drop(output::place("--svg", file)?);
    }
    let machine = Machine::detect().map_err(Failure::run)?;
    let reports = if args.compare.is_empty() {
        let preset = args.preset.load()?;
        let model = args.model.load(&preset, &args.shards)?;
        vec![report(args, &preset, &model, &machine, args.elsewhere)?]
    } else {
        compared(args, &machine)?
    };
    if let Some(file) = &args.svg {
        let plans: Vec<&Plan> = reports.iter().map(|r| &r.plan).collect();
        output::write_file(file, map::svg(&plans).as_bytes(), output::Existing::Replace)?;
    }
    match &reports[..] {
        _ if args.json && !args.compare.is_empty() => output::print_json(&reports),
        [one] if args.json => output::print_json(one),
        [one] if args.compare.is_empty() => table::print(one),
        many => compare::print(many),
    }
}

fn compared(args: &Args, machine: &Machine) -> Result<Vec<Report>, Failure> {
    let mut reports = Vec::new();
    let mut model = None;
    for name in &args.compare {
        let preset = args.preset.load_as(name)?;
        // One model for all: the one that is given, or the first preset's.
        let known = match model.take() {
            Some(known) => known,
            None => args.model.load(&preset, &args.shards)?,
        };
        reports.push(report(args, &preset, &known, machine, true)?);
        model = Some(known);
    }
    Ok(reports)
}

fn report(
    args: &Args,
    preset: &Preset,
    model: &PlannedModel,
    machine: &Machine,
    elsewhere: bool,
) -> Result<Report, Failure> {
    let shape = model.shape(preset)?;
    let on = |machine: &Machine| plan(preset, &model.config, &shape, machine);
    let is_limited = matches!(preset.budget, MemoryBudget::Limit(_));
    let here = on(machine);
    let fits_this_machine = here.is_ok();
    let plan = match preset.budget {
        // What is free here is all that such a preset asks for.
        MemoryBudget::Auto => here,
        MemoryBudget::Limit(_) if elsewhere => on(&machine.without_limits()),
        MemoryBudget::Limit(_) => here,
    };
    let plan = plan.map_err(|error| {
        let other = is_limited && on(&machine.without_limits()).is_ok();
        let failure = Failure::refused(anyhow!(error));
        if !elsewhere && other {
            failure.hint("--elsewhere plans for a machine that has the memory")
        } else {
            failure
        }
    })?;
    let rates = args.disk.map(|disk| Rates { disk, memory: args.memory_rate });
    Ok(Report {
        total_bytes: plan.ledger.total_bytes(),
        disk_bytes_per_token_max: plan.traffic.disk_bytes_max(),
        prediction: rates.map(|rates| Prediction::new(&plan.traffic, rates)),
        fits_this_machine,
        plan,
    })
}
