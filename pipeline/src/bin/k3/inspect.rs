//! `k3 inspect`: what a model directory holds, and what is missing.

use std::io::Write;
use std::path::PathBuf;

use k3_pipeline::model::config_json::{CONFIG_FILE, read_config};
use k3_pipeline::model::error::ModelError;

use crate::failure::Outcome;
use crate::output;

/// Arguments of `k3 inspect`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Directory with config.json and the weight files.
    model: PathBuf,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> Outcome {
    let config = read_config(&args.model.join(CONFIG_FILE)).map_err(ModelError::from)?;
    let mut out = output::stdout();
    writeln!(out, "{} layers, hidden {}, vocabulary {}", config.layers.len(), config.hidden, config.vocab)?;
    out.flush()?;
    Ok(())
}
