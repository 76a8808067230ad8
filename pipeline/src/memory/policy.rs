//! Which experts keep a cache slot: named policies behind one trait.
//!
//! A policy is bookkeeping alone: it reads nothing and owns no bytes, so the engine's arenas and the
//! simulator (`cargo xtask cache-sim`) run the very same code and count the very same hits. All are
//! deterministic (integers and IEEE products in a written order) and allocate at construction only.

use std::ops::Range;

use crate::plan::CachePolicy;
use crate::source::ExpertRequest;
use crate::units::LayerIndex;

/// A slot of the expert cache, counted over all layers.
pub type SlotIndex = usize;

/// Where a wanted expert is, or goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// It is in this slot.
    Hit(SlotIndex),
    /// It is to be read, and keeps this slot; what was there is evicted.
    Admit(SlotIndex),
    /// It is to be read, used and let go: nothing in the cache is worth less.
    Bypass,
}

/// How many slots a cache has, and whose they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Cache slots of each layer, by layer number.
    pub slots: Vec<usize>,
    /// Experts of each layer, by layer number; 0 for dense layers.
    pub experts: Vec<usize>,
}

impl CacheShape {
    /// Slots of all layers.
    #[must_use]
    pub fn slots_total(&self) -> usize {
        self.slots.iter().sum()
    }
}

/// Decides who is cached.
pub trait ReplacementPolicy: Send {
    /// One visit of a layer: places every wanted expert (distinct, best rank first). `placed` is cleared
    /// and filled in the order of `wanted`; it needs capacity for as many. A slot is admitted to once at
    /// most; when it is also hit, the newcomer takes it over once the expert in it has been used.
    ///
    /// A layer or expert outside the [`CacheShape`] is passed through.
    fn visit(&mut self, layer: LayerIndex, wanted: &[ExpertRequest], placed: &mut Vec<Placement>);

    /// Empties a slot whose read failed or was withdrawn.
    fn forget(&mut self, slot: SlotIndex);
}

/// The policy of this name, for a cache of this shape.
#[must_use]
pub fn build(policy: CachePolicy, shape: &CacheShape) -> Box<dyn ReplacementPolicy> {
    match policy {
        CachePolicy::Lru => Box::new(Lru::new(shape, LruScope::Global)),
        CachePolicy::LayerLru => Box::new(Lru::new(shape, LruScope::Layer)),
        CachePolicy::LayerRank => Box::new(LayerRank::new(shape)),
    }
}

const NOWHERE: u32 = u32::MAX;

/// Who is in which slot.
#[derive(Debug)]
struct Residents {
    /// Slots of each layer.
    ranges: Vec<Range<SlotIndex>>,
    /// First entry of each layer in `slot_of`; one more at the end.
    first_expert: Vec<usize>,
    /// Slot of each expert of each layer, or `NOWHERE`.
    slot_of: Vec<u32>,
    /// Entry of `slot_of` that each slot belongs to, or `NOWHERE` for an empty slot.
    owner: Vec<u32>,
}

impl Residents {
    fn new(shape: &CacheShape) -> Self {
        let mut ranges = Vec::with_capacity(shape.slots.len());
        let mut first_expert = vec![0];
        let (mut slot, mut expert) = (0, 0);
        for (&slots, &experts) in shape.slots.iter().zip(&shape.experts) {
            ranges.push(slot..slot + slots);
            slot += slots;
            expert += experts;
            first_expert.push(expert);
        }
        Self { ranges, first_expert, slot_of: vec![NOWHERE; expert], owner: vec![NOWHERE; slot] }
    }

    /// Number of an expert among all layers'.
    fn key(&self, layer: LayerIndex, request: &ExpertRequest) -> Option<usize> {
        let first = *self.first_expert.get(layer.index())?;
        let end = *self.first_expert.get(layer.index() + 1)?;
        Some(first + request.expert.index()).filter(|&key| key < end)
    }

    fn slot(&self, key: usize) -> Option<SlotIndex> {
        let slot = self.slot_of[key];
        (slot != NOWHERE).then_some(slot as usize)
    }

    fn owner(&self, slot: SlotIndex) -> Option<usize> {
        let key = self.owner[slot];
        (key != NOWHERE).then_some(key as usize)
    }

    fn evict(&mut self, slot: SlotIndex) {
        if let Some(old) = self.owner(slot) {
            self.slot_of[old] = NOWHERE;
        }
        self.owner[slot] = NOWHERE;
    }

