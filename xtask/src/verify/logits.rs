//! Logits at every position and greedy continuations, against the released code.

use std::path::Path;

use k3_golden::{Golden, Tensor};
use k3_pipeline::session::{Prefill, Session};
use k3_pipeline::units::TokenId;

use super::engine::{RESIDENT, ids, most_likely, open, prefill};
use super::report::Report;

/// Largest relative root-mean-square error of all logits of a prompt, against float64.
const RELATIVE_RMS_MAX: f64 = 3e-5;
/// Largest error of any logit, against float64.
const ERROR_MAX: f64 = 3e-3;

/// How far two sets of logits lie apart.
struct Distance {
    relative_rms: f64,
    largest: f64,
    place: usize,
}

impl Distance {
    fn new(found: &[f32], exact: &[f64]) -> Self {
        let (mut squares, mut scale, mut largest, mut place) = (0.0, 0.0, 0.0, 0);
        for (i, (found, exact)) in found.iter().zip(exact).enumerate() {
            let error = f64::from(*found) - exact;
            squares += error * error;
            scale += exact * exact;
            if error.abs() > largest || error.is_nan() {
                (largest, place) = (error.abs(), i);
            }
        }
        if found.len() != exact.len() {
            squares = f64::INFINITY;
        }
        Self { relative_rms: (squares / scale).sqrt(), largest, place }
    }
}

/// Checks every prompt.
pub(super) fn check(
    dir: &Path,
    golden: &Golden,
    prompts: &[String],
    report: &mut Report,
) -> anyhow::Result<()> {
    let mut engine = open(dir, RESIDENT)?;
    for prompt in prompts {
        let text = ids(golden, &format!("{prompt}.ids"))?;
        let exact = golden.f64(&format!("{prompt}.logits_f64"))?;
        let found = prefill(&mut engine, &text, None)?;
        let distance = Distance::new(&found, &exact.data);
        let torch = Distance::new(&golden.f32(&format!("{prompt}.logits"))?.data, &exact.data);
        let width = exact.data.len() / exact.rows().max(1);
        let floor = format!(
            "{:.2} x the released code's own float32 error",
            distance.relative_rms / torch.relative_rms
        );
        report.measured(
            format!("{prompt} logits, relative rms"),
            (distance.relative_rms, RELATIVE_RMS_MAX),
            floor,
        );
        let place = format!("position {}, token {}", distance.place / width, distance.place % width);
        report.measured(format!("{prompt} logits, largest error"), (distance.largest, ERROR_MAX), place);
        greedy(&mut engine, golden, (prompt, &text), report)?;
    }
    Ok(())
}

/// The greedy continuation: the same tokens, and the logits they were chosen from.
fn greedy(
    engine: &mut k3_pipeline::engine::Engine,
    golden: &Golden,
    (prompt, text): (&str, &[TokenId]),
    report: &mut Report,
) -> anyhow::Result<()> {
    let expected = ids(golden, &format!("{prompt}.greedy_ids"))?;
    let logits: Tensor<f32> = golden.f32(&format!("{prompt}.greedy_logits"))?;
    let mut session = Session::new(engine);
    let (mut found, mut worst, mut place) = (Vec::new(), 0.0f64, 0);
    let mut row = session.prefill(engine, text, Prefill::default())?.data().to_vec();
    for step in 0..expected.len() {
        for (found, expected) in row.iter().zip(logits.row(step)) {
            let error = f64::from((found - expected).abs());
            if error > worst || error.is_nan() {
                (worst, place) = (error, step);
            }
        }
        let next = most_likely(&row);
        found.push(next);
        row = session.decode(engine, next)?.data().to_vec();
    }
    let difference = found.iter().zip(&expected).position(|(f, e)| f != e);
    let difference =
        difference.map(|step| format!("step {step}: token {} instead of {}", found[step], expected[step]));
    report.equal(format!("{prompt} greedy ids"), &format!("{} tokens", expected.len()), difference);
    // Against float32 numbers: both sides may be off by as much as one may against float64.
    let limit = (worst, 2.0 * ERROR_MAX);
    report.measured(format!("{prompt} greedy logits"), limit, format!("step {place}"));
    Ok(())
}
