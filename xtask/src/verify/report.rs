//! The table of checks.

use std::path::Path;

use anyhow::anyhow;
use serde::Serialize;

use crate::Failure;

/// One check and how it went.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Check {
    /// Model, or "kernels".
    pub(super) model: String,
    /// What was compared.
    pub(super) check: String,
    /// Worst error found; 0 where equality is asked for and holds.
    pub(super) worst: f64,
    /// Largest error allowed.
    pub(super) limit: f64,
    /// Where the worst error is, and what else there is to say.
    pub(super) place: String,
}

impl Check {
    fn passed(&self) -> bool {
        self.worst <= self.limit
    }
}

/// All checks so far.
pub(super) struct Report {
    checks: Vec<Check>,
    model: String,
    prints: bool,
}

impl Report {
    pub(super) fn new(prints: bool) -> Self {
        if prints {
            println!(
                "{:<12} {:<34} {:>10} {:>10} {:>9}  where",
                "model", "check", "worst", "allowed", "share"
            );
        }
        Self { checks: Vec::new(), model: "kernels".to_owned(), prints }
    }

    /// The checks that follow are of this model.
    pub(super) fn model(&mut self, dir: &Path) {
        let name = dir.file_name().map(|name| name.to_string_lossy().into_owned());
        self.model = name.unwrap_or_else(|| dir.display().to_string());
    }

    /// Notes a measured error.
    pub(super) fn measured(&mut self, check: impl Into<String>, (worst, limit): (f64, f64), place: String) {
        // A NaN is no number that could be within anything.
        let worst = if worst.is_nan() { f64::INFINITY } else { worst };
        let check = Check { model: self.model.clone(), check: check.into(), worst, limit, place };
        if self.prints {
            let verdict = if check.passed() { "" } else { "FAILED " };
            println!(
                "{:<12} {:<34} {:>10.2e} {:>10.0e} {:>8.1}%  {verdict}{}",
                check.model,
                check.check,
                check.worst,
                check.limit,
                100.0 * check.worst / check.limit,
                check.place
            );
        }
        self.checks.push(check);
    }

    /// Notes something that must be equal; `difference` says where it is not.
    pub(super) fn equal(&mut self, check: impl Into<String>, what: &str, difference: Option<String>) {
        let worst = if difference.is_some() { f64::INFINITY } else { 0.0 };
        let place = difference.unwrap_or_else(|| what.to_owned());
        let check = Check { model: self.model.clone(), check: check.into(), worst, limit: 0.0, place };
        if self.prints {
            let verdict = if check.passed() { "equal" } else { "DIFFERENT" };
            println!(
                "{:<12} {:<34} {verdict:>10} {:>10} {:>9}  {}",
                check.model, check.check, "equal", "", check.place
            );
        }
        self.checks.push(check);
    }

    /// The verdict over all checks.
    pub(super) fn finish(self, json: bool) -> Result<(), Failure> {
        let failed: Vec<&Check> = self.checks.iter().filter(|check| !check.passed()).collect();
        if json {
            println!("{}", serde_json::to_string_pretty(&self.checks)?);
        }
        if let Some(first) = failed.first() {
            return Err(Failure::Verification(anyhow!(
                "{} of {} checks failed, the first: {} {}: {}",
                failed.len(),
                self.checks.len(),
                first.model,
                first.check,
                first.place
            )));
        }
        if self.prints {
            println!("verify: {} checks passed", self.checks.len());
        }
        Ok(())
    }
}
