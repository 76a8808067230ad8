//! The report of a run, on stderr.

use k3_pipeline::stats::{PhaseStats, Stats};

use crate::{output, terminal};

/// Prints what a run has cost.
pub(crate) fn print(stats: &Stats) {
    terminal::report(&text(stats));
}

fn text(stats: &Stats) -> String {
    let mut lines = vec![format!(
        "preset {}, {} on {}; opened in {:.2} s",
        stats.preset,
        stats.isa,
        count(stats.threads as u64, "thread"),
        stats.open_seconds
    )];
    lines.extend(phase("prompt", &stats.prefill));
    lines.extend(phase("output", &stats.decode));
    let store = &stats.store;
    lines.push(format!(
        "read    trunk {}, experts {}, embedding {}",
        output::size(store.trunk_bytes),
        output::size(store.expert_bytes),
        output::size(store.embed_bytes)
    ));
    if store.expert_requests > 0 {
        let share = 100.0 * store.expert_hits as f64 / store.expert_requests as f64;
        lines.push(format!(
            "experts {} asked for, {} found in the cache ({share:.1} %)",
            store.expert_requests, store.expert_hits
        ));
    }
    for disk in &stats.disks {
        let direct = match disk.direct_files {
            0 => "buffered".to_owned(),
            n if n == disk.files => "O_DIRECT".to_owned(),
            n => format!("O_DIRECT for {n} of {} files", disk.files),
        };
        let why = disk.fallback.as_ref().map_or(String::new(), |why| format!(" ({why})"));
        lines.push(format!(
            "disk    {}: {}, {direct}, depth {}{why}",
            disk.directory.display(),
            disk.engine,
            disk.depth
        ));
    }
    let peak = stats.peak_rss_bytes.map_or("unknown".to_owned(), output::size);
    lines.push(format!("memory  peak {peak}, planned {}", output::size(stats.planned_bytes)));
    lines.iter().map(|line| format!("{line}\n")).collect()
}

fn phase(name: &str, phase: &PhaseStats) -> Option<String> {
    let (per_token, waited) = (phase.seconds_per_token()?, phase.waited_share()?);
    Some(format!(
        "{name}  {} in {} and {:.2} s: {per_token:.4} s per token, {:.0} % waiting for the disk",
        count(phase.tokens, "token"),
        count(phase.passes, "pass"),
        phase.seconds,
        100.0 * waited
    ))
}

/// "1 token", "2 tokens", "3 passes".
pub(crate) fn count(n: u64, what: &str) -> String {
    match (n, what.ends_with('s')) {
        (1, _) => format!("1 {what}"),
        (_, true) => format!("{n} {what}es"),
        (_, false) => format!("{n} {what}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::count;

    #[test]
    fn words_agree_with_numbers() {
        assert_eq!((count(1, "pass"), count(2, "pass")), ("1 pass".into(), "2 passes".into()));
        assert_eq!((count(1, "token"), count(0, "token")), ("1 token".into(), "0 tokens".into()));
    }
}
