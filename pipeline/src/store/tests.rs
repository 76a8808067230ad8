//! The sources against a model on disk whose every byte is known.

use proptest::prelude::*;

use super::testing::{EXPERTS, Fixture, LAYERS, VOCAB, WIDTH, plan};
use super::{StoreError, StoreOptions, trace};
use crate::memory::policy::{self, CacheShape, Placement};
use crate::model::tensors::VectorKind;
use crate::plan::{CachePolicy, DirectMode, IoEngine};
use crate::source::{ExpertRequest, ExpertSource, WeightSource};
use crate::units::{ExpertId, LayerIndex, TokenId};

const ALL: usize = usize::MAX;

#[test]
fn one_slot_and_no_cache_give_every_byte_pass_after_pass() {
    for contiguous in [true, false] {
        let f = Fixture::new(contiguous);
        let mut s = f.open(&plan()).unwrap();
        for head in [true, false, true, true, false, false, true] {
            f.walk(&mut s, head, ALL).unwrap();
            f.embed(&mut s, &[0, 49, 7, 7, 12, 3, 1]).unwrap();
            for layer in 1..LAYERS {
                let mut got = f.ask(&mut s, layer, &[3, 11, 0, 7, 5]).unwrap();
                got.sort_unstable();
                assert_eq!(got, [0, 3, 5, 7, 11]);
            }
        }
        let stats = s.counters.snapshot();
        assert_eq!((stats.expert_hits, stats.expert_requests), (0, 7 * 3 * 5));
    }
}

#[test]
fn vectors_are_resident_and_the_padding_of_a_log_is_not() {
    let f = Fixture::new(true);
    let s = f.open(&plan()).unwrap();
    assert_eq!(s.vectors.get(Some(LayerIndex(2)), VectorKind::InputNorm).unwrap().len(), WIDTH);
    assert_eq!(s.vectors.get(Some(LayerIndex(0)), VectorKind::ALog).unwrap().len(), 6);
    assert_eq!(s.vectors.get(None, VectorKind::FinalNorm).unwrap().len(), WIDTH);
    assert_eq!(s.vectors.get(None, VectorKind::ALog), None);
    let v = &f.tensors.layers[3].vectors[1];
    let first = f32::from_le_bytes(f.bytes(&v.extent)[..4].try_into().unwrap());
    assert_eq!(s.vectors.get(Some(LayerIndex(3)), VectorKind::ALog).unwrap()[0].to_bits(), first.to_bits());
}

#[test]
fn a_token_past_the_vocabulary_is_refused() {
    let f = Fixture::new(true);
    let mut s = f.open(&plan()).unwrap();
    assert!(matches!(
        f.embed(&mut s, &[1, VOCAB as u32]),
        Err(StoreError::UnknownToken { vocab: VOCAB, .. })
    ));
    assert!(matches!(s.trunk.embed(&[], &mut [0.0]), Err(StoreError::EmbedOutput { expected: 0, got: 1 })));
    f.embed(&mut s, &[1]).unwrap();
}

#[test]
fn expert_requests_that_cannot_be_are_refused_and_leave_the_source_usable() {
    let f = Fixture::new(true);
    let mut s = f.open(&plan()).unwrap();
    assert!(matches!(f.ask(&mut s, 0, &[1]), Err(StoreError::UnknownExpert { experts: 0, .. })));
    assert!(matches!(f.ask(&mut s, 1, &[1, EXPERTS]), Err(StoreError::UnknownExpert { .. })));
    assert!(matches!(f.ask(&mut s, 9, &[1]), Err(StoreError::UnknownExpert { .. })));
    assert!(matches!(f.ask(&mut s, 1, &[1, 2, 1]), Err(StoreError::DuplicateExpert { .. })));
    assert_eq!(f.ask(&mut s, 1, &[1]).unwrap(), [1]);
    assert!(f.ask(&mut s, 1, &[]).unwrap().is_empty());
}

