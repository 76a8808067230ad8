//! The engine: a model, its plan, and everything allocated for it. Together with
//! [`Session`](crate::session::Session) it is the border of the library.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use k3_kernel::{Isa, Kernels};

use crate::forward::{
    Executor, ExecutorParts, Logits, MissingVector, ModelVectors, RunError, SequenceRun, Tap,
};
use crate::model::config::ModelConfig;
use crate::model::tensors::ModelTensors;
use crate::plan::Plan;
use crate::state::SequenceState;
use crate::stats::{CpuTime, Phase, Stats, Tally, peak_rss_bytes};
use crate::store::disks::Disks;
use crate::store::stats::StoreCounters;
use crate::store::{Store, StoreError, StoreOptions};
use crate::team::{Team, TeamError};
use crate::workspace::{Workspace, WorkspaceSize};

/// Why an engine could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Memory refused, or weights that cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A compute thread could not be started.
    #[error(transparent)]
    Team(#[from] TeamError),
    /// A small vector is missing.
    #[error(transparent)]
    Vector(#[from] MissingVector),
    /// An instruction set that does not exist is asked for.
    #[error("{key}: unknown instruction set {name:?}; expected scalar, avx2 or neon")]
    UnknownIsa {
        /// Where: `compute.isa` or `K3_ISA`.
        key: &'static str,
        /// The name.
        name: String,
    },
    /// An instruction set that this processor does not have is asked for.
    #[error("{key}: this processor has no {isa}; leave it out to take the best there is")]
    IsaUnavailable {
        /// Where: `compute.isa` or `K3_ISA`.
        key: &'static str,
        /// The instruction set.
        isa: Isa,
    },
}

/// A model ready to run. One pass runs at a time; any number of sequences can take turns or share passes.
pub struct Engine {
    executor: Executor,
    config: Arc<ModelConfig>,
    plan: Plan,
    kernels: Kernels,
    cancel: Arc<AtomicBool>,
    counters: Arc<StoreCounters>,
    disks: Arc<Disks>,
    tally: Tally,
}

impl Engine {
    /// Allocates everything that `plan` foresees, opens the files, loads what stays in memory and starts
    /// reading ahead. After this nothing is allocated per token. `progress` is told bytes of resident
    /// weights loaded and in all.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub fn open(
        (config, tensors): (ModelConfig, ModelTensors),
        plan: Plan,
        options: &StoreOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, EngineError> {
        let started = Instant::now();
        let kernels = kernels(plan.compute.isa.as_deref())?;
        let (config, tensors) = (Arc::new(config), Arc::new(tensors));
        // Reader threads start before the team: they must not inherit a compute thread's core.
        let store = Store::open(&config, &tensors, &plan, kernels, options, progress)?;
        let vectors = ModelVectors::load(&config, &tensors, |vector| {
            let values = store.vectors.get(vector.layer, vector.kind);
            let missing = || MissingVector { kind: vector.kind, layer: vector.layer };
            Ok::<_, EngineError>(values.ok_or_else(missing)?.to_vec())
        })?;
        let team = Team::new(plan.compute.threads, plan.compute.pin_threads)?;
        let size = workspace_size(&plan);
        let cancel = Arc::new(AtomicBool::new(false));
        let executor = Executor::new(ExecutorParts {
            config: Arc::clone(&config),
            vectors,
            kernels,
            team,
            workspace: Workspace::new(&config, size),
            weights: Box::new(store.trunk),
            experts: Box::new(store.experts),
            cancel: Arc::clone(&cancel),
        });
        let tally = Tally { open: started.elapsed(), ..Tally::default() };
        tracing::info!(preset = plan.preset, isa = %kernels.isa(), seconds = tally.open.as_secs_f64(), "open");
        let (counters, disks) = (store.counters, store.disks);
        Ok(Self { executor, config, plan, kernels, cancel, counters, disks, tally })
    }

    /// The model.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Most tokens of one pass.
    #[must_use]
    pub fn pass_tokens_max(&self) -> usize {
        self.executor.pass_tokens_max()
    }

    /// Most tokens of one pass that can have logits.
    #[must_use]
    pub fn logits_rows_max(&self) -> usize {
        self.executor.logits_rows_max()
    }

    /// Set it to end the pass under way at its next block, and every later pass at its start, until it is
    /// cleared again.
    #[must_use]
    pub fn cancel_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.cancel)
    }

    /// An empty sequence of the plan's context, draft length and snapshots.
    #[must_use]
    pub fn new_state(&self) -> SequenceState {
        let Plan { context_tokens, draft_tokens_max, snapshots_max, .. } = self.plan;
        SequenceState::new(&self.config, context_tokens, draft_tokens_max, snapshots_max)
    }

    /// One pass over the weights for all of `runs`; see [`Executor::pass`]. `phase` says what the report
    /// counts it as.
    ///
    /// # Errors
    /// As [`Executor::pass`].
    pub fn pass(
        &mut self,
        phase: Phase,
        runs: &mut [SequenceRun<'_>],
        tap: Option<&mut dyn Tap>,
    ) -> Result<Logits<'_>, RunError> {
        let tokens = runs.iter().map(|run| run.tokens.len()).sum();
        let cpu = || CpuTime::of(None).unwrap_or_default();
        let (cpu_before, read_before) = (cpu(), self.counters.snapshot().read_bytes());
        let (logits, time) = self.executor.pass(runs, tap)?;
        let read = self.counters.snapshot().read_bytes() - read_before;
        self.tally.add(phase, tokens, time, cpu().since(cpu_before), read);
        Ok(logits)
    }

    /// Makes the first `tokens` of a draft final; see [`Executor::commit`].
    ///
    /// # Errors
    /// As [`Executor::commit`].
    pub fn commit(&mut self, state: &mut SequenceState, tokens: usize) -> Result<(), RunError> {
        self.executor.commit(state, tokens)
    }

    /// What the run has cost so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            preset: self.plan.preset.clone(),
            isa: self.kernels.isa().to_string(),
            threads: self.plan.compute.threads.max(1),
            open_seconds: self.tally.open.as_secs_f64(),
            prefill: self.tally.prefill,
            decode: self.tally.decode,
            store: self.counters.snapshot(),
            disks: self.disks.reports().cloned().collect(),
            planned_bytes: self.plan.ledger.total_bytes(),
            peak_rss_bytes: peak_rss_bytes(),
        }
    }
}

/// The workspace of a plan.
#[must_use]
pub fn workspace_size(plan: &Plan) -> WorkspaceSize {
    WorkspaceSize::new(
        plan.pass_tokens_max,
        plan.sequences_max,
        plan.draft_tokens_max,
        plan.compute.threads.max(1),
    )
}

/// The kernels of the environment variable `K3_ISA`, else of the preset's key, else the fastest there are.
fn kernels(preset: Option<&str>) -> Result<Kernels, EngineError> {
    let forced = std::env::var_os("K3_ISA").map(|name| name.to_string_lossy().into_owned());
    let (key, name) = match (&forced, preset) {
        (Some(name), _) => ("K3_ISA", name.as_str()),
        (None, Some(name)) => ("compute.isa", name),
        (None, None) => return Ok(Kernels::detect()),
    };
    let isa: Isa = name.parse().map_err(|_| EngineError::UnknownIsa { key, name: name.to_owned() })?;
    Kernels::new(isa).ok_or(EngineError::IsaUnavailable { key, isa })
}
