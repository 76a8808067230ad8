//! What a ladder runs: the budgets that fit, and the splits of one of them.

use std::fmt;
use std::path::Path;

use anyhow::bail;
use k3_pipeline::causes::with_causes;
use k3_pipeline::machine::Machine;
use k3_pipeline::model::config::ModelConfig;
use k3_pipeline::model::tensors::ModelTensors;
use k3_pipeline::plan::{ModelShape, Plan, machine_budget_bytes, plan};
use k3_pipeline::preset::{LADDER, MemoryBudget, Preset};
use k3_pipeline::units::Bytes;
use serde::Serialize;

/// Most splits that are tried.
const SPLITS_MAX: usize = 6;

/// What a case varies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The budget; the plan splits it.
    Budget,
    /// The split of one budget.
    Split,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Budget => "budget",
            Self::Split => "split",
        })
    }
}

/// One configuration to run.
#[derive(Clone, Debug)]
pub struct Case {
    pub kind: Kind,
    pub preset: &'static str,
    pub budget: Bytes,
    /// Changes of the preset.
    pub set: Vec<String>,
    /// What the plan makes of it.
    pub pinned_layers: usize,
    pub pinned_head: bool,
    pub expert_slots: usize,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (budget, layers) = (self.budget.human(), self.pinned_layers);
        write!(f, "{} with {layers} layers pinned, {} expert slots", budget, self.expert_slots)
    }
}

/// The cases for a model on this machine.
///
/// # Errors
/// A model that cannot be opened; no budget that fits.
pub fn choose(model: &Path, budgets: &[Bytes], split_at: Option<Bytes>) -> anyhow::Result<Vec<Case>> {
    let (config, tensors) = ModelTensors::open(model, &[])?;
    let planner =
        Planner { shape: ModelShape::from_tensors(&config, &tensors), config, machine: Machine::detect()? };
    planner.choose(budgets, split_at)
}

struct Planner {
    config: ModelConfig,
    shape: ModelShape,
    machine: Machine,
}

impl Planner {
    fn choose(&self, budgets: &[Bytes], split_at: Option<Bytes>) -> anyhow::Result<Vec<Case>> {
        let allowed = machine_budget_bytes(&self.machine);
        let mut budgets = budgets.to_vec();
        budgets.sort_unstable_by_key(|b| b.0);
        budgets.dedup();
        let mut cases = Vec::new();
        for budget in budgets {
            if budget.0 > allowed {
                eprintln!("{}: left out, this machine has {}", budget.human(), Bytes(allowed).human());
                continue;
            }
            match self.case(Kind::Budget, budget, "trunk.pinned=fit") {
                Ok(case) => cases.push(case),
                Err(why) => eprintln!("{}: left out: {}", budget.human(), with_causes(why.as_ref())),
            }
        }
        if cases.is_empty() {
            bail!("none of the budgets fits both this model and this machine");
        }
        let split_at = split_at.unwrap_or(cases[cases.len() / 2].budget);
        if split_at.0 > allowed {
            bail!("--split-at {}: this machine has {}", split_at.human(), Bytes(allowed).human());
        }
        if split_at.0 > 0 {
            cases.extend(self.splits(split_at));
        }
        Ok(cases)
    }

    /// The numbers of pinned layers that leave the rest of `budget` enough, a few of them.
    fn splits(&self, budget: Bytes) -> Vec<Case> {
        let at = |pinned: usize| self.case(Kind::Split, budget, &format!("trunk.pinned={pinned}")).ok();
        let layers = self.config.layers.len();
        let most = (0..=layers).rev().find(|&n| at(n).is_some()).unwrap_or(0);
        let steps = most.clamp(1, SPLITS_MAX - 1);
        let mut numbers: Vec<usize> = (0..=steps).map(|step| step * most / steps).collect();
        numbers.dedup();
        numbers.into_iter().filter_map(at).collect()
    }

    /// The largest built-in preset that is not above `budget`, set to it.
    fn case(&self, kind: Kind, budget: Bytes, pinned: &str) -> anyhow::Result<Case> {
        let preset = rung(budget)?;
        let mut set = vec![format!("memory.budget={} B", budget.0), pinned.to_owned()];
        if kind == Kind::Budget {
            set.push("trunk.head=fit".to_owned());
        }
        let planned = self.plan(preset, &set)?;
        Ok(Case {
            kind,
            preset,
            budget,
            set,
            pinned_layers: planned.trunk.pinned_layers.len(),
            pinned_head: planned.trunk.pinned_head,
            expert_slots: planned.experts.arena_slots.iter().sum(),
        })
    }

    fn plan(&self, preset: &str, set: &[String]) -> anyhow::Result<Plan> {
        Ok(plan(&Preset::load(preset, set)?, &self.config, &self.shape, &self.machine)?)
    }
}

fn rung(budget: Bytes) -> anyhow::Result<&'static str> {
    let mut found = LADDER[0];
    for name in LADDER {
        if matches!(Preset::load(name, &[])?.budget, MemoryBudget::Limit(own) if own.0 <= budget.0) {
            found = name;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    fn planner(available: u64) -> Planner {
        let file = k3_golden::golden_dir().join("k3-dimensions.json");
        let config = k3_pipeline::model::config_json::read_config(&file).unwrap();
        let machine = Machine {
            cores: 4,
            memory_total_bytes: available,
            memory_available_bytes: available,
            cgroup: None,
            page_bytes: 4096,
        };
        Planner { shape: ModelShape::from_config(&config), config, machine }
    }

    #[test]
    fn budgets_take_the_rung_below_and_stay_within_the_machine() {
        let budgets = [16 * GB, GB, 64 * GB, 4 * GB, GB / 4].map(Bytes);
        let cases = planner(20 * GB).choose(&budgets, Some(Bytes(8 * GB))).unwrap();
        let ladder: Vec<(u64, &str)> =
            cases.iter().filter(|c| c.kind == Kind::Budget).map(|c| (c.budget.0 / GB, c.preset)).collect();
        assert_eq!(ladder, [(1, "pocket"), (4, "pocket"), (16, "laptop")]);
        let splits: Vec<&Case> = cases.iter().filter(|c| c.kind == Kind::Split).collect();
        assert!((2..=SPLITS_MAX).contains(&splits.len()));
        assert!(splits.iter().all(|c| c.budget.0 == 8 * GB));
        assert_eq!(splits[0].pinned_layers, 0);
        let falls = |pair: &[&Case]| {
            pair[0].pinned_layers < pair[1].pinned_layers && pair[0].expert_slots > pair[1].expert_slots
        };
        assert!(splits.windows(2).all(falls), "more trunk, fewer experts");
        assert!(planner(GB / 2).choose(&budgets, None).is_err());
        assert!(planner(2 * GB).choose(&budgets, Some(Bytes(8 * GB))).is_err());
        let alone = planner(2 * GB).choose(&budgets, Some(Bytes(0))).unwrap();
        assert!(alone.iter().all(|c| c.kind == Kind::Budget));
    }
}
