//! One plan as a table.

use std::io::Write;

use k3_pipeline::plan::{BudgetSource, Plan};

use super::Report;
use crate::failure::Outcome;
use crate::output::{self, grouped, size};

/// Prints the ledger, the traffic and what follows from them.
pub(super) fn print(report: &Report) -> Outcome {
    let plan = &report.plan;
    let mut out = output::stdout();
    writeln!(out, "preset {}", plan.preset)?;
    for section in [model(plan), memory(plan), traffic(report)] {
        writeln!(out)?;
        for line in section {
            writeln!(out, "{line}")?;
        }
    }
    if let Some(line) = prediction(report) {
        writeln!(out, "\n{line}")?;
    }
    if !report.fits_this_machine {
        writeln!(out, "\nThis machine does not have the memory: a run would be refused here.")?;
    }
    out.flush()?;
    Ok(())
}

fn row(name: &str, bytes: u64, note: &str) -> String {
    let line = format!("  {name:<36}{:>21}  {:>9}  {note}", grouped(bytes), size(bytes));
    line.trim_end().to_owned()
}

fn model(plan: &Plan) -> Vec<String> {
    let m = &plan.model;
    vec![
        "model".to_owned(),
        row("one routed expert", m.expert_bytes, ""),
        row("all routed experts", m.experts_bytes, ""),
        row("experts touched per token", plan.traffic.expert_bytes_max, ""),
        row(&format!("dense trunk, {} layers", m.layers), m.trunk_bytes, ""),
        row("largest layer", m.layer_bytes_max, ""),
        row("embedding", m.embed_bytes, ""),
        row("head", m.head_bytes, ""),
        row("KDA state of a sequence", m.state_bytes, "at any context length"),
        row("convolution history of a sequence", m.history_bytes, "at any context length"),
        row("latent KV cache", m.latent_bytes_per_token, "per position"),
    ]
}

fn memory(plan: &Plan) -> Vec<String> {
    let total = plan.ledger.total_bytes();
    let share = |bytes: u64| format!("{:5.1} %", 100.0 * bytes as f64 / total.max(1) as f64);
    let mut lines = vec!["memory".to_owned()];
    for line in &plan.ledger.lines {
        let note = note(plan, &line.name);
        lines.push(row(&line.name, line.bytes, &format!("{}  {note}", share(line.bytes))));
    }
    lines.push(row("total", total, &share(total)));
    let source = match &plan.ledger.budget_from {
        BudgetSource::Preset => "as the preset asks".to_owned(),
        BudgetSource::Machine => "what this machine has free, less head-room".to_owned(),
        BudgetSource::Cgroup { path } => format!("what {} leaves, less head-room", path.display()),
    };
    lines.push(row("budget", plan.ledger.budget_bytes, &source));
    lines
}

/// What a line of the ledger is made of.
fn note(plan: &Plan, name: &str) -> String {
    let trunk = &plan.trunk;
    let experts = &plan.experts;
    match name {
        "pinned layers" if trunk.dealt_blocks.is_empty() => {
            format!("{} of {}", trunk.pinned_layers.len(), plan.model.layers)
        }
        "pinned layers" => {
            format!("{} of {}, dealt out block by block", trunk.pinned_layers.len(), plan.model.layers)
        }
        "ring" => format!("{} slots of {}", trunk.ring_slots, size(trunk.slot_bytes)),
        "expert arenas" => arenas(&experts.arena_slots),
        "expert staging" => {
            format!("{} slots of {}", experts.staging_slots, size(experts.slot_bytes))
        }
        "KDA state" if plan.sequences_max == 1 => "1 sequence".to_owned(),
        "KDA state" => format!("{} sequences", plan.sequences_max),
        "latent KV cache" => format!("{} positions", grouped(plan.context_tokens as u64)),
        "activations and logits" => format!("{} tokens per pass", plan.pass_tokens_max),
        "drafts" => format!("of up to {} tokens", plan.draft_tokens_max),
        "process" => format!("{} compute threads", plan.compute.threads),
        _ => String::new(),
    }
}

/// "1,234 slots, 13 or 14 per layer".
fn arenas(slots: &[usize]) -> String {
    let total: usize = slots.iter().sum();
    let most = slots.iter().copied().max().unwrap_or(0);
    let per_layer = if most > 0 && slots.iter().any(|&s| s + 1 == most) && total > 0 {
        format!("{} or {most}", most - 1)
    } else {
        most.to_string()
    };
    format!("{} slots, {per_layer} per layer", grouped(total as u64))
}

fn traffic(report: &Report) -> Vec<String> {
    let plan = &report.plan;
    let t = &plan.traffic;
    let layers = plan.model.layers;
    let streamed = layers - plan.trunk.pinned_layers.len();
    let matrices = t.touched_trunk_bytes;
    let held = 100.0 * (matrices.saturating_sub(t.trunk_bytes)) as f64 / matrices.max(1) as f64;
    vec![
        match &plan.trunk.pack {
            Some(pack) => format!("read from disk per token, trunk and head from {}", pack.display()),
            None => "read from disk per token".to_owned(),
        },
        row("trunk", t.trunk_bytes, &format!("{streamed} of {layers} layers; {held:.1} % is in memory")),
        row("head", t.head_bytes, if plan.trunk.pinned_head { "in memory" } else { "" }),
        row("experts", t.expert_bytes_max, "at most: without a single cache hit"),
        row("embedding", t.embed_bytes, "one row"),
        row("total", t.disk_bytes_max(), "at most"),
    ]
}

fn prediction(report: &Report) -> Option<String> {
    let p = report.prediction.as_ref()?;
    let memory = match p.memory_seconds {
        Some(seconds) => format!("memory {seconds:.2} s"),
        None => "memory unknown: give --memory-rate".to_owned(),
    };
    Some(format!(
        "predicted from bytes and rates alone: {:.2} s per token without cache hits (disk {:.2} s, {memory}; \
         they overlap)",
        p.seconds_per_token, p.disk_seconds
    ))
}
