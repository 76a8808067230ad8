//! Series of runs that are compared: repeated in turn, so that what the machine does besides falls on all of
//! them, and held to one stream of tokens.

use anyhow::anyhow;
use serde::Serialize;

use super::{Generate, K3, Report};
use crate::Failure;
use crate::bench::median;

/// Runs of several cases, case by case.
pub struct Series(pub Vec<Vec<Report>>);

/// What repeats of a run gave.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub mean: f64,
    /// The middle value: one disturbed run does not move it.
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl Spread {
    /// Of at least one value.
    #[must_use]
    pub fn of(values: impl Iterator<Item = f64> + Clone) -> Self {
        let count = values.clone().count().max(1) as f64;
        Self {
            mean: values.clone().sum::<f64>() / count,
            median: median(values.clone().collect()),
            least: values.clone().fold(f64::INFINITY, f64::min),
            most: values.fold(f64::NEG_INFINITY, f64::max),
        }
    }
}

impl Series {
    /// Runs every case once, then every case again in the opposite order, and so on. `note` is told what
    /// runs.
    ///
    /// # Errors
    /// The first run that fails.
    pub fn run(
        k3: &K3,
        cases: &[Generate<'_>],
        repeats: u32,
        note: impl Fn(usize, u32),
    ) -> anyhow::Result<Self> {
        let mut reports: Vec<Vec<Report>> = cases.iter().map(|_| Vec::new()).collect();
        for repeat in 0..repeats {
            let forth = repeat.is_multiple_of(2);
            for step in 0..cases.len() {
                let case = if forth { step } else { cases.len() - 1 - step };
                note(case, repeat);
                reports[case].push(k3.generate(&cases[case])?);
            }
        }
        Ok(Self(reports))
    }

    /// The tokens and the digest of logits that all runs gave.
    ///
    /// # Errors
    /// Runs that differ, or none at all.
    pub fn one_stream(&self) -> Result<Stream, Failure> {
        let mut streams = self.0.iter().flatten().enumerate().map(|(number, r)| (number, Stream::of(r)));
        let (_, first) = streams.next().ok_or_else(|| anyhow!("nothing was run"))?;
        match streams.find(|(_, other)| *other != first) {
            None => Ok(first),
            Some((number, other)) => Err(Failure::Verification(anyhow!(
                "runs differ: the first gave {} with digest {}, run {} gave {} with digest {}",
                first.generated_ids,
                first.logits_digest,
                number + 1,
                other.generated_ids,
                other.logits_digest
            ))),
        }
    }
}

/// What a run gave.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stream {
    pub generated_ids: serde_json::Value,
    pub logits_digest: String,
}

impl Stream {
    fn of(report: &Report) -> Self {
        Self { generated_ids: report.generated_ids.clone(), logits_digest: report.logits_digest.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_of_all_repeats() {
        let s = Spread::of([6.0, 1.0, 2.0].into_iter());
        assert_eq!(s, Spread { mean: 3.0, median: 2.0, least: 1.0, most: 6.0 });
        assert_eq!(Spread::of([6.0, 1.0].into_iter()).median, 3.5);
    }

    #[test]
    fn a_run_that_differs_is_found() {
        let report = |digest: &str| Report { logits_digest: digest.to_owned(), ..Report::default() };
        let series = |digests: &[&str]| Series(digests.iter().map(|d| vec![report(d)]).collect());
        assert_eq!(series(&["a", "a"]).one_stream().ok().map(|s| s.logits_digest), Some("a".into()));
        assert!(matches!(series(&["a", "a", "b"]).one_stream(), Err(Failure::Verification(_))));
        assert!(series(&[]).one_stream().is_err());
    }
}
