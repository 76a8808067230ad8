//! Plans on the release's dimensions: snapshots of every built-in preset, refusals, and properties.

use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::machine::{CgroupLimit, Machine};
use crate::model::config::ModelConfig;
use crate::model::config_json::{parse_config, read_config};
use crate::preset::{BUILTIN_NAMES, LADDER, Preset};
use crate::units::Bytes;

const GB: u64 = 1_000_000_000;

fn k3() -> (ModelConfig, ModelShape) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/k3-dimensions.json");
    let config = read_config(&path).unwrap();
    let shape = ModelShape::from_config(&config);
    (config, shape)
}

fn machine(available: u64) -> Machine {
    Machine {
        cores: 8,
        memory_total_bytes: available,
        memory_available_bytes: available,
        cgroup: None,
        page_bytes: 4096,
    }
}

fn preset(name: &str, sets: &[&str]) -> Preset {
    let sets: Vec<String> = sets.iter().map(|s| (*s).to_owned()).collect();
    Preset::load(name, &sets).unwrap()
}

fn line(plan: &Plan, name: &str) -> u64 {
    plan.ledger.lines.iter().find(|l| l.name == name).unwrap().bytes
}

#[test]
fn sizes_of_the_release() {
    let (config, shape) = k3();
    let sizes = memory::BlockSizes::stored(&config, &shape, 16 << 20);
    let trunk: u64 = sizes.layer_stored.iter().sum();
    assert_eq!(shape.expert_bytes, 17_547_264);
    assert_eq!(sizes.head_stored, 2_348_810_240);
    assert_eq!(sizes.layer_stored.iter().max(), Some(&sizes.layer_stored[0]));
    assert_eq!(Bytes(sizes.layer_stored[0]).human(), "2.34 GB");
    assert_eq!(Bytes(sizes.layer_stored[1]).human(), "1.27 GB");
    // The trunk of the release is 108.81 GB with its small vectors, which are resident here.
    assert_eq!((trunk as f64 / 1e7).round() / 100.0, 108.76);
    assert_eq!(((trunk + shape.vector_bytes) as f64 / 1e7).round() / 100.0, 108.81);
    let p = make_plan("pocket", &[], 64 * GB).unwrap();
    assert_eq!(line(&p, "KDA state"), 434_110_464);
    assert_eq!(line(&p, "latent KV cache"), 55_296 * 1024);
    assert_eq!(p.traffic.expert_bytes_max, 92 * 16 * 17_547_264);
    assert_eq!(p.traffic.embed_bytes, 14_336);
}

fn make_plan(name: &str, sets: &[&str], available: u64) -> Result<Plan, PlanError> {
    let (config, shape) = k3();
    plan(&preset(name, sets), &config, &shape, &machine(available))
}

#[test]
fn pocket_holds_the_whole_model_in_one_gigabyte() {
    let p = make_plan("pocket", &[], 64 * GB).unwrap();
    assert!(p.ledger.total_bytes() < GB, "{}", p.ledger.total_bytes());
    assert_eq!(p.ledger.budget_bytes, GB);
    let mut group = machine(64 * GB);
    group.cgroup =
        Some(CgroupLimit { path: "/sys/fs/cgroup/cap".into(), limit_bytes: GB, used_bytes: 8_000_000 });
    let (config, shape) = k3();
    let p = plan(&preset("pocket", &[]), &config, &shape, &group).unwrap();
    assert!(p.ledger.total_bytes() <= GB - 8_000_000 - (16 << 20));
}

#[test]
fn every_builtin_on_the_dimensions_of_the_release() {
    for name in BUILTIN_NAMES {
        let plan = make_plan(name, &[], 256 * GB);
        let plan = if name == "demo" { plan.map_err(|e| e.to_string()) } else { Ok(plan.unwrap()) };
        insta::assert_json_snapshot!(name, plan);
    }
}

