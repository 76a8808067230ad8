//! The doctor's figures for people.

use std::io::Write;

use super::Report;
use crate::failure::Outcome;
use crate::output::{self, size};

/// Prints the report.
pub(super) fn print(report: &Report) -> Outcome {
    let mut out = output::stdout();
    for line in figures(report).into_iter().chain(presets(report)).chain(conclusion(report)) {
        writeln!(out, "{line}")?;
    }
    out.flush()?;
    Ok(())
}

fn speed(bytes_per_second: f64) -> String {
    format!("{}/s", size(bytes_per_second as u64))
}

fn figures(report: &Report) -> Vec<String> {
    let memory = &report.memory;
    let mut lines = vec![
        format!("cores         {}, {}", report.cores, report.isa),
        format!("memory        {}, {} available", size(memory.total_bytes), size(memory.available_bytes)),
    ];
    lines.extend(memory.cgroup.as_ref().map(|c| {
        format!("control group {}: {} of {} used", c.path.display(), size(c.used_bytes), size(c.limit_bytes))
    }));
    let speeds = &report.memory_speed;
    lines.push(format!("for a plan    {} at most, head-room kept", size(memory.plan_bytes_max)));
    lines.push(format!(
        "memory speed  {} read, {} of bf16 weights multiplied, {} threads",
        speed(speeds.read_bytes_per_second),
        speed(speeds.product_bytes_per_second),
        speeds.threads
    ));
    lines.extend(report.space.as_ref().map(|space| {
        let (free, total) = (size(space.free_bytes), size(space.total_bytes));
        format!("disk space    {free} of {total} free at {}", space.path.display())
    }));
    if let Some(disk) = &report.disk {
        lines.push(format!(
            "disk speed    {}: random extents of {}, {} at once, {} in {:.2} s",
            speed(disk.bytes_per_second),
            size(disk.extent_bytes),
            disk.extents_at_once,
            size(disk.bytes),
            disk.seconds
        ));
        lines.extend(disk.disks.iter().map(|d| {
            let (path, direct) = (d.directory.display(), d.direct_files);
            format!(
                "              {path}: {}, depth {}, O_DIRECT for {direct} of {} files",
                d.engine, d.depth, d.files
            )
        }));
    }
    lines.extend(report.unknown.iter().map(|what| format!("not known     {what}")));
    lines
}

fn presets(report: &Report) -> Vec<String> {
    if report.presets.is_empty() {
        return Vec::new();
    }
    let mut lines =
        vec![String::new(), "preset            memory   disk per token   predicted per token".to_owned()];
    lines.extend(report.presets.iter().map(|c| match &c.outlook {
        Some(o) => format!(
            "{:<12}{:>12}{:>17}{:>22}",
            c.preset,
            size(o.planned_bytes),
            size(o.disk_bytes_per_token_max),
            o.prediction.map_or("-".to_owned(), |p| format!("{:.3} s", p.seconds_per_token))
        ),
        None => format!("{:<12}does not fit: k3 plan --preset {} says why", c.preset, c.preset),
    }));
    lines
}

fn conclusion(report: &Report) -> Vec<String> {
    let Some(advice) = &report.advice else {
        return vec![String::new(), "No built-in preset fits this machine.".to_owned()];
    };
    let why = match advice.seconds_per_token {
        Some(seconds) => {
            format!("predicted {seconds:.3} s per token without cache hits, from bytes and speeds alone")
        }
        None => "by memory and bytes per token alone".to_owned(),
    };
    let mut lines = vec![String::new(), format!("advice: preset {}, {why}. Type:", advice.preset)];
    lines.extend(advice.commands.iter().map(|command| format!("  {command}")));
    if !advice.pack_commands.is_empty() {
        lines.push("with a packed trunk fewer bytes are read, with the same output:".to_owned());
        lines.extend(advice.pack_commands.iter().map(|command| format!("  {command}")));
    }
    lines
}
