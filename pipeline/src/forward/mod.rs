//! One pass: every weight of the model once, for all tokens of all sequences that take part.
//!
//! Prefill chunk, decode step, verification of a draft and batch are the same pass with different
//! tokens. Each weight block is leased once and used for every token; each token gets the bits it would
//! get alone, so all of them agree bit for bit. Leases and kernel calls only: where weights come from is
//! the business of [`WeightSource`] and [`ExpertSource`].

mod attention_kda;
mod attention_mla;
mod error;
mod feed_forward;
mod half;
mod head;
mod residual;
mod vectors;
mod walk;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use k3_kernel::{Columns, Kernels};

pub use error::RunError;
pub use half::LayerHalf;
pub use vectors::{AttentionVectors, LayerVectors, MissingVector, ModelVectors, MoeVectors};

use crate::model::config::ModelConfig;
use crate::source::{ExpertSource, WeightSource};
use crate::state::SequenceState;
use crate::team::Team;
use crate::units::{LayerIndex, TokenId};
use crate::workspace::Workspace;
use residual::Residual;
use walk::{Tools, Walk, Wanted};

/// What one sequence puts into a pass.
pub struct SequenceRun<'a> {
    /// Its state, advanced by the pass.
    pub state: &'a mut SequenceState,
    /// Its next tokens; at least one.
    pub tokens: &'a [TokenId],
    /// Whether the tokens are final.
    pub commit: Commit,
    /// Which of the tokens have logits.
    pub logits: LogitsWanted,
}

/// Whether the tokens of a pass become part of the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commit {
    /// All of them, at once.
    All,
    /// None yet: [`Executor::commit`] takes the first n of them later, the rest is dropped.
    Deferred,
}

/// Which tokens of a sequence have logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsWanted {
    /// None: when no sequence wants any, the head is not read.
    None,
    /// The last.
    Last,
    /// All.
    All,
}

impl LogitsWanted {
    /// Rows of logits for `tokens` tokens.
    #[must_use]
    pub fn rows(self, tokens: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Last => tokens.min(1),
            Self::All => tokens,
        }
    }
}

/// Logits of a pass, sequence by sequence, borrowed from the workspace.
#[derive(Clone, Copy, Debug)]
pub struct Logits<'a> {
    data: &'a [f32],
    vocab: usize,
}

impl<'a> Logits<'a> {
    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.data.len() / self.vocab
    }

    /// Row `i`: [V]. Rows are those of the first sequence in order of its tokens, then the second's, …
    #[must_use]
    pub fn row(&self, i: usize) -> Option<&'a [f32]> {
        self.data.chunks_exact(self.vocab).nth(i)
    }

    /// The last row.
    #[must_use]
    pub fn last(&self) -> Option<&'a [f32]> {
        self.data.chunks_exact(self.vocab).next_back()
    }

    /// All rows, [rows, V].
    #[must_use]
    pub fn data(&self) -> &'a [f32] {
        self.data
    }
}

/// A place in the pass that an observer can look at; values are [tokens, E].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TapPoint {
    /// Embedding rows.
    Embedding,
    /// What goes into the norm before attention.
    AttentionMix,
    /// What attention gives back.
    AttentionOut,
    /// What goes into the norm before the feed-forward part.
    MlpMix,
    /// What the feed-forward part gives back.
    MlpOut,
    /// The running sum that a layer hands on.
    Prefix,
    /// The mix after the last layer, of the tokens that have logits.
    OutputMix,
    /// That after the last norm.
    FinalNorm,
}

/// Looks at a pass from outside: for verification, never for computing.
pub trait Tap {
    /// Values at `point`: one column per token.
    fn values(&mut self, point: TapPoint, layer: Option<LayerIndex>, columns: Columns<'_>);

    /// Chosen experts and their weights, [tokens, k], best first.
    fn router(&mut self, layer: LayerIndex, ids: &[u16], weights: &[f32], k: usize);
}

/// Time of one pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassTime {
    /// From start to end.
    pub total: Duration,
    /// Of that, waiting for reads.
    pub waited: Duration,
}

