//! Making the plan: what must be held, then the trunk, then the arenas.

use crate::machine::Machine;
use crate::model::config::{FeedForward, ModelConfig};
use crate::preset::{CacheBudget, HeadPlace, LADDER, MemoryBudget, Pinned, Preset, builtin};
use crate::units::LayerIndex;

use super::memory::{
    BlockSizes, conv_history_bytes, expert_slot_bytes, fixed_lines, kda_state_bytes,
    latent_bytes_per_position, moe_layers, pass_tokens,
};
use super::{
    BudgetSource, ComputePlan, ExpertPlan, Ledger, LedgerLine, MemoryShortage, ModelShape, ModelSizes, Plan,
    PlanError, ReaderPlan, Refusal, Traffic, TrunkPlan,
};

/// Memory left untouched beside a plan when the machine or a cgroup sets the budget: 2 %, within limits.
const HEAD_ROOM_SHARE: u64 = 50;
const HEAD_ROOM_MIN: u64 = 16 << 20;
const HEAD_ROOM_MAX: u64 = 1 << 30;

/// Every size of a run of `config` under `preset` on `machine`.
///
/// Memory goes to what must be held first, then to pinned layers, then to expert arenas: a byte of
/// pinned trunk saves a byte of reading per token, a byte of arena less.
///
/// # Errors
/// Every reason why it cannot run, before anything is allocated; a shortage names what is missing and
/// the smallest built-in preset that fits.
pub fn plan(
    preset: &Preset,
    config: &ModelConfig,
    shape: &ModelShape,
    machine: &Machine,
) -> Result<Plan, PlanError> {
    make(preset, config, shape, machine).map_err(|mut refusals| {
        for refusal in &mut refusals {
            if let Refusal::Memory(shortage) = refusal {
                shortage.fitting = smallest_fitting(shortage.budget_bytes, config, shape, machine);
            }
        }
        PlanError(refusals)
    })
}

/// The first rung of the ladder whose plan stays within `limit`.
fn smallest_fitting(
    limit: u64,
    config: &ModelConfig,
    shape: &ModelShape,
    machine: &Machine,
) -> Option<(&'static str, u64)> {
    LADDER.into_iter().find_map(|name| {
        let text = builtin(name)?.text;
        let preset = Preset::parse(name, name, text).ok()?;
        let plan = make(&preset, config, shape, machine).ok()?;
        let bytes = plan.ledger.total_bytes();
        (bytes <= limit).then_some((name, bytes))
    })
}

/// The plan with the largest pass that leaves room for everything else.
fn make(
    preset: &Preset,
    config: &ModelConfig,
    shape: &ModelShape,
    machine: &Machine,
) -> Result<Plan, Vec<Refusal>> {
    let threads = preset.compute.threads.unwrap_or(machine.cores);
    let budget = budget(preset, machine);
    let stored = BlockSizes::stored(config, shape, preset.trunk.block.0);
    let packed = packed_sizes(preset, config, shape).map_err(|refusal| vec![refusal])?;
    let sizes = (&stored, packed.as_ref().unwrap_or(&stored));
    let mut refusals = Vec::new();
    for tokens in pass_tokens(preset, config, shape, threads, budget.0) {
        match make_with(preset, (config, shape), sizes, budget.clone(), (threads, tokens)) {
            Ok(plan) => return Ok(plan),
            Err(why) => refusals = why,
        }
    }
    Err(refusals)
}

