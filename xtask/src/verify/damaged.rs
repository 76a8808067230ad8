//! The model with a scale byte that is no number: no token may come from it.

use std::path::Path;

use k3_golden::Golden;
use k3_pipeline::session::Session;

use super::engine::{RESIDENT, ids, open};
use super::report::Report;

/// Largest error of a logit before the damage is met, against float32.
const ERROR_MAX: f64 = 6e-3;

/// Feeds the text token by token: good logits up to the damaged expert, then an error that names it.
pub(super) fn check(dir: &Path, golden: &Golden, report: &mut Report) -> anyhow::Result<()> {
    let text = ids(golden, "p9.ids")?;
    let before = golden.f32("p9.logits_before_the_bad_expert")?;
    let mut engine = open(dir, RESIDENT)?;
    let mut session = Session::new(&engine);
    let (mut worst, mut place) = (0.0f64, 0);
    for (position, id) in text.iter().enumerate() {
        match session.decode(&mut engine, *id) {
            Ok(logits) if position < before.rows() => {
                for (found, expected) in logits.data().iter().zip(before.row(position)) {
                    let error = f64::from((found - expected).abs());
                    if error > worst || error.is_nan() {
                        (worst, place) = (error, position);
                    }
                }
            }
            Ok(_) => {
                let found = format!("position {position} gave logits");
                report.equal("scale byte 255", "", Some(found));
                return Ok(());
            }
            Err(error) => {
                let said = error.to_string();
                let named =
                    said.contains("weight_scale") && said.contains("255") && position == before.rows();
                report.measured("logits before it", (worst, ERROR_MAX), format!("position {place}"));
                report.equal(
                    "scale byte 255 is named",
                    &said,
                    (!named).then(|| format!("position {position}: {said}")),
                );
                return Ok(());
            }
        }
    }
    report.equal("scale byte 255", "", Some("never met".to_owned()));
    Ok(())
}