/// Runs passes: holds the sources, the threads and all memory that a pass uses.
pub struct Executor {
    config: Arc<ModelConfig>,
    vectors: ModelVectors,
    kernels: Kernels,
    team: Team,
    workspace: Workspace,
    weights: Box<dyn WeightSource>,
    experts: Box<dyn ExpertSource>,
    cancel: Arc<AtomicBool>,
}

/// What an [`Executor`] is made of.
pub struct ExecutorParts {
    /// The model.
    pub config: Arc<ModelConfig>,
    /// Its small vectors.
    pub vectors: ModelVectors,
    /// The instruction set.
    pub kernels: Kernels,
    /// Compute threads.
    pub team: Team,
    /// Activations.
    pub workspace: Workspace,
    /// Trunk and head.
    pub weights: Box<dyn WeightSource>,
    /// Routed experts.
    pub experts: Box<dyn ExpertSource>,
    /// Set to end a pass at its next block.
    pub cancel: Arc<AtomicBool>,
}

impl Executor {
    /// Puts the parts together.
    #[must_use]
    pub fn new(parts: ExecutorParts) -> Self {
        let ExecutorParts { config, vectors, kernels, team, workspace, weights, experts, cancel } = parts;
        Self { config, vectors, kernels, team, workspace, weights, experts, cancel }
    }

    /// The model.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Most tokens of a pass.
    #[must_use]
    pub fn pass_tokens_max(&self) -> usize {
        self.workspace.size.pass_tokens
    }

    /// Most tokens of a pass that may have logits.
    #[must_use]
    pub fn logits_rows_max(&self) -> usize {
        self.workspace.size.logits_rows
    }