fn make_with(
    preset: &Preset,
    (config, shape): (&ModelConfig, &ModelShape),
    (stored, sizes): (&BlockSizes, &BlockSizes),
    (budget_bytes, budget_from): (u64, BudgetSource),
    (threads, pass_tokens_max): (usize, usize),
) -> Result<Plan, Vec<Refusal>> {
    let mut lines = fixed_lines(preset, config, shape, sizes, (threads, pass_tokens_max))
        .ok_or_else(|| vec![Refusal::Overflow])?;
    let slot_bytes = expert_slot_bytes(shape);
    let fixed: u64 = sum(&lines).ok_or_else(|| vec![Refusal::Overflow])?;
    let least_cache = match preset.experts.cache {
        CacheBudget::Limit(bytes) => {
            let slots = slots_within(bytes.0, slot_bytes, config);
            slots * slot_bytes
        }
        CacheBudget::Fit => 0,
    };
    let trunk = Trunk { preset, sizes };
    let room = budget_bytes.saturating_sub(fixed).saturating_sub(least_cache);
    let choice = trunk.choose(room)?;
    let needed = fixed.saturating_add(least_cache).saturating_add(choice.bytes(sizes));
    if needed > budget_bytes {
        let arenas = LedgerLine { name: "expert arenas".to_owned(), bytes: least_cache };
        lines.extend(choice.lines(sizes).into_iter().chain([arenas]));
        return Err(vec![shortage(preset, needed, (budget_bytes, budget_from), lines)]);
    }
    let cache_bytes = match preset.experts.cache {
        CacheBudget::Limit(_) => least_cache,
        CacheBudget::Fit => budget_bytes - needed,
    };
    let slots = slots_within(cache_bytes, slot_bytes, config);
    lines.splice(0..0, choice.lines(sizes));
    lines.insert(2, LedgerLine { name: "expert arenas".to_owned(), bytes: slots * slot_bytes });
    Ok(Plan {
        preset: preset.name.clone(),
        context_tokens: preset.context.tokens,
        sequences_max: preset.context.sequences,
        snapshots_max: preset.context.snapshots,
        pass_tokens_max,
        draft_tokens_max: preset.pass.draft_tokens,
        traffic: traffic(config, shape, sizes, &choice),
        model: model_sizes(config, shape, stored),
        trunk: TrunkPlan {
            block_bytes: preset.trunk.block.0,
            ring_slots: preset.trunk.ring_slots,
            slot_bytes: sizes.slot_bytes,
            pinned_bytes: choice.bytes(sizes),
            pinned_layers: choice.layers,
            dealt_blocks: choice.dealt,
            pinned_head: choice.head,
            pack: preset.trunk.pack.clone(),
        },
        experts: ExpertPlan {
            slot_bytes,
            arena_slots: arena_slots(config, slots),
            staging_slots: preset.experts.staging_slots,
            policy: preset.experts.policy,
        },
        reader: ReaderPlan {
            engine: preset.reader.engine,
            direct: preset.reader.direct,
            depth: preset.reader.depth,
        },
        compute: ComputePlan {
            threads,
            pin_threads: preset.compute.pin_threads,
            isa: preset.compute.isa.clone(),
        },
        ledger: Ledger { lines, budget_bytes, budget_from },
    })
}

/// Sizes of the blocks in the pack that the preset names, if it names one.
fn packed_sizes(
    preset: &Preset,
    config: &ModelConfig,
    shape: &ModelShape,
) -> Result<Option<BlockSizes>, Refusal> {
    let Some(path) = &preset.trunk.pack else { return Ok(None) };
    let sizes =
        shape.pack.as_ref().and_then(|pack| BlockSizes::packed(config, shape, preset.trunk.block.0, pack));
    sizes.map(Some).ok_or_else(|| Refusal::PackUnknown { path: path.clone() })
}

/// The refusal for want of memory; which preset would fit is found out later.
fn shortage(
    preset: &Preset,
    needed_bytes: u64,
    (budget_bytes, budget_from): (u64, BudgetSource),
    lines: Vec<LedgerLine>,
) -> Refusal {
    let asked_bytes = match preset.budget {
        MemoryBudget::Auto => None,
        MemoryBudget::Limit(bytes) => Some(bytes.0),
    };
    // Less than these there is not.
    let least = |value: &str| matches!(value, "0" | "1" | "\"streamed\"" | "\"fit\"");
    let settings = preset.values().filter_map(|(key, value)| Some((key.path, value?)));
    Refusal::Memory(Box::new(MemoryShortage {
        preset: preset.name.clone(),
        needed_bytes,
        budget_bytes,
        budget_from,
        asked_bytes,
        lines,
        settings: settings.filter(|(_, value)| !least(value)).collect(),
        fitting: None,
    }))
}

fn sum(lines: &[LedgerLine]) -> Option<u64> {
    lines.iter().try_fold(0u64, |total, line| total.checked_add(line.bytes))
}

/// The most that a plan may take on this machine: what is left, less head-room.
#[must_use]
pub fn machine_budget_bytes(machine: &Machine) -> u64 {
    let left = machine.memory_left_bytes();
    let head_room = (left / HEAD_ROOM_SHARE).clamp(HEAD_ROOM_MIN, HEAD_ROOM_MAX);
    left.saturating_sub(head_room)
}