    fn place(&mut self, key: usize, slot: SlotIndex) {
        self.evict(slot);
        // Tables of 2^32 entries do not exist: experts and layers have 16-bit numbers, slots hold megabytes.
        self.owner[slot] = key as u32;
        self.slot_of[key] = slot as u32;
    }
}

/// Whose slots an expert may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LruScope {
    /// Any.
    Global,
    /// Its layer's.
    Layer,
}

/// Least recently used goes first, the experts of the current visit excepted.
#[derive(Debug)]
struct Lru {
    scope: LruScope,
    residents: Residents,
    /// Time of each slot's last use; 0 is never.
    used: Vec<u64>,
    /// Counts requests.
    clock: u64,
}

impl Lru {
    fn new(shape: &CacheShape, scope: LruScope) -> Self {
        let residents = Residents::new(shape);
        let used = vec![0; residents.owner.len()];
        Self { scope, residents, used, clock: 0 }
    }

    fn oldest(&self, layer: LayerIndex, visit_start: u64) -> Option<SlotIndex> {
        let slots = match self.scope {
            LruScope::Global => 0..self.used.len(),
            LruScope::Layer => self.residents.ranges.get(layer.index())?.clone(),
        };
        slots.filter(|&s| self.used[s] <= visit_start).min_by_key(|&s| self.used[s])
    }
}

impl ReplacementPolicy for Lru {
    fn visit(&mut self, layer: LayerIndex, wanted: &[ExpertRequest], placed: &mut Vec<Placement>) {
        placed.clear();
        let visit_start = self.clock;
        // Stamps follow the order of `wanted`, hits or not; hits are stamped first so that none is evicted.
        for (time, request) in (visit_start + 1..).zip(wanted) {
            let slot = self.residents.key(layer, request).and_then(|key| self.residents.slot(key));
            if let Some(slot) = slot {
                self.used[slot] = time;
            }
            placed.push(slot.map_or(Placement::Bypass, Placement::Hit));
        }
        for ((time, request), place) in (visit_start + 1..).zip(wanted).zip(placed.iter_mut()) {
            if *place != Placement::Bypass {
                continue;
            }
            let Some(key) = self.residents.key(layer, request) else { continue };
            if let Some(slot) = self.oldest(layer, visit_start) {
                self.residents.place(key, slot);
                self.used[slot] = time;
                *place = Placement::Admit(slot);
            }
        }
        self.clock += wanted.len() as u64;
    }

    fn forget(&mut self, slot: SlotIndex) {
        self.residents.evict(slot);
        self.used[slot] = 0;
    }
}

/// Weight of one rank further down: exp(-1.27 / 15). Written out, so that no platform's `exp` decides.
const RANK_DECAY: f64 = 0.918_818_506_197_055_1;
/// Weight of one visit longer ago: 2^(-1/8).
const AGE_DECAY: f64 = 0.917_004_043_204_671_2;
/// Weight of having been used at the layer's last visit.
const RECENT_WEIGHT: f64 = 4.0;
/// Router ranks that are told apart; later ones count as the last.
const RANKS: usize = 256;

/// By layer and rank. Equal slots per layer; the worth of an expert is
/// `4 w(rank) [used at this layer's last visit] + sum over visits of w(rank) 2^(-age/8)`, with
/// `w(rank) = exp(-1.27 rank / 15)` and age in visits of the layer. The layer's least goes, and only if the
/// newcomer is worth strictly more. Visits count whether the expert was cached or not.
#[derive(Debug)]
struct LayerRank {
    residents: Residents,
    /// w(rank).
    weights: [f64; RANKS],
    /// Decayed sum of past visits, per expert of each layer.
    frequency: Vec<f64>,
    /// Weight of the use at the last visit, or 0, per expert of each layer.
    recent: Vec<f64>,
}

impl LayerRank {
    fn new(shape: &CacheShape) -> Self {
        let residents = Residents::new(shape);
        let mut weights = [1.0; RANKS];
        for rank in 1..RANKS {
            weights[rank] = weights[rank - 1] * RANK_DECAY;
        }
        let experts = residents.slot_of.len();
        Self { residents, weights, frequency: vec![0.0; experts], recent: vec![0.0; experts] }
    }

    fn worth(&self, key: usize) -> f64 {
        RECENT_WEIGHT * self.recent[key] + self.frequency[key]
    }

