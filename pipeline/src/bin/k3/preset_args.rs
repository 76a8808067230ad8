//! Arguments that choose a preset, shared by the subcommands that run or plan.

use std::path::{Path, PathBuf};

use k3_pipeline::model::config::ModelConfig;
use k3_pipeline::model::config_json::read_config;
use k3_pipeline::model::error::ModelError;
use k3_pipeline::model::tensors::ModelTensors;
use k3_pipeline::plan::ModelShape;
use k3_pipeline::preset::{Preset, PresetError};
use k3_pipeline::store::pack_sizes;

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
        Ok(Preset::load(preset, &sets)?)
    }
}

/// A preset that is refused; what is none at all is told what one is.
impl From<PresetError> for Failure {
    fn from(error: PresetError) -> Self {
        let hint = error.hint();
        let refused = Self::refused(error);
        match hint {
            Some(hint) => refused.hint(hint),
            None => refused,
        }
    }
}

/// Where weight files lie that are not in the model directory.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ShardArgs {
    /// More directories with weight files, as when a checkpoint is spread over disks; each disk is read
    /// through a queue of its own. May be repeated.
    #[arg(long, value_name = "DIR,DIR", value_delimiter = ',')]
    pub(crate) shards: Vec<PathBuf>,
}

impl ShardArgs {
    /// Opens the model in `dir` and in these directories.
    pub(crate) fn open(&self, dir: &Path) -> Result<(ModelConfig, ModelTensors), Failure> {
        if let Some(missing) = self.shards.iter().find(|shards| !shards.is_dir()) {
            return Err(Failure::refused(anyhow::anyhow!("--shards: {} is no directory", missing.display()))
                .hint("give the directories that hold weight files, separated by commas"));
        }
        Ok(ModelTensors::open(dir, &self.shards)?)
    }
}

/// The sizes of a model's tensors, and of the blocks of the pack that the preset names.
pub(crate) fn measured_shape(
    preset: &Preset,
    config: &ModelConfig,
    tensors: &ModelTensors,
) -> Result<ModelShape, Failure> {
    let mut shape = ModelShape::from_tensors(config, tensors);
    if let Some(path) = &preset.trunk.pack {
        let sizes = pack_sizes(path, (config, tensors), preset.trunk.block.0);
        let refused = |e| {
            Failure::refused(e)
                .hint("trunk.pack names it: k3 pack makes one, and without that key none is used")
        };
        shape.pack = Some(sizes.map_err(refused)?);
    }
    Ok(shape)
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

/// A model to plan for.
pub(crate) struct PlannedModel {
    /// Its configuration.
    pub(crate) config: ModelConfig,
    /// Its tensors, where there is more than a configuration.
    tensors: Option<ModelTensors>,
}

impl PlannedModel {
    /// Sizes under `preset`, which may name a pack.
    pub(crate) fn shape(&self, preset: &Preset) -> Result<ModelShape, Failure> {
        match &self.tensors {
            Some(tensors) => measured_shape(preset, &self.config, tensors),
            None => Ok(ModelShape::from_config(&self.config)),
        }
    }
}

impl ModelArgs {
    /// Reads the configuration and the headers of the weight files; `preset` may name the directory.
    pub(crate) fn load(&self, preset: &Preset, shards: &ShardArgs) -> Result<PlannedModel, Failure> {
        match (&self.config, self.model.clone().or_else(|| preset.model_dir())) {
            (Some(_), _) if !shards.shards.is_empty() => {
                Err(Failure::refused(anyhow::anyhow!("--shards needs weight files, --config has none"))
                    .hint("give --model DIR in place of --config FILE"))
            }
            (Some(file), _) => {
                let config = read_config(file).map_err(ModelError::from)?;
                Ok(PlannedModel { config, tensors: None })
            }
            (None, Some(dir)) => {
                let (config, tensors) = shards.open(&dir)?;
                Ok(PlannedModel { config, tensors: Some(tensors) })
            }
            (None, None) => Err(Failure::refused(anyhow::anyhow!(
                "preset \"{}\" names no model",
                preset.name
            ))
            .hint(
                "give --model DIR, or --config FILE to plan from a config.json alone; --preset demo brings a \
                         small model",
            )),
        }
    }
}
