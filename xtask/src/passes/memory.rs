//! Peak memory beside the plan's figure, over presets and sizes of a pass.

use anyhow::Context;
use k3_pipeline::causes::with_causes;
use serde::Serialize;

use super::{Args, Goal, Model};
use crate::run_k3::K3;

/// Tokens generated.
const TOKENS: usize = 3;

/// Runs: preset and changes.
const RUNS: &[(&str, &[&str])] = &[
    ("pocket", &[]),
    ("pocket", &["pass.tokens=32", "pass.draft_tokens=8"]),
    ("laptop", &[]),
    ("laptop", &["pass.tokens=8", "trunk.pinned=0", "experts.cache=0"]),
    ("laptop", &["pass.tokens=256", "context.snapshots=4"]),
    ("laptop", &["pass.tokens=2048", "experts.cache=1GB"]),
    ("auto", &["memory.budget=4GB", "context.sequences=4"]),
];

/// The peak of one run.
#[derive(Serialize)]
pub(super) struct Peak {
    run: String,
    planned_bytes: u64,
    peak_rss_bytes: u64,
}

impl Peak {
    pub(super) fn goal(&self) -> Goal {
        let share = self.peak_rss_bytes as f64 / self.planned_bytes as f64;
        Goal::at_most(&format!("{}: peak over planned memory", self.run), share, 1.05)
    }
}

/// Runs what this machine has memory for.
pub(super) fn measure(k3: &K3, model: &Model, args: &Args) -> anyhow::Result<Vec<Peak>> {
    let mut peaks = Vec::new();
    for &(preset, changes) in RUNS {
        let set: Vec<String> = changes.iter().map(|&change| change.to_owned()).collect();
        let run = [&[preset], changes].concat().join(" ");
        match k3.run(&model.generate((preset, &set), usize::from(args.prompt), TOKENS, None), None) {
            Ok(ended) => {
                let planned = ended.json["stats"]["planned_bytes"].as_u64();
                let planned_bytes = planned.context("k3's report has no planned_bytes")?;
                peaks.push(Peak { run, planned_bytes, peak_rss_bytes: ended.peak_rss_bytes });
            }
            Err(error) => eprintln!("{run}: left out: {}", with_causes(error.as_ref())),
        }
    }
    Ok(peaks)
}
