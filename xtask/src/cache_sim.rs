//! `cargo xtask cache-sim`: replays a trace of expert requests through the engine's own cache policies,
//! with Belady's choice (bypass allowed) as the ceiling that no policy can pass.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Args;
use k3_pipeline::memory::policy::{self, CacheShape, Placement};
use k3_pipeline::plan::CachePolicy;
use k3_pipeline::store::trace::{self, TraceRecord};
use serde::Serialize;

use crate::Failure;

/// Request number of an expert that is never wanted again.
const NEVER: usize = usize::MAX;
/// Cache sizes, as shares of the experts that one position touches.
const SHARES: [f64; 7] = [0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0];

#[derive(Args)]
pub struct Options {
    /// The trace: what `k3 generate --trace FILE` records.
    trace: PathBuf,
    /// Prints one JSON object.
    #[arg(long)]
    json: bool,
}

/// Hits in per cent of all requests after the first position.
#[derive(Debug, Serialize)]
struct Row {
    share: f64,
    slots: usize,
    lru: f64,
    layer_lru: f64,
    layer_rank: f64,
    ceiling: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    requests: usize,
    positions: usize,
    working_set: usize,
    rows: Vec<Row>,
}

pub fn run(options: &Options) -> Result<(), Failure> {
    let path = options.trace.display();
    let text = std::fs::read_to_string(&options.trace).with_context(|| format!("cannot read {path}"))?;
    let records = trace::parse(&text).with_context(|| format!("{path} is not a trace"))?;
    let report = simulate(&records).with_context(|| format!("{path} cannot be simulated"))?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print_table(&report);
    }
    Ok(())
}

fn print_table(report: &Report) {
    println!(
        "{} requests at {} positions; one position touches {} experts",
        report.requests, report.positions, report.working_set
    );
    println!("hits in per cent of all requests after the first position");
    println!(
        "{:>6} {:>7} {:>7} {:>10} {:>11} {:>8}",
        "size", "slots", "lru", "layer-lru", "layer-rank", "ceiling"
    );
    for r in &report.rows {
        println!(
            "{:>6} {:>7} {:>7.1} {:>10.1} {:>11.1} {:>8.1}",
            r.share, r.slots, r.lru, r.layer_lru, r.layer_rank, r.ceiling
        );
    }
}

fn simulate(records: &[TraceRecord]) -> anyhow::Result<Report> {
    let last = records.last().context("it holds no request")?;
    let first = records[0].position;
    ensure!(last.position > first, "it holds one position only");
    let positions = records.chunk_by(|a, b| a.position == b.position).count();
    let requests: usize = records.iter().map(|r| r.wanted.len()).sum();
    let working_set = requests / positions;
    let rows = SHARES
        .iter()
        .map(|&share| {
            let slots = (share * working_set as f64).round() as usize;
            let shape = shape(records, slots);
            let rate = |hits: usize| {
                let counted: usize =
                    records.iter().filter(|r| r.position > first).map(|r| r.wanted.len()).sum();
                100.0 * hits as f64 / counted as f64
            };
            Row {
                share,
                slots,
                lru: rate(replay(records, &shape, CachePolicy::Lru)),
                layer_lru: rate(replay(records, &shape, CachePolicy::LayerLru)),
                layer_rank: rate(replay(records, &shape, CachePolicy::LayerRank)),
                ceiling: rate(belady(records, &shape)),
            }
        })
        .collect();
    Ok(Report { requests, positions, working_set, rows })
}

/// Slots spread evenly over the layers that have experts, some layers with one more.
fn shape(records: &[TraceRecord], slots: usize) -> CacheShape {
    let layers = records.iter().map(|r| r.layer.index() + 1).max().unwrap_or(0);
    let mut experts = vec![0; layers];
    for r in records {
        let most = r.wanted.iter().map(|w| w.expert.index() + 1).max().unwrap_or(0);
        let e = &mut experts[r.layer.index()];
        *e = most.max(*e);
    }
    let routed = experts.iter().filter(|&&e| e > 0).count();
    let mut rank = 0;
    let slots = experts
        .iter()
        .map(|&e| {
            if e == 0 {
                return 0;
            }
            rank += 1;
            slots * rank / routed - slots * (rank - 1) / routed
        })
        .collect();
    CacheShape { slots, experts }
}

