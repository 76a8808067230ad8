//! What every layer does, at the last of the 40 positions, and what the router chose at all of them.

use std::collections::HashMap;
use std::path::Path;

use k3_golden::{Golden, Tensor};
use k3_kernel::Columns;
use k3_pipeline::forward::{Tap, TapPoint};
use k3_pipeline::session::{Prefill, Session};
use k3_pipeline::units::LayerIndex;

use super::engine::{RESIDENT, ids, open};
use super::report::Report;

/// Largest relative root-mean-square error of one vector inside the model, against float32: as much
/// as is allowed for logits.
const RELATIVE_RMS_MAX: f64 = 3e-5;
/// Largest error of a router weight.
const WEIGHT_ERROR_MAX: f64 = 3e-5;
const PROMPT: &str = "p40";

/// Keeps what it sees.
#[derive(Default)]
struct Recorder {
    last: HashMap<(TapPoint, Option<LayerIndex>), Vec<f32>>,
    router: Vec<(LayerIndex, Vec<(u16, f32)>)>,
}

impl Tap for Recorder {
    fn values(&mut self, point: TapPoint, layer: Option<LayerIndex>, columns: Columns<'_>) {
        let last = columns.count.checked_sub(1).map(|t| columns.column(t).to_vec());
        self.last.insert((point, layer), last.unwrap_or_default());
    }

    fn router(&mut self, layer: LayerIndex, ids: &[u16], weights: &[f32], k: usize) {
        let choices = ids.iter().copied().zip(weights.iter().copied()).collect();
        debug_assert_eq!(ids.len() % k, 0);
        self.router.push((layer, choices));
    }
}

/// Checks router and layers on the prompt of 40 tokens.
pub(super) fn check(dir: &Path, golden: &Golden, report: &mut Report) -> anyhow::Result<()> {
    let mut engine = open(dir, RESIDENT)?;
    let text = ids(golden, &format!("{PROMPT}.ids"))?;
    let mut recorder = Recorder::default();
    let how = Prefill { tap: Some(&mut recorder), ..Prefill::default() };
    Session::new(&engine).prefill(&mut engine, &text, how)?;
    let k = engine.config().moe.experts_per_token;
    router(golden, &recorder, k, report)?;
    for (tensor, point) in [
        ("attn_mix", TapPoint::AttentionMix),
        ("attn_out", TapPoint::AttentionOut),
        ("mlp_mix", TapPoint::MlpMix),
        ("mlp_out", TapPoint::MlpOut),
        ("prefix_sum", TapPoint::Prefix),
    ] {
        let expected = golden.f32(&format!("{PROMPT}.last.{tensor}"))?;
        let layers = (0..).map(LayerIndex).take(expected.rows());
        let found = layers.map(|layer| (format!("layer {layer}"), recorder.last.get(&(point, Some(layer)))));
        compare(tensor, &expected, found, report);
    }
    for (tensor, point) in [
        ("embed", TapPoint::Embedding),
        ("output_mix", TapPoint::OutputMix),
        ("final_norm", TapPoint::FinalNorm),
    ] {
        let expected = golden.f32(&format!("{PROMPT}.last.{tensor}"))?;
        let found = [("the model".to_owned(), recorder.last.get(&(point, None)))];
        compare(tensor, &expected, found.into_iter(), report);
    }
    Ok(())
}

/// Compares vectors with the rows of `expected` and notes the worst.
fn compare<'f>(
    name: &str,
    expected: &Tensor<f32>,
    found: impl Iterator<Item = (String, Option<&'f Vec<f32>>)>,
    report: &mut Report,
) {
    let (mut worst, mut worst_place) = (0.0f64, String::from("nowhere"));
    for (row, (place, found)) in found.enumerate() {
        let error = found.map_or(f64::INFINITY, |found| relative_rms(found, expected.row(row)));
        if error > worst || error.is_nan() {
            (worst, worst_place) = (error, place);
        }
    }
    report.measured(format!("{PROMPT} last {name}, relative rms"), (worst, RELATIVE_RMS_MAX), worst_place);
}

fn relative_rms(found: &[f32], expected: &[f32]) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let (mut squares, mut scale) = (0.0, 0.0);
    for (found, expected) in found.iter().zip(expected) {
        squares += (f64::from(*found) - f64::from(*expected)).powi(2);
        scale += f64::from(*expected).powi(2);
    }
    (squares / scale).sqrt()
}

/// The same experts at every position and layer, with the same weights.
fn router(golden: &Golden, recorder: &Recorder, k: usize, report: &mut Report) -> anyhow::Result<()> {
    let layers = golden.i32(&format!("{PROMPT}.router.moe_layers"))?.data;
    let ids = golden.i32(&format!("{PROMPT}.router.ids"))?;
    let weights = golden.f32(&format!("{PROMPT}.router.weights"))?;
    let (mut row, mut difference) = (0, None);
    let (mut worst, mut place) = (0.0f64, String::from("nowhere"));
    let seen: Vec<i32> = recorder.router.iter().map(|(layer, _)| i32::from(layer.0)).collect();
    if seen != layers {
        difference = Some(format!("layers with experts are {seen:?} instead of {layers:?}"));
    }
    for (layer, choices) in &recorder.router {
        for (position, choices) in choices.chunks(k).enumerate() {
            let mut rising = choices.to_vec();
            rising.sort_by_key(|(id, _)| *id);
            let found: Vec<i32> = rising.iter().map(|(id, _)| i32::from(*id)).collect();
            if found != ids.row(row) && difference.is_none() {
                let expected = ids.row(row);
                difference =
                    Some(format!("layer {layer}, position {position}: {found:?} instead of {expected:?}"));
            }
            for ((_, found), expected) in rising.iter().zip(weights.row(row)) {
                let error = f64::from((found - expected).abs());
                if error > worst || error.is_nan() {
                    (worst, place) = (error, format!("layer {layer}, position {position}"));
                }
            }
            row += 1;
        }
    }
    if row != ids.rows() && difference.is_none() {
        difference = Some(format!("{row} choices instead of {}", ids.rows()));
    }
    report.equal(format!("{PROMPT} router ids"), &format!("{row} choices of {k}"), difference);
    report.measured(format!("{PROMPT} router weights"), (worst, WEIGHT_ERROR_MAX), place);
    Ok(())
}
