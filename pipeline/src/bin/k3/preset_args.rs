//! Arguments that choose a preset, shared by the subcommands that run or plan.

use std::path::{Path, PathBuf};

use k3_pipeline::model::config::ModelConfig;
use k3_pipeline::model::config_json::read_config;
use k3_pipeline::model::error::ModelError;
use k3_pipeline::model::tensors::ModelTensors;
use k3_pipeline::plan::ModelShape;
use k3_pipeline::preset::Preset;

use crate::failure::Failure;

/// Which preset, with which changes.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PresetArgs {
    /// A built-in preset (see `k3 preset list`), or the path of a preset file.
    #[arg(long, default_value = "auto", value_name = "NAME|FILE")]
    pub(crate) preset: String,
    /// Change one key of the preset, as in `--set trunk.ring_slots=4`; may be repeated. `k3 preset show`
    /// explains the keys.
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Memory of the whole process, as in 24GB: short for `--set memory.budget=SIZE`.
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) memory: Option<String>,
}

impl PresetArgs {
    /// Reads the preset and applies the changes.
    pub(crate) fn load(&self) -> Result<Preset, Failure> {
        self.load_as(&self.preset)
    }

    /// The same changes on another preset.
    pub(crate) fn load_as(&self, preset: &str) -> Result<Preset, Failure> {
        let mut sets = self.set.clone();
        sets.extend(self.memory.as_ref().map(|size| format!("memory.budget={size}")));
        Preset::load(preset, &sets).map_err(Failure::refused)
    }
}

/// Which model to plan for.
#[derive(Clone, Debug, clap::Args)]
#[group(multiple = false)]
pub(crate) struct ModelArgs {
    /// Model directory: config.json and weight files. Without it, the preset's own.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// A config.json alone: sizes as released are taken for granted.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

impl ModelArgs {
    /// Reads the configuration and the sizes of the tensors; `preset` may name the directory.
    pub(crate) fn load(&self, preset: &Preset) -> Result<(ModelConfig, ModelShape), Failure> {
        match (&self.config, self.model.clone().or_else(|| preset.model_dir())) {
            (Some(file), _) => from_config(file),
            (None, Some(dir)) => from_dir(&dir),
            (None, None) => {
                Err(Failure::refused(anyhow::anyhow!("preset \"{}\" names no model", preset.name))
                    .hint("give --model DIR, or --config FILE to plan from a config.json alone"))
            }
        }
    }
}

fn from_config(file: &Path) -> Result<(ModelConfig, ModelShape), Failure> {
    let config = read_config(file).map_err(ModelError::from)?;
    let shape = ModelShape::from_config(&config);
    Ok((config, shape))
}

fn from_dir(dir: &Path) -> Result<(ModelConfig, ModelShape), Failure> {
    let (config, tensors) = ModelTensors::open(dir, &[])?;
    let shape = ModelShape::from_tensors(&config, &tensors);
    Ok((config, shape))
}