    /// The slot to give up for a newcomer: an empty one, else the least worth.
    fn least(&self, layer: LayerIndex) -> Option<(SlotIndex, f64)> {
        let mut least: Option<(SlotIndex, f64)> = None;
        for slot in self.residents.ranges.get(layer.index())?.clone() {
            let Some(key) = self.residents.owner(slot) else { return Some((slot, f64::NEG_INFINITY)) };
            let worth = self.worth(key);
            if least.is_none_or(|(_, w)| worth < w) {
                least = Some((slot, worth));
            }
        }
        least
    }

    /// Ages the layer's experts by one visit and counts this one. Marks what is cached.
    fn count(&mut self, layer: LayerIndex, wanted: &[ExpertRequest], placed: &mut Vec<Placement>) {
        let first = self.residents.first_expert.get(layer.index());
        if let (Some(&first), Some(&end)) = (first, self.residents.first_expert.get(layer.index() + 1)) {
            self.recent[first..end].fill(0.0);
            self.frequency[first..end].iter_mut().for_each(|f| *f *= AGE_DECAY);
        }
        for request in wanted {
            let key = self.residents.key(layer, request);
            if let Some(key) = key {
                let weight = self.weights[usize::from(request.rank)];
                self.recent[key] = weight;
                self.frequency[key] += weight;
            }
            let slot = key.and_then(|key| self.residents.slot(key));
            placed.push(slot.map_or(Placement::Bypass, Placement::Hit));
        }
    }
}

impl ReplacementPolicy for LayerRank {
    fn visit(&mut self, layer: LayerIndex, wanted: &[ExpertRequest], placed: &mut Vec<Placement>) {
        placed.clear();
        self.count(layer, wanted, placed);
        for i in 0..wanted.len() {
            if placed[i] != Placement::Bypass {
                continue;
            }
            let Some(key) = self.residents.key(layer, &wanted[i]) else { continue };
            let Some((slot, worth)) = self.least(layer) else { continue };
            if self.worth(key) <= worth {
                continue;
            }
            // The one evicted may be a newcomer of this very visit: it passes through then.
            if let Some(out) = placed.iter_mut().find(|p| **p == Placement::Admit(slot)) {
                *out = Placement::Bypass;
            }
            self.residents.place(key, slot);
            placed[i] = Placement::Admit(slot);
        }
    }