fn replay(records: &[TraceRecord], shape: &CacheShape, name: CachePolicy) -> usize {
    let mut policy = policy::build(name, shape);
    let mut placed = Vec::new();
    let mut hits = 0;
    for r in records {
        policy.visit(r.layer, &r.wanted, &mut placed);
        if r.position > records[0].position {
            hits += placed.iter().filter(|p| matches!(p, Placement::Hit(_))).count();
        }
    }
    hits
}

/// Belady's choice with bypass over all layers together: keep those that are wanted again soonest.
fn belady(records: &[TraceRecord], shape: &CacheShape) -> usize {
    let first_expert: Vec<usize> = shape
        .experts
        .iter()
        .scan(0, |sum, &experts| {
            *sum += experts;
            Some(*sum - experts)
        })
        .collect();
    let key = |r: &TraceRecord, i: usize| first_expert[r.layer.index()] + r.wanted[i].expert.index();
    // Request number at which each expert is wanted again, by request.
    let mut again: Vec<usize> = Vec::new();
    let mut seen = vec![NEVER; shape.experts.iter().sum()];
    let total: usize = records.iter().map(|r| r.wanted.len()).sum();
    for r in records.iter().rev() {
        for i in (0..r.wanted.len()).rev() {
            let k = key(r, i);
            let now = total - 1 - again.len();
            again.push(seen[k]);
            seen[k] = now;
        }
    }
    again.reverse();
    let (slots, mut hits, mut now) = (shape.slots_total(), 0, 0);
    // Cached experts by the request that wants them next.
    let mut cached: BTreeSet<usize> = BTreeSet::new();
    for r in records {
        for _ in &r.wanted {
            if cached.remove(&now) && r.position > records[0].position {
                hits += 1;
            }
            if again[now] != NEVER {
                cached.insert(again[now]);
                if cached.len() > slots {
                    cached.pop_last();
                }
            }
            now += 1;
        }
    }
    hits
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published decode trace of the released model, where it lies beside the repository.
    #[test]
    fn hit_rates_of_the_released_model_reach_the_published_figures() {
        let path = crate::root().join("../shared/traces/k3-decode-12.tsv");
        let Ok(text) = std::fs::read_to_string(path) else { return };
        let report = simulate(&trace::parse(&text).unwrap()).unwrap();
        assert_eq!((report.requests, report.positions, report.working_set), (17_664, 12, 1_472));
        let rounded = |pick: fn(&Row) -> f64| -> Vec<u32> {
            report.rows.iter().map(|r| pick(r).round() as u32).collect()
        };
        assert_eq!(rounded(|r| r.lru), [0, 0, 0, 34, 35, 41, 43]);
        assert_eq!(rounded(|r| r.layer_lru), [13, 23, 29, 34, 38, 42, 44]);
        assert_eq!(rounded(|r| r.layer_rank), [14, 23, 30, 34, 39, 41, 44]);
        assert_eq!(rounded(|r| r.ceiling), [23, 36, 41, 44, 47, 47, 47]);
    }

    #[test]
    fn no_policy_passes_the_ceiling_and_a_cache_of_everything_misses_once() {
        let text = "position\tlayer\texperts_in_router_rank_order\n\
                    0\t0\t1,2\n0\t1\t1,2\n1\t0\t2,3\n1\t1\t1,2\n2\t0\t1,2\n2\t1\t3,1\n";
        let records = trace::parse(text).unwrap();
        let everything = CacheShape { slots: vec![4, 4], experts: vec![4, 4] };
        // After the first position only expert 3 is new, once in each layer.
        for policy in [CachePolicy::Lru, CachePolicy::LayerLru, CachePolicy::LayerRank] {
            assert_eq!(replay(&records, &everything, policy), 6, "{policy:?}");
        }
        assert_eq!(belady(&records, &everything), 6);
        for row in simulate(&records).unwrap().rows {
            assert!(row.layer_rank <= row.ceiling && row.layer_lru <= row.ceiling, "{row:?}");
        }
    }

    #[test]
    fn a_trace_of_one_position_or_none_is_refused() {
        assert!(simulate(&[]).is_err());
        let head = "position\tlayer\texperts_in_router_rank_order\n";
        assert!(simulate(&trace::parse(&format!("{head}0\t0\t1,2\n")).unwrap()).is_err());
    }
}
