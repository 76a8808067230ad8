//! From arguments to an open engine, shared by the subcommands that run a model.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use k3_pipeline::engine::{Engine, EngineError};
use k3_pipeline::forward::RunError;
use k3_pipeline::machine::Machine;
use k3_pipeline::model::config::ModelConfig;
use k3_pipeline::model::tensors::ModelTensors;
use k3_pipeline::plan::{Plan, plan};
use k3_pipeline::preset::Preset;
use k3_pipeline::store::StoreOptions;
use k3_pipeline::store::reader::{BlockReader, PreadReader};
use k3_pipeline::store::throttled::ThrottledReader;
use k3_pipeline::tokenizer::Tokenizer;
use k3_pipeline::units::Rate;

use crate::failure::Failure;
use crate::output;
use crate::preset_args::{PresetArgs, ShardArgs, measured_shape};
use crate::progress::Bar;

/// Which model, and the preset to plan it with.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    preset: PresetArgs,
    /// Model directory: config.json, weight files, tokenizer. Without it, the preset's own.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    #[command(flatten)]
    shards: ShardArgs,
}

/// Which model to run, and how.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct EngineArgs {
    #[command(flatten)]
    what: PlanArgs,
    /// Read no faster than this, as from another disk; reads then run on threads.
    #[arg(long, value_name = "RATE", help_heading = "Reading")]
    throttle: Option<Rate>,
    /// Record which experts every layer asks for, for `cargo xtask cache-sim`.
    #[arg(long, value_name = "FILE", help_heading = "Reading")]
    trace: Option<PathBuf>,
}

/// A model and its plan: everything that can be refused has been, nothing is allocated.
pub(crate) struct Planned {
    /// The model directory.
    pub(crate) dir: PathBuf,
    /// The model.
    pub(crate) config: ModelConfig,
    /// Its tensors.
    pub(crate) tensors: ModelTensors,
    /// The plan.
    pub(crate) plan: Plan,
    /// What of the reading is not in the plan.
    store: StoreOptions,
}

impl PlanArgs {
    /// Reads preset and model and makes the plan with the weights of the checkpoint alone, whatever pack
    /// the preset names.
    pub(crate) fn plan_unpacked(&self) -> Result<Planned, Failure> {
        let mut preset = self.preset.load()?;
        preset.trunk.pack = None;
        self.plan_for(&preset)
    }

    fn plan_for(&self, preset: &Preset) -> Result<Planned, Failure> {
        let dir = self.model.clone().or_else(|| preset.model_dir()).ok_or_else(|| {
            Failure::refused(anyhow::anyhow!("preset \"{}\" names no model", preset.name))
                .hint("give --model DIR, or try --preset demo, which brings a small one")
        })?;
        let (config, tensors) = self.shards.open(&dir)?;
        let machine = Machine::detect().map_err(Failure::run)?;
        let shape = measured_shape(preset, &config, &tensors)?;
        let plan = plan(preset, &config, &shape, &machine).map_err(Failure::refused)?;
        Ok(Planned { dir, config, tensors, plan, store: StoreOptions::default() })
    }
}

impl EngineArgs {
    /// Reads preset and model and makes the plan.
    pub(crate) fn plan(&self) -> Result<Planned, Failure> {
        self.plan_with(&[])
    }

    /// The same with more changes of the preset.
    pub(crate) fn plan_with(&self, changes: &[String]) -> Result<Planned, Failure> {
        let mut preset = self.what.preset.load()?;
        preset.apply(changes).map_err(Failure::refused)?;
        let planned = self.what.plan_for(&preset)?;
        if let Some(trace) = &self.trace {
            check_trace(trace)?;
        }
        Ok(Planned { store: self.store(), ..planned })
    }

    /// The file for the trace.
    pub(crate) fn trace(&self) -> Option<&Path> {
        self.trace.as_deref()
    }

    fn store(&self) -> StoreOptions {
        let reader = self.throttle.map(|Rate(bytes)| -> Arc<dyn BlockReader> {
            let rate = bytes.0 as f64;
            Arc::new(ThrottledReader::new(Arc::new(PreadReader), rate, Duration::ZERO))
        });
        StoreOptions { reader, trace: self.trace.clone() }
    }
}

/// Refuses a place for a trace before anything is allocated. The file is made, and empty for now.
fn check_trace(path: &Path) -> Result<(), Failure> {
    output::replaceable("--trace", path)?;
    let open = || std::fs::File::options().create(true).append(true).open(path);
    let what = || format!("--trace: cannot write {}", path.display());
    open().map(drop).with_context(what).map_err(Failure::refused)
}

impl Planned {
    /// The tokenizer of the model directory; `None` where it has none.
    pub(crate) fn tokenizer(&self) -> Result<Option<Tokenizer>, Failure> {
        if self.dir.join("tiktoken.model").exists() || self.dir.join("tokenizer_config.json").exists() {
            Ok(Some(Tokenizer::open(&self.dir)?))
        } else {
            Ok(None)
        }
    }

    /// The name of the model: its directory's.
    pub(crate) fn name(&self) -> String {
        self.dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Allocates, opens and loads, with a bar on stderr for those who watch.
    pub(crate) fn open(self) -> Result<Engine, Failure> {
        let bar = Bar::bytes("loading");
        let mut progress = |done: u64, total: u64| bar.show(done, total);
        let engine = Engine::open((self.config, self.tensors), self.plan, &self.store, &mut progress);
        Ok(engine?)
    }
}

/// A wish that this machine cannot meet is refused; the rest is a failed run.
impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::UnknownIsa { .. } | EngineError::IsaUnavailable { .. } => Self::refused(error),
            _ => Self::run(error),
        }
    }
}

/// What was refused before the run, and what went wrong in it.
impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        match error {
            RunError::NoTokens | RunError::UnknownToken { .. } | RunError::ContextFull { .. } => {
                Self::refused(error)
            }
            _ => Self::run(error),
        }
    }
}
