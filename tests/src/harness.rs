//! Executors over golden models, with every setting that must not change a bit.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use k3_kernel::Kernels;
use k3_pipeline::engine::Engine;
use k3_pipeline::forward::{
    Commit, Executor, ExecutorParts, LogitsWanted, MissingVector, ModelVectors, RunError, SequenceRun,
};
use k3_pipeline::machine::Machine;
use k3_pipeline::model::config::ModelConfig;
use k3_pipeline::model::tensors::ModelTensors;
use k3_pipeline::plan::{ModelShape, plan};
use k3_pipeline::preset::Preset;
use k3_pipeline::state::SequenceState;
use k3_pipeline::store::StoreOptions;
use k3_pipeline::team::Team;
use k3_pipeline::units::TokenId;
use k3_pipeline::workspace::{Workspace, WorkspaceSize};

use crate::resident::{Arrival, Files, ResidentExperts, ResidentWeights};

/// Settings of an executor; none of them may change a result.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Largest block of the trunk.
    pub block_bytes: u64,
    /// Weights in tiles, or as released.
    pub tiled: bool,
    /// Order of experts.
    pub arrival: Arrival,
    /// Compute threads.
    pub threads: usize,
    /// Instruction set.
    pub kernels: Kernels,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            block_bytes: 1 << 20,
            tiled: true,
            arrival: Arrival::InOrder,
            threads: 2,
            kernels: Kernels::detect(),
        }
    }
}

/// A model on disk with its bytes in memory.
pub struct Model {
    /// Its configuration.
    pub config: Arc<ModelConfig>,
    /// Its tensors.
    pub tensors: ModelTensors,
    /// All bytes of its weight files.
    pub files: Files,
}

/// Tokens of the largest pass of [`Model::executor`].
pub const PASS_TOKENS: usize = 64;
/// Context of [`Model::state`].
pub const CONTEXT: usize = 192;
/// Longest draft of [`Model::state`].
pub const DRAFT: usize = 8;

impl Model {
    /// A model of the golden ones.
    ///
    /// # Panics
    /// When it cannot be read.
    #[must_use]
    pub fn golden(name: &str) -> Self {
        Self::open(&crate::resident::golden_model(name))
    }

    /// The model in `dir`.
    ///
    /// # Panics
    /// When it cannot be read.
    #[must_use]
    pub fn open(dir: &Path) -> Self {
        let (config, tensors) = ModelTensors::open(dir, &[]).expect("a model");
        let files = Files::read(&tensors).expect("weight files");
        Self { config: Arc::new(config), tensors, files }
    }

    /// The trunk in memory.
    #[must_use]
    pub fn weights(&self, setup: &Setup) -> ResidentWeights {
        let how = (setup.block_bytes, setup.tiled);
        ResidentWeights::new(&self.config, &self.tensors, &self.files, setup.kernels, how)
    }

    /// The experts in memory.
    #[must_use]
    pub fn experts(&self, setup: &Setup) -> ResidentExperts {
        ResidentExperts::new(&self.config, &self.tensors, &self.files, setup.arrival)
    }

    /// An executor over the whole model in memory.
    #[must_use]
    pub fn executor(&self, setup: &Setup) -> Executor {
        self.executor_over(setup, self.weights(setup), self.experts(setup))
    }

    /// An executor over given sources.
    ///
    /// # Panics
    /// When threads cannot be started.
    #[must_use]
    pub fn executor_over(
        &self,
        setup: &Setup,
        weights: ResidentWeights,
        experts: ResidentExperts,
    ) -> Executor {
        let vectors = ModelVectors::load(&self.config, &self.tensors, |vector| {
            Ok::<_, LoadError>(self.files.vector(vector))
        })
        .expect("all vectors");
        let size = WorkspaceSize::new(PASS_TOKENS, 4, DRAFT, setup.threads);
        Executor::new(ExecutorParts {
            config: Arc::clone(&self.config),
            vectors,
            kernels: setup.kernels,
            team: Team::new(setup.threads, false).expect("threads"),
            workspace: Workspace::new(&self.config, WorkspaceSize { logits_rows: PASS_TOKENS, ..size }),
            weights: Box::new(weights),
            experts: Box::new(experts),
            cancel: Arc::new(AtomicBool::new(false)),
        })
    }

    /// An empty sequence.
    #[must_use]
    pub fn state(&self) -> SequenceState {
        SequenceState::new(&self.config, CONTEXT, DRAFT, 0)
    }
}

#[derive(Debug)]
struct LoadError(#[allow(dead_code)] MissingVector);

impl From<MissingVector> for LoadError {
    fn from(missing: MissingVector) -> Self {
        Self(missing)
    }
}

/// Token ids from plain numbers.
#[must_use]
pub fn ids(numbers: &[i32]) -> Vec<TokenId> {
    numbers.iter().map(|&id| TokenId(id as u32)).collect()
}

/// Feeds `tokens` in passes of `chunk` and gives the logits of every position, [tokens, V].
///
/// # Errors
/// What the passes return.
pub fn feed(
    executor: &mut Executor,
    state: &mut SequenceState,
    tokens: &[TokenId],
    chunk: usize,
) -> Result<Vec<f32>, RunError> {
    let mut all = Vec::new();
    for tokens in tokens.chunks(chunk) {
        let run = SequenceRun { state, tokens, commit: Commit::All, logits: LogitsWanted::All };
        all.extend_from_slice(executor.pass(&mut [run], None)?.0.data());
    }
    Ok(all)
}

/// Number of the largest logit; of equal ones the lowest.
#[must_use]
pub fn argmax(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

/// An engine over k3-tiny-a with the settings of the `demo` preset and overrides, as a user would set them.
///
/// # Panics
/// When it is refused.
#[must_use]
pub fn demo_engine(overrides: &[&str]) -> Engine {
    let overrides: Vec<String> = overrides.iter().map(|&o| o.to_owned()).collect();
    let preset = Preset::load("demo", &overrides).expect("valid overrides");
    preset_engine(&preset, &crate::resident::golden_model("k3-tiny-a"))
}

/// An engine over the model in `dir`.
///
/// # Panics
/// When it is refused.
#[must_use]
pub fn preset_engine(preset: &Preset, dir: &Path) -> Engine {
    let (config, tensors) = ModelTensors::open(dir, &[]).expect("a model");
    let machine = Machine::detect().expect("a machine");
    let shape = ModelShape::from_tensors(&config, &tensors);
    let plan = plan(preset, &config, &shape, &machine).expect("a plan");
    Engine::open((config, tensors), plan, &StoreOptions::default(), &mut |_, _| ()).expect("an engine")
}

/// Relative rms and the largest difference.
///
/// # Panics
/// When the lengths differ.
#[must_use]
pub fn compare(ours: &[f32], theirs: &[f64]) -> (f64, f64) {
    assert_eq!(ours.len(), theirs.len());
    let (mut square, mut norm, mut max) = (0.0, 0.0, 0.0f64);
    for (&a, &b) in ours.iter().zip(theirs) {
        let difference = f64::from(a) - b;
        square += difference * difference;
        norm += b * b;
        max = max.max(difference.abs());
    }
    ((square / norm).sqrt(), max)
}