/// The budget that binds, and who set it.
fn budget(preset: &Preset, machine: &Machine) -> (u64, BudgetSource) {
    let allowed = machine_budget_bytes(machine);
    match preset.budget {
        MemoryBudget::Limit(bytes) if bytes.0 <= allowed => (bytes.0, BudgetSource::Preset),
        MemoryBudget::Limit(_) | MemoryBudget::Auto => {
            let source = match &machine.cgroup {
                Some(group) if group.left_bytes() < machine.memory_available_bytes => {
                    BudgetSource::Cgroup { path: group.path.clone() }
                }
                _ => BudgetSource::Machine,
            };
            (allowed, source)
        }
    }
}

/// What of the trunk stays in memory.
struct Choice {
    layers: Vec<LayerIndex>,
    /// What these layers take, dealt out over the blocks of all; empty where they are pinned whole.
    dealt: Vec<bool>,
    head: bool,
}

impl Choice {
    fn layer_bytes(&self, sizes: &BlockSizes) -> u64 {
        self.layers.iter().filter_map(|l| sizes.layer_resident.get(l.index())).sum()
    }

    /// Bytes of the layers that are not read from disk.
    fn saved_bytes(&self, sizes: &BlockSizes) -> u64 {
        if self.dealt.is_empty() {
            return self.layers.iter().filter_map(|l| sizes.layer_stored.get(l.index())).sum();
        }
        let pinned = sizes.layer_blocks.iter().zip(&self.dealt).filter(|&(_, &pinned)| pinned);
        pinned.map(|(&(_, stored), _)| stored).sum()
    }

    fn head_bytes(&self, sizes: &BlockSizes) -> u64 {
        if self.head { sizes.head_resident } else { 0 }
    }

    fn bytes(&self, sizes: &BlockSizes) -> u64 {
        self.layer_bytes(sizes) + self.head_bytes(sizes)
    }

    fn lines(&self, sizes: &BlockSizes) -> [LedgerLine; 2] {
        [
            LedgerLine { name: "pinned layers".to_owned(), bytes: self.layer_bytes(sizes) },
            LedgerLine { name: "pinned head".to_owned(), bytes: self.head_bytes(sizes) },
        ]
    }
}

/// The choice of pinned layers.
struct Trunk<'a> {
    preset: &'a Preset,
    sizes: &'a BlockSizes,
}

impl Trunk<'_> {
    /// The layers and head that the preset pins, using at most `room` bytes where it leaves the number
    /// open.
    fn choose(&self, room: u64) -> Result<Choice, Vec<Refusal>> {
        let total = self.sizes.layer_resident.len();
        let within = |n: u16| {
            if usize::from(n) <= total {
                Ok(usize::from(n))
            } else {
                Err(vec![Refusal::TooManyPinned { wanted: n, layers: total }])
            }
        };
        let head = self.preset.trunk.head;
        let head_first = head == HeadPlace::Pinned;
        let mut choice = Choice { layers: Vec::new(), dealt: Vec::new(), head: head_first };
        choice.layers = match &self.preset.trunk.pinned {
            Pinned::Spread(n) => spread(within(*n)?, total),
            Pinned::Prefix(n) => spread(total, total).into_iter().take(within(*n)?).collect(),
            Pinned::List(layers) => self.listed(layers)?,
            Pinned::All => spread(total, total),
            Pinned::Fit { at_least } => {
                let least = usize::from(*at_least).min(total);
                let room = room.saturating_sub(choice.head_bytes(self.sizes));
                let fits = |n: &usize| {
                    let layers = spread(*n, total);
                    Choice { layers, dealt: Vec::new(), head: false }.bytes(self.sizes) <= room
                };
                spread((least..=total).rev().find(fits).unwrap_or(least), total)
            }
        };
        let is_spread = matches!(self.preset.trunk.pinned, Pinned::Spread(_) | Pinned::Fit { .. });
        if is_spread && (1..total).contains(&choice.layers.len()) {
            choice.dealt = deal(&self.sizes.layer_blocks, choice.layer_bytes(self.sizes));
        }
        if head == HeadPlace::Fit && choice.layers.len() == total {
            choice.head = choice.bytes(self.sizes).saturating_add(self.sizes.head_resident) <= room;
        }
        Ok(choice)
    }

    fn listed(&self, layers: &[u16]) -> Result<Vec<LayerIndex>, Vec<Refusal>> {
        let total = self.sizes.layer_resident.len();
        let missing: Vec<Refusal> = layers
            .iter()
            .filter(|&&layer| usize::from(layer) >= total)
            .map(|&layer| Refusal::NoSuchLayer { layer, layers: total })
            .collect();
        if missing.is_empty() { Ok(layers.iter().copied().map(LayerIndex).collect()) } else { Err(missing) }
    }
}

