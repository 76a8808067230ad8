//! Several plans side by side.

use std::io::Write;

use k3_pipeline::plan::{Plan, Prediction};

use super::Report;
use crate::failure::Outcome;
use crate::output;

/// What one row shows of a plan.
type Cell = Box<dyn Fn(&Report) -> String>;

/// Prints one column per plan.
pub(super) fn print(reports: &[Report]) -> Outcome {
    let mut out = output::stdout();
    for (name, cell) in rows(reports) {
        let mut line = format!("{name:<26}");
        for report in reports {
            line.push_str(&format!("{:>16}", cell(report)));
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    out.flush()?;
    Ok(())
}

fn human(bytes: u64) -> String {
    if bytes == 0 { "-".to_owned() } else { output::size(bytes) }
}

fn rows(reports: &[Report]) -> Vec<(String, Cell)> {
    let mut rows: Vec<(String, Cell)> = vec![("preset".to_owned(), Box::new(|r| r.plan.preset.clone()))];
    let names = reports.first().map(|r| &r.plan.ledger.lines[..]).unwrap_or_default();
    for (index, line) in names.iter().enumerate() {
        let bytes = move |plan: &Plan| plan.ledger.lines.get(index).map_or(0, |l| l.bytes);
        rows.push((format!("  {}", line.name), Box::new(move |r| human(bytes(&r.plan)))));
    }
    let mut add = |name: &str, cell: Cell| rows.push((name.to_owned(), cell));
    add("memory", Box::new(|r| human(r.total_bytes)));
    add("budget", Box::new(|r| human(r.plan.ledger.budget_bytes)));
    add("fits this machine", Box::new(|r| if r.fits_this_machine { "yes" } else { "no" }.to_owned()));
    add("pinned layers", Box::new(|r| r.plan.trunk.pinned_layers.len().to_string()));
    add("expert slots", Box::new(|r| r.plan.experts.arena_slots.iter().sum::<usize>().to_string()));
    add("context", Box::new(|r| r.plan.context_tokens.to_string()));
    add("sequences", Box::new(|r| r.plan.sequences_max.to_string()));
    add("tokens per pass", Box::new(|r| r.plan.pass_tokens_max.to_string()));
    add("  trunk read per token", Box::new(|r| human(r.plan.traffic.trunk_bytes)));
    add("  head read per token", Box::new(|r| human(r.plan.traffic.head_bytes)));
    add("  experts, no cache hits", Box::new(|r| human(r.plan.traffic.expert_bytes_max)));
    add("disk per token, at most", Box::new(|r| human(r.disk_bytes_per_token_max)));
    let Some(predicted) = reports.iter().find_map(|r| r.prediction) else { return rows };
    let seconds = |time: fn(&Prediction) -> Option<f64>| -> Cell {
        let shown = move |r: &Report| Some(format!("{:.2} s", time(r.prediction.as_ref()?)?));
        Box::new(move |r| shown(r).unwrap_or_default())
    };
    match predicted.memory_seconds {
        Some(_) => {
            add("  disk time per token", seconds(|p| Some(p.disk_seconds)));
            add("  memory time per token", seconds(|p| p.memory_seconds));
            add("predicted, the longer", seconds(|p| Some(p.seconds_per_token)));
        }
        // Without --memory-rate.
        None => add("predicted, disk alone", seconds(|p| Some(p.disk_seconds))),
    }
    rows
}