    /// Runs one pass over `runs` and gives the logits they want and the time it took. `tap` looks on.
    ///
    /// # Errors
    /// Refusals, before anything is read or changed: no tokens, too many, an unknown id, a full context,
    /// a pending draft. After that: a failed read, a non-finite weight or activation, cancellation; then
    /// sequences that commit are damaged, those with drafts are as before.
    pub fn pass(
        &mut self,
        runs: &mut [SequenceRun<'_>],
        tap: Option<&mut dyn Tap>,
    ) -> Result<(Logits<'_>, PassTime), RunError> {
        let tokens = self.admit(runs)?;
        let rows: usize = runs.iter().map(|run| run.logits.rows(run.tokens.len())).sum();
        for run in runs.iter_mut().filter(|run| run.commit == Commit::All) {
            run.state.begin();
        }
        let started = Instant::now();
        let (result, waited) = self.walk(runs, tokens, rows, tap);
        let time = PassTime { total: started.elapsed(), waited };
        if result.is_err()
            && let Err(error) = self.experts.abandon()
        {
            // The pass has an error of its own, which explains more.
            tracing::warn!(%error, "experts of the abandoned pass");
        }
        result?;
        for run in runs {
            match run.commit {
                Commit::All => run.state.finish(run.tokens.len()),
                Commit::Deferred => run.state.finish_draft(run.tokens.len()),
            }
        }
        let vocab = self.config.vocab;
        Ok((Logits { data: &self.workspace.logits[..rows * vocab], vocab }, time))
    }

    /// Refuses what cannot run; gives the number of tokens.
    fn admit(&self, runs: &[SequenceRun<'_>]) -> Result<usize, RunError> {
        let (mut tokens, mut rows) = (0, 0);
        for run in runs {
            let (state, more) = (&run.state, run.tokens.len());
            if more == 0 {
                return Err(RunError::NoTokens);
            }
            if state.is_damaged() {
                return Err(RunError::Damaged);
            }
            if state.draft() > 0 {
                return Err(RunError::DraftPending { tokens: state.draft() });
            }
            if more > state.context() - state.len() {
                let (have, context) = (state.len(), state.context());
                return Err(RunError::ContextFull { have, more, context });
            }
            if run.commit == Commit::Deferred && more > state.draft_max() {
                return Err(RunError::DraftTooLong { tokens: more, max: state.draft_max() });
            }
            let vocab = self.config.vocab;
            if let Some(&id) = run.tokens.iter().find(|id| id.0 as usize >= vocab) {
                return Err(RunError::UnknownToken { id, vocab });
            }
            self.check(state)?;
            tokens += more;
            rows += run.logits.rows(more);
        }
        if tokens == 0 {
            return Err(RunError::NoTokens);
        }
        if tokens > self.pass_tokens_max() {
            return Err(RunError::PassTooLarge { tokens, max: self.pass_tokens_max() });
        }
        if rows > self.logits_rows_max() {
            return Err(RunError::TooManyLogits { rows, max: self.logits_rows_max() });
        }
        Ok(tokens)
    }

    /// Refuses a state that was made for another model.
    fn check(&self, state: &SequenceState) -> Result<(), RunError> {
        state.misfit(&self.config).map_or(Ok(()), |layer| Err(RunError::ForeignState { layer }))
    }

    /// The straight corridor: embedding, layers, head.
    fn walk(
        &mut self,
        runs: &mut [SequenceRun<'_>],
        tokens: usize,
        rows: usize,
        mut tap: Option<&mut dyn Tap>,
    ) -> (Result<(), RunError>, Duration) {
        let Parts { mut pass, mut walk, head, vectors } = self.parts(tokens, rows);
        let result = pass
            .layers(&mut walk, vectors, runs, (rows > 0, &mut tap))
            .and_then(|()| pass.head(&mut walk, vectors, runs, head, &mut tap));
        (result, walk.waited)
    }

    /// Activations and tools of a pass, side by side.
    fn parts(&mut self, tokens: usize, rows: usize) -> Parts<'_> {
        let (hidden, workspace) = (self.config.hidden, &mut self.workspace);
        let walk = Walk {
            tools: Tools { kernels: self.kernels, team: &mut self.team, scratch: &mut workspace.scratch },
            weights: &mut *self.weights,
            experts: &mut *self.experts,
            cancel: &self.cancel,
            waited: Duration::ZERO,
        };
        let pass = Pass {
            config: &self.config,
            tokens,
            residual: Residual::new(&mut workspace.prefix, &mut workspace.snapshots, hidden, tokens),
            mixed: &mut workspace.mixed[..tokens * hidden],
            normed: &mut workspace.normed[..tokens * hidden],
            phase: &mut workspace.phase,
            routing: &mut workspace.routing,
        };
        let head = head::HeadBuffers {
            input: &mut workspace.head_input[..rows * hidden],
            logits: &mut workspace.logits[..rows * self.config.vocab],
        };
        Parts { pass, walk, head, vectors: &self.vectors }
    }

    /// Makes the first `tokens` of the draft of `state` part of the sequence and drops the rest. Reads
    /// nothing: what the tokens do to the recurrent state is replayed, with the bits of a pass over them
    /// alone.
    ///
    /// # Errors
    /// When the draft has fewer tokens, or a thread fails.
    pub fn commit(&mut self, state: &mut SequenceState, tokens: usize) -> Result<(), RunError> {
        if tokens > state.draft() {
            return Err(RunError::CommitTooLong { tokens, draft: state.draft() });
        }
        if tokens > 0 {
            self.check(state)?;
            state.begin();
            let mut tools =
                Tools { kernels: self.kernels, team: &mut self.team, scratch: &mut self.workspace.scratch };
            attention_kda::replay(&mut tools, &self.config.kda, &self.vectors, state, tokens)?;
        }
        state.finish_commit(tokens);
        Ok(())
    }
}

/// What a pass needs of an executor.
struct Parts<'e> {
    pass: Pass<'e>,
    walk: Walk<'e>,
    head: head::HeadBuffers<'e>,
    vectors: &'e ModelVectors,
}

/// Activations of a pass under way.
struct Pass<'e> {
    config: &'e ModelConfig,
    tokens: usize,
    residual: Residual<'e>,
    /// [T, E]: what goes into a norm, then what attention or feed-forward gives back.
    mixed: &'e mut [f32],
    /// [T, E]: output of a norm.
    normed: &'e mut [f32],
    /// Inside of attention or feed-forward.
    phase: &'e mut [f32],
    routing: &'e mut crate::workspace::Routing,
}