#[test]
fn refusals_name_what_is_short_and_what_fits() {
    let refusal =
        |name: &str, sets: &[&str], available: u64| make_plan(name, sets, available).unwrap_err().to_string();
    insta::assert_snapshot!("laptop_in_4_gb", refusal("laptop", &["memory.budget=4GB"], 64 * GB));
    insta::assert_snapshot!("server_on_a_small_machine", refusal("server", &[], 24 * GB));
    insta::assert_snapshot!("nothing_fits", refusal("pocket", &[], GB / 2));
    insta::assert_snapshot!("long_context", refusal("laptop", &["context.tokens=1048576"], 64 * GB));
    insta::assert_snapshot!(
        "layers",
        [
            refusal("max", &["trunk.pinned=94"], 256 * GB),
            refusal("max", &["trunk.pinned=[0, 93, 4095]"], 256 * GB),
        ]
        .join("\n---\n")
    );
    let path = "/sys/fs/cgroup/box".into();
    let group = Some(CgroupLimit { path, limit_bytes: 3 * GB, used_bytes: GB });
    let (config, shape) = k3();
    let error = plan(&preset("laptop", &[]), &config, &shape, &Machine { cgroup: group, ..machine(64 * GB) });
    insta::assert_snapshot!("cgroup", error.unwrap_err().to_string());
}

#[test]
fn at_least_more_layers_than_there_are_is_all_of_them() {
    let all = make_plan("max", &["trunk.pinned=all"], 256 * GB).unwrap();
    let fit = make_plan("max", &["trunk.pinned=fit:100"], 256 * GB).unwrap();
    assert_eq!(fit.trunk, all.trunk);
    let error = make_plan("laptop", &["trunk.pinned=fit:100"], 64 * GB).unwrap_err().to_string();
    assert!(error.contains("trunk.pinned = \"fit:100\""), "{error}");
}

#[test]
fn a_tiny_model_streams_under_the_demo_preset() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/models/k3-tiny-a/config.json");
    let config = read_config(&path).unwrap();
    let shape = ModelShape::from_config(&config);
    let p = plan(&preset("demo", &[]), &config, &shape, &machine(GB)).unwrap();
    let experts = memory::moe_layers(&config) * config.moe.experts;
    assert!(p.traffic.trunk_bytes > 0 && p.traffic.head_bytes > 0);
    assert!(p.trunk.slot_bytes * (p.trunk.ring_slots as u64) < p.traffic.trunk_bytes);
    let slots: usize = p.experts.arena_slots.iter().sum();
    assert!(slots > 0 && slots < experts, "{slots} of {experts}");
}

#[test]
fn layers_spread_evenly() {
    let p = make_plan("laptop", &["trunk.pinned=4", "memory.budget=16 GB"], 64 * GB).unwrap();
    let at: Vec<u16> = p.trunk.pinned_layers.iter().map(|l| l.0).collect();
    assert_eq!(at, [11, 34, 58, 81]);
    // Their bytes are dealt out over the blocks of all layers: no stretch has more or less than its share.
    let (config, shape) = k3();
    let blocks = memory::BlockSizes::stored(&config, &shape, 32 << 20).layer_blocks;
    let total: u64 = blocks.iter().map(|&(resident, _)| resident).sum();
    let share = p.trunk.pinned_bytes as f64 / total as f64;
    assert_eq!(p.trunk.dealt_blocks.len(), blocks.len());
    let (mut seen, mut pinned) = (0, 0);
    for (&(resident, _), &is_pinned) in blocks.iter().zip(&p.trunk.dealt_blocks) {
        seen += resident;
        pinned += if is_pinned { resident } else { 0 };
        let owed = share * seen as f64 - pinned as f64;
        assert!((-1.0..(64 << 20) as f64).contains(&owed), "{owed} after {seen}");
    }
    let none = make_plan("laptop", &["trunk.pinned=0"], 64 * GB).unwrap();
    let saved = none.traffic.trunk_bytes - p.traffic.trunk_bytes;
    assert!(saved <= p.trunk.pinned_bytes && saved + (64 << 20) > p.trunk.pinned_bytes, "{saved}");
    let all = make_plan("max", &["trunk.pinned=fit"], 256 * GB).unwrap();
    assert!(all.traffic.trunk_bytes == 0 && all.trunk.dealt_blocks.is_empty(), "all of them are whole");
    let p = make_plan("max", &["trunk.pinned=prefix:3"], 256 * GB).unwrap();
    assert_eq!(p.trunk.pinned_layers, [LayerIndex(0), LayerIndex(1), LayerIndex(2)]);
    let p = make_plan("max", &["trunk.pinned=[9, 2]"], 256 * GB).unwrap();
    assert!(p.trunk.is_pinned(0, Some(LayerIndex(9))) && !p.trunk.is_pinned(0, Some(LayerIndex(3))));
}