/// Which of these blocks, given by resident and stored bytes, stay in memory when `room` bytes are dealt out
/// evenly: after any number of blocks the share that stays is that of the whole, but for a block. A layer in
/// memory as a whole would leave the disk idle for as long as it is computed, once the ring is full.
fn deal(blocks: &[(u64, u64)], room: u64) -> Vec<bool> {
    let total: u128 = blocks.iter().map(|&(resident, _)| u128::from(resident)).sum();
    let mut owed = 0;
    let mut take = |&(resident, _): &(u64, u64)| {
        owed += u128::from(resident) * u128::from(room);
        let is_pinned = owed >= u128::from(resident) * total;
        if is_pinned {
            owed -= u128::from(resident) * total;
        }
        is_pinned
    };
    blocks.iter().map(&mut take).collect()
}

/// `count` of `total` layers, evenly spread: the middles of `count` equal parts of the stack.
fn spread(count: usize, total: usize) -> Vec<LayerIndex> {
    (0..count)
        .map(|i| (2 * i + 1) * total / (2 * count))
        .filter_map(|layer| u16::try_from(layer).ok().map(LayerIndex))
        .collect()
}

/// Slots that fit into `bytes`, at most one per expert.
fn slots_within(bytes: u64, slot_bytes: u64, config: &ModelConfig) -> u64 {
    let experts = (moe_layers(config) * config.moe.experts) as u64;
    (bytes / slot_bytes.max(1)).min(experts)
}

/// Slots of each layer: equal among layers with experts; where that leaves a remainder, the layers
/// with one more are spread evenly.
fn arena_slots(config: &ModelConfig, slots: u64) -> Vec<usize> {
    let layers = moe_layers(config).max(1) as u64;
    let mut seen = 0;
    config
        .layers
        .iter()
        .map(|l| match l.feed_forward {
            FeedForward::Dense => 0,
            FeedForward::Moe => {
                let before = seen * slots / layers;
                seen += 1;
                usize::try_from(seen * slots / layers - before).unwrap_or(usize::MAX)
            }
        })
        .collect()
}

fn traffic(config: &ModelConfig, shape: &ModelShape, sizes: &BlockSizes, choice: &Choice) -> Traffic {
    let trunk: u64 = sizes.layer_stored.iter().sum();
    let experts = (moe_layers(config) * config.moe.experts_per_token) as u64 * shape.expert_bytes;
    Traffic {
        trunk_bytes: trunk - choice.saved_bytes(sizes),
        head_bytes: if choice.head { 0 } else { sizes.head_stored },
        expert_bytes_max: experts,
        embed_bytes: shape.embed_row_bytes,
        touched_trunk_bytes: trunk,
        touched_bytes: trunk + sizes.head_stored + experts + 2 * kda_state_bytes(config),
    }
}

fn model_sizes(config: &ModelConfig, shape: &ModelShape, sizes: &BlockSizes) -> ModelSizes {
    ModelSizes {
        layers: config.layers.len(),
        expert_bytes: shape.expert_bytes,
        experts_bytes: (moe_layers(config) * config.moe.experts) as u64 * shape.expert_bytes,
        trunk_bytes: sizes.layer_stored.iter().sum::<u64>() + shape.vector_bytes,
        layer_bytes_max: sizes.layer_stored.iter().copied().max().unwrap_or(0),
        embed_bytes: config.vocab as u64 * shape.embed_row_bytes,
        head_bytes: sizes.head_stored,
        state_bytes: kda_state_bytes(config),
        history_bytes: conv_history_bytes(config),
        latent_bytes_per_token: latent_bytes_per_position(config),
    }
}