impl Pass<'_> {
    fn layers(
        &mut self,
        walk: &mut Walk<'_>,
        vectors: &ModelVectors,
        runs: &mut [SequenceRun<'_>],
        (head, tap): (bool, &mut Option<&mut dyn Tap>),
    ) -> Result<(), RunError> {
        walk.check_cancelled()?;
        walk.weights.begin_pass(head)?;
        self.embed(walk, runs)?;
        self.tap(tap, TapPoint::Embedding, None);
        let config = self.config;
        for ((layer, kind), vectors) in config.numbered_layers().zip(&vectors.layers) {
            let mix = vectors.attention_mix.as_deref();
            self.residual.mix(walk, config, mix, self.mixed)?;
            self.tap(tap, TapPoint::AttentionMix, Some(layer));
            if config.starts_residual_block(layer) {
                self.residual.snapshot();
            }
            self.norm(walk, &vectors.input_norm)?;
            self.attention(walk, (layer, kind), vectors, runs)?;
            self.tap(tap, TapPoint::AttentionOut, Some(layer));
            self.residual.add(walk, self.mixed)?;

            self.residual.mix(walk, config, vectors.mlp_mix.as_deref(), self.mixed)?;
            self.tap(tap, TapPoint::MlpMix, Some(layer));
            self.norm(walk, &vectors.post_attention_norm)?;
            self.feed_forward(walk, (layer, kind), vectors, tap)?;
            self.tap(tap, TapPoint::MlpOut, Some(layer));
            self.residual.add(walk, self.mixed)?;
            if let Some(tap) = tap {
                let columns = Columns::packed(self.residual.prefix(), config.hidden, self.tokens);
                tap.values(TapPoint::Prefix, Some(layer), columns);
            }
        }
        Ok(())
    }

    fn embed(&mut self, walk: &mut Walk<'_>, runs: &[SequenceRun<'_>]) -> Result<(), RunError> {
        let started = Instant::now();
        for (run, columns) in with_columns(runs) {
            let hidden = self.config.hidden;
            let out = &mut self.mixed[columns.start * hidden..columns.end * hidden];
            walk.weights.embed(run.tokens, out)?;
        }
        walk.waited += started.elapsed();
        self.residual.start(self.mixed);
        Ok(())
    }

    /// `normed` = rmsnorm(`mixed`).
    fn norm(&mut self, walk: &mut Walk<'_>, weight: &[f32]) -> Result<(), RunError> {
        residual::norm(walk, self.config, self.mixed, weight, self.normed)
    }

    fn tap(&self, tap: &mut Option<&mut dyn Tap>, point: TapPoint, layer: Option<LayerIndex>) {
        if let Some(tap) = tap {
            tap.values(point, layer, Columns::packed(self.mixed, self.config.hidden, self.tokens));
        }
    }
}

/// Each sequence of a pass with the columns of its tokens.
fn with_columns<'r, 'a>(
    runs: &'r [SequenceRun<'a>],
) -> impl Iterator<Item = (&'r SequenceRun<'a>, Range<usize>)> {
    let mut next = 0;
    runs.iter().map(move |run| {
        let first = next;
        next += run.tokens.len();
        (run, first..next)
    })
}

/// A matrix of `layer`.
fn wanted(kind: crate::model::tensors::MatrixKind, layer: LayerIndex, rows: usize) -> Wanted {
    Wanted { kind, layer: Some(layer), rows }
}