#[test]
fn cached_experts_come_first_and_are_not_read() {
    let f = Fixture::new(true);
    let mut p = plan();
    p.experts.arena_slots = vec![0, 2, 2, 2];
    let mut s = f.open(&p).unwrap();
    f.ask(&mut s, 1, &[4, 5]).unwrap();
    let bytes = s.counters.snapshot().expert_bytes;
    let got = f.ask(&mut s, 1, &[9, 8, 5, 4]).unwrap();
    assert_eq!(got[..2], [5, 4]);
    let stats = s.counters.snapshot();
    assert_eq!((stats.expert_hits, stats.expert_bytes), (2, 2 * bytes));
}

#[test]
fn slots_too_small_or_none_are_refused_at_open() {
    let f = Fixture::new(true);
    let mut p = plan();
    p.trunk.slot_bytes = 8192;
    assert!(matches!(f.open(&p), Err(StoreError::SlotTooSmall { purpose: "a trunk block", .. })));
    let mut p = plan();
    p.experts.slot_bytes = 4096;
    assert!(matches!(f.open(&p), Err(StoreError::SlotTooSmall { purpose: "an expert", .. })));
    let mut p = plan();
    p.trunk.ring_slots = 0;
    assert!(matches!(f.open(&p), Err(StoreError::NoSlot { .. })));
    let mut p = plan();
    p.experts.staging_slots = 0;
    assert!(matches!(f.open(&p), Err(StoreError::NoSlot { .. })));
}

#[test]
fn the_next_pass_is_read_while_the_last_blocks_are_computed() {
    let f = Fixture::new(true);
    let mut p = plan();
    p.trunk.ring_slots = 4;
    let mut s = f.open(&p).unwrap();
    for head in [true, false, true] {
        f.walk(&mut s, head, ALL).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(100));
        let before = s.counters.snapshot();
        s.trunk.begin_pass(head).unwrap();
        // All slots but the one that held the last block.
        for _ in 0..3 {
            s.trunk.next_block().unwrap();
        }
        let after = s.counters.snapshot();
        assert_eq!(after.blocks_ready - before.blocks_ready, 3);
        while s.trunk.next_block().is_ok() {}
    }
}

/// Three layers' requests of one pass, the same from pass to pass up to a shift.
fn visits(passes: u16) -> impl Iterator<Item = (u16, Vec<u16>)> {
    (0..passes).flat_map(|pass| {
        (1..LAYERS).map(move |layer| {
            let mut wanted: Vec<u16> = (0..5).map(|i| (i * i + pass * layer / 2) % EXPERTS).collect();
            wanted.sort_unstable_by_key(|e| (e * 7 + pass) % EXPERTS);
            wanted.dedup();
            (layer, wanted)
        })
    })
}