    fn forget(&mut self, slot: SlotIndex) {
        self.residents.evict(slot);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::units::ExpertId;

    fn wanted(experts: &[u16]) -> Vec<ExpertRequest> {
        (0u8..).zip(experts).map(|(rank, &e)| ExpertRequest { expert: ExpertId(e), rank }).collect()
    }

    fn visit(p: &mut dyn ReplacementPolicy, layer: u16, experts: &[u16]) -> Vec<Placement> {
        let mut placed = Vec::new();
        p.visit(LayerIndex(layer), &wanted(experts), &mut placed);
        placed
    }

    use Placement::{Admit, Bypass, Hit};

    #[test]
    fn lru_per_layer_keeps_the_current_set_and_passes_the_overflow_through() {
        let shape = CacheShape { slots: vec![2, 1], experts: vec![10, 10] };
        let mut p = build(CachePolicy::LayerLru, &shape);
        assert_eq!(visit(&mut *p, 0, &[1, 2, 3]), [Admit(0), Admit(1), Bypass]);
        assert_eq!(visit(&mut *p, 1, &[1]), [Admit(2)]);
        // 4 comes before the hit on 1, and still may not evict it.
        assert_eq!(visit(&mut *p, 0, &[4, 1]), [Admit(1), Hit(0)]);
        // 4 was used before 1 within that visit: it goes first.
        assert_eq!(visit(&mut *p, 0, &[5]), [Admit(1)]);
        p.forget(0);
        assert_eq!(visit(&mut *p, 0, &[1]), [Admit(0)]);
    }

    #[test]
    fn lru_over_all_layers_takes_the_oldest_of_any() {
        let shape = CacheShape { slots: vec![1, 1], experts: vec![4, 4] };
        let mut p = build(CachePolicy::Lru, &shape);
        assert_eq!(visit(&mut *p, 0, &[0, 1]), [Admit(0), Admit(1)]);
        assert_eq!(visit(&mut *p, 1, &[0]), [Admit(0)]);
        assert_eq!(visit(&mut *p, 0, &[1, 0]), [Hit(1), Admit(0)]);
    }

    #[test]
    fn layer_rank_prefers_the_first_choice_and_the_frequent() {
        let shape = CacheShape { slots: vec![1], experts: vec![10] };
        let mut p = build(CachePolicy::LayerRank, &shape);
        assert_eq!(visit(&mut *p, 0, &[1, 2]), [Admit(0), Bypass]);
        // 3 is used now and 1 is not: 4 + 1 against 0.92.
        assert_eq!(visit(&mut *p, 0, &[3]), [Admit(0)]);
        // A hit of low rank gives its slot to a newcomer of high rank, after its use.
        assert_eq!(
            visit(&mut *p, 0, &[4, 5, 6, 7, 8, 9, 0, 3]),
            [Admit(0), Bypass, Bypass, Bypass, Bypass, Bypass, Bypass, Hit(0)]
        );
        // Equal worth does not evict.
        let mut p = build(CachePolicy::LayerRank, &shape);
        p.visit(LayerIndex(0), &[request(1, 0)], &mut Vec::new());
        let mut placed = Vec::new();
        p.visit(LayerIndex(0), &[request(2, 0)], &mut placed);
        assert_eq!(placed, [Admit(0)]);
        p.visit(LayerIndex(0), &[request(3, 7), request(4, 7)], &mut placed);
        assert_eq!(placed, [Admit(0), Bypass]);
    }

    fn request(expert: u16, rank: u8) -> ExpertRequest {
        ExpertRequest { expert: ExpertId(expert), rank }
    }

    #[test]
    fn a_better_newcomer_of_the_same_visit_takes_the_slot_of_a_worse_one() {
        let shape = CacheShape { slots: vec![1], experts: vec![10] };
        let mut p = build(CachePolicy::LayerRank, &shape);
        let mut placed = Vec::new();
        p.visit(LayerIndex(0), &[request(1, 9), request(2, 0)], &mut placed);
        assert_eq!(placed, [Bypass, Admit(0)]);
        p.visit(LayerIndex(0), &[request(2, 0)], &mut placed);
        assert_eq!(placed, [Hit(0)]);
    }

    #[test]
    fn what_the_cache_does_not_know_passes_through() {
        let shape = CacheShape { slots: vec![0, 2], experts: vec![0, 3] };
        for name in [CachePolicy::Lru, CachePolicy::LayerLru, CachePolicy::LayerRank] {
            let mut p = build(name, &shape);
            assert_eq!(visit(&mut *p, 0, &[1]), [Bypass], "{name:?}");
            assert_eq!(visit(&mut *p, 1, &[3]), [Bypass], "{name:?}");
            assert_eq!(visit(&mut *p, 9, &[0]), [Bypass], "{name:?}");
        }
    }

    proptest! {
        /// Against a plain map: a hit is where the expert was put, a slot is admitted to once per visit,
        /// and stays within the layer where the policy is by layer.
        #[test]
        fn placements_are_a_cache(
            name in prop::sample::select(vec![CachePolicy::Lru, CachePolicy::LayerLru, CachePolicy::LayerRank]),
            slots in prop::collection::vec(0usize..6, 1..4),
            visits in prop::collection::vec((0u16..4, prop::collection::vec(0u16..12, 1..8)), 1..60),
        ) {
            let shape = CacheShape { experts: vec![12; slots.len()], slots };
            let mut policy = build(name, &shape);
            let mut content: Vec<Option<(u16, u16)>> = vec![None; shape.slots_total()];
            for (layer, mut experts) in visits {
                experts.sort_unstable();
                experts.dedup();
                let placed = visit(&mut *policy, layer, &experts);
                prop_assert_eq!(placed.len(), experts.len());
                let before = content.clone();
                let mut admitted = Vec::new();
                for (&e, &p) in experts.iter().zip(&placed) {
                    match p {
                        Hit(s) => prop_assert_eq!(before[s], Some((layer, e))),
                        Admit(s) => {
                            prop_assert!(!before.contains(&Some((layer, e))));
                            prop_assert!(!admitted.contains(&s));
                            if name != CachePolicy::Lru {
                                let first: usize = shape.slots[..layer as usize].iter().sum();
                                prop_assert!((first..first + shape.slots[layer as usize]).contains(&s));
                            }
                            admitted.push(s);
                            content[s] = Some((layer, e));
                        }
                        Bypass => prop_assert!(!before.contains(&Some((layer, e)))),
                    }
                }
            }
        }
    }
}