#[test]
fn prediction_is_the_slower_of_disk_and_memory() {
    let p = make_plan("pocket", &[], 64 * GB).unwrap();
    let rates =
        |memory: &str| Rates { disk: "10 GB/s".parse().unwrap(), memory: Some(memory.parse().unwrap()) };
    let fast = Prediction::new(&p.traffic, rates("1000 GB/s"));
    assert_eq!(fast.seconds_per_token, fast.disk_seconds);
    let slow = Prediction::new(&p.traffic, rates("1 GB/s"));
    assert_eq!(Some(slow.seconds_per_token), slow.memory_seconds);
    assert!((fast.disk_seconds - 13.7).abs() < 0.05, "{}", fast.disk_seconds);
}

#[test]
fn absurd_sizes_are_refused_not_wrapped() {
    let sets =
        ["context.tokens=16777216", "context.sequences=256", "trunk.block=1 GiB", "trunk.ring_slots=1024"];
    let error = make_plan("max", &sets, 256 * GB).unwrap_err();
    assert!(matches!(error.0[..], [Refusal::Memory(_)]));
    let text = include_str!("../../../golden/k3-dimensions.json").replace("163840", "4000000000");
    if let Ok(config) = parse_config(Path::new("huge"), &text) {
        let shape = ModelShape::from_config(&config);
        assert!(plan(&preset("pocket", &[]), &config, &shape, &machine(GB)).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn plans_keep_their_promises(
        rung in 0usize..LADDER.len(), budget_mb in 600u64..300_000, more_mb in 0u64..20_000,
        pinned in prop::sample::select(vec!["fit", "fit:3", "0", "7", "\"prefix:5\"", "all"]),
        head in prop::sample::select(vec!["fit", "pinned", "streamed"]),
    ) {
        let (config, shape) = k3();
        let at = |mb: u64| {
            let sets = [
                format!("memory.budget={mb} MB"), format!("trunk.pinned={pinned}"), format!("trunk.head={head}"),
                "trunk.block=64 MiB".to_owned(),
            ];
            let preset = Preset::load(LADDER[rung], &sets).unwrap();
            plan(&preset, &config, &shape, &machine(400 * GB))
        };
        let Ok(small) = at(budget_mb) else { return Ok(()) };
        prop_assert!(small.ledger.total_bytes() <= small.ledger.budget_bytes);
        let slots: usize = small.experts.arena_slots.iter().sum();
        prop_assert_eq!(slots as u64 * small.experts.slot_bytes, line(&small, "expert arenas"));
        prop_assert_eq!(small.experts.arena_slots[0], 0, "layer 0 is dense");
        let (least, most) = (
            small.experts.arena_slots[1..].iter().min(), small.experts.arena_slots[1..].iter().max());
        prop_assert!(most.zip(least).is_some_and(|(most, least)| most - least <= 1));
        // More memory: at least as many layers and the head; and together with the arenas at least as
        // many bytes, up to the slot that rounding may cost.
        let big = at(budget_mb + more_mb).unwrap();
        prop_assert!(big.trunk.pinned_layers.len() >= small.trunk.pinned_layers.len());
        prop_assert!(big.trunk.pinned_head >= small.trunk.pinned_head);
        let held = |p: &Plan| p.trunk.pinned_bytes + line(p, "expert arenas");
        prop_assert!(held(&big) + big.experts.slot_bytes > held(&small));
        if big.trunk.pinned_layers == small.trunk.pinned_layers && big.trunk.pinned_head == small.trunk.pinned_head {
            prop_assert!(held(&big) >= held(&small));
        }
    }
}