#[test]
fn the_simulator_counts_the_hits_that_the_engine_had() {
    for name in [CachePolicy::Lru, CachePolicy::LayerLru, CachePolicy::LayerRank] {
        let f = Fixture::new(true);
        let mut p = plan();
        p.experts.arena_slots = vec![0, 3, 4, 3];
        p.experts.policy = name;
        let path = f.dir.path().join("trace.tsv");
        let options = StoreOptions { trace: Some(path.clone()), reader: None };
        let mut s = f.open_with(&p, &options).unwrap();
        let mut seen = 0;
        for (layer, mut wanted) in visits(12) {
            let mut unique = std::collections::HashSet::new();
            wanted.retain(|e| unique.insert(*e));
            seen += wanted.len() as u64;
            f.ask(&mut s, layer, &wanted).unwrap();
        }
        s.experts.flush_trace().unwrap();
        let records = trace::parse(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let shape = CacheShape { slots: p.experts.arena_slots, experts: vec![0, 12, 12, 12] };
        let mut policy = policy::build(name, &shape);
        let (mut placed, mut hits) = (Vec::new(), 0);
        for r in &records {
            policy.visit(r.layer, &r.wanted, &mut placed);
            hits += placed.iter().filter(|p| matches!(p, Placement::Hit(_))).count() as u64;
        }
        let stats = s.counters.snapshot();
        assert_eq!(records.last().unwrap().position, 11);
        assert_eq!((stats.expert_requests, stats.expert_hits), (seen, hits), "{name:?}");
        assert!(hits > 20, "{name:?}: {hits}");
    }
}

#[test]
fn a_pass_allocates_nothing_on_the_computing_thread() {
    let f = Fixture::new(false);
    let mut p = plan();
    p.experts.arena_slots = vec![0, 2, 2, 2];
    p.trunk.ring_slots = 3;
    let mut s = f.open(&p).unwrap();
    let wanted: Vec<ExpertRequest> =
        (0u8..6).map(|rank| ExpertRequest { expert: ExpertId(u16::from(rank) + 2), rank }).collect();
    let mut row = vec![0.0; WIDTH];
    let mut pass = || {
        s.trunk.begin_pass(true).unwrap();
        s.trunk.embed(&[TokenId(3)], &mut row).unwrap();
        while s.trunk.next_block().is_ok_and(|b| b.id.layer.is_some()) {}
        for layer in 1..LAYERS {
            s.experts.request(LayerIndex(layer), &wanted).unwrap();
            while s.experts.next_expert().unwrap().is_some() {}
        }
    };
    pass();
    let counted = allocation_counter::measure(|| (0..3).for_each(|_| pass()));
    assert_eq!(counted.count_total, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    /// Any cut of the trunk into blocks, slots and pinned layers gives every block once, in order, with
    /// its bytes, through complete and abandoned passes.
    #[test]
    fn blocks_arrive_once_in_order(
        block_bytes in 3000u64..40_000, ring_slots in 1usize..9, depth in 1usize..5,
        pinned in prop::collection::btree_set(0u16..LAYERS, 0..4), pinned_head: bool, direct: bool, uring: bool,
        passes in prop::collection::vec((any::<bool>(), prop::option::of(0usize..30)), 1..8),
    ) {
        let f = Fixture::new(true);
        let mut p = plan();
        p.trunk.block_bytes = block_bytes;
        p.trunk.slot_bytes = 64 << 10;
        p.trunk.ring_slots = ring_slots;
        p.trunk.pinned_layers = pinned.into_iter().map(LayerIndex).collect();
        p.trunk.pinned_head = pinned_head;
        p.reader.depth = depth;
        p.reader.engine = if uring { IoEngine::Auto } else { IoEngine::Pread };
        p.reader.direct = if direct { DirectMode::Auto } else { DirectMode::Off };
        let mut s = f.open(&p).unwrap();
        for (head, stop) in passes {
            f.walk(&mut s, head, stop.unwrap_or(ALL)).unwrap();
        }
    }

    /// Any cache gives every expert wanted once, with its bytes, through complete and abandoned requests.
    #[test]
    fn experts_arrive_once(
        policy in prop::sample::select(vec![CachePolicy::Lru, CachePolicy::LayerLru, CachePolicy::LayerRank]),
        slots in prop::collection::vec(0usize..6, 3), staging in 1usize..4, contiguous: bool,
        visits in prop::collection::vec(
            (1u16..LAYERS, prop::sample::subsequence((0..EXPERTS).collect::<Vec<_>>(), 1..9), prop::option::of(0usize..5)),
            1..25),
    ) {
        let f = Fixture::new(contiguous);
        let mut p = plan();
        p.experts.arena_slots = vec![0, slots[0], slots[1], slots[2]];
        p.experts.staging_slots = staging;
        p.experts.policy = policy;
        let mut s = f.open(&p).unwrap();
        for (layer, wanted, stop) in visits {
            if let Some(stop) = stop {
                let requests: Vec<ExpertRequest> = wanted.iter().map(|&e| ExpertRequest {
                    expert: ExpertId(e), rank: 0 }).collect();
                s.experts.request(LayerIndex(layer), &requests).unwrap();
                for _ in 0..stop.min(wanted.len()) {
                    prop_assert!(s.experts.next_expert().unwrap().is_some());
                }
                s.experts.abandon().unwrap();
            }
            let mut got = f.ask(&mut s, layer, &wanted).unwrap();
            got.sort_unstable();
            prop_assert_eq!(got, wanted);
        }
    }
}
