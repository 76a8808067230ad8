//! The loss on a text that was not trained on, against the PyTorch model's.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};
use k3_pipeline::tokenizer::Tokenizer;
use k3_pipeline::units::TokenId;
use serde::Deserialize;

use super::engine::{RESIDENT, open, prefill};
use super::report::Report;

/// Largest relative error of the perplexity: four digits are equal.
const RELATIVE_ERROR_MAX: f64 = 5e-5;

/// What of `golden.json` is read.
#[derive(Deserialize)]
struct Figures {
    heldout: Option<Heldout>,
}

/// The text and what PyTorch says of it.
#[derive(Deserialize)]
struct Heldout {
    /// The text, in the model directory.
    file: String,
    /// Its tokens, special ones not counted.
    tokens: usize,
    /// Mean negative log-likelihood in nats of every token but the first.
    nll_per_token: f64,
}

/// Checks token count and perplexity, where the model has a held-out text.
pub(super) fn check(dir: &Path, report: &mut Report) -> anyhow::Result<()> {
    let path = dir.join("golden/golden.json");
    if !path.is_file() {
        return Ok(());
    }
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let figures: Figures =
        serde_json::from_str(&text).with_context(|| format!("{}: cannot be read", path.display()))?;
    let Some(heldout) = figures.heldout else { return Ok(()) };
    let path = dir.join(&heldout.file);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let ids = Tokenizer::open(dir)?.encode(&text)?;
    let difference =
        (ids.len() != heldout.tokens).then(|| format!("{} instead of {}", ids.len(), heldout.tokens));
    report.equal("held-out tokens", &format!("{} of {}", ids.len(), heldout.file), difference);

    let context = format!("context.tokens={}", ids.len());
    let mut engine = open(dir, &[RESIDENT, &[&context]].concat())?;
    let logits = prefill(&mut engine, &ids, None)?;
    let nats = nats_per_token(&logits, &ids, engine.config().vocab)?;
    let error = ((nats - heldout.nll_per_token).exp() - 1.0).abs();
    let place = format!("{:.6} here, {:.6} in PyTorch", nats.exp(), heldout.nll_per_token.exp());
    report.measured("held-out perplexity, relative error", (error, RELATIVE_ERROR_MAX), place);
    Ok(())
}

/// Mean negative log-likelihood of `ids[1..]`, from the logits [ids, V] of every position.
fn nats_per_token(logits: &[f32], ids: &[TokenId], vocab: usize) -> anyhow::Result<f64> {
    let next = ids.get(1..).unwrap_or_default();
    if next.is_empty() {
        bail!("a held-out text has two tokens at least");
    }
    let nats = logits.chunks_exact(vocab).zip(next).map(|(row, id)| {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|v| f64::from(v - largest).exp()).sum();
        // An id beyond the row gives a NaN, which no check passes.
        let chosen = row.get(id.0 as usize).copied().unwrap_or(f32::NAN);
        sum.ln() + f64::from(largest) - f64::from(chosen)
    });
    Ok(nats.sum::<f64>() / next.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_odds_cost_the_logarithm_of_their_number() {
        let ids = [0, 3, 1].map(TokenId);
        let even = nats_per_token(&[7.5; 12], &ids, 4).unwrap();
        assert!((even - 4.0_f64.ln()).abs() < 1e-12, "{even}");
        // The second token is twice as likely as each of the others: 2/5 and 1/5.
        let two = 2.0_f32.ln();
        let rows = [[0.0, 0.0, 0.0, two], [two, 0.0, 0.0, 0.0], [9.0; 4]].concat();
        let found = nats_per_token(&rows, &ids, 4).unwrap();
        assert!((found - (2.5_f64.ln() + 5.0_f64.ln()) / 2.0).abs() < 1e-6, "{found}");
        assert!(nats_per_token(&rows, &ids[..1], 4).is_err());
    }
}
