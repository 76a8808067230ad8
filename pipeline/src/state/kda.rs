//! State of one KDA layer, and one head's way through a run of tokens.

use std::hint::black_box;
use std::ops::Range;

use k3_kernel::kda::{KdaTokens, kda_state_len};
use k3_kernel::{Columns, Kernels, Out};

use crate::model::config::{KDA_L2_EPS, KdaConfig};
use crate::workspace::cut;

/// Tokens that one head takes through convolution and recurrence at a time; any other number gives the
/// same bits, this one keeps its vectors in L2.
const HEAD_TOKENS: usize = 32;
/// Bytes of the smallest page of memory.
const PAGE_BYTES: usize = 4096;

/// Recurrent state and convolution history of one KDA layer, and its tokens of a draft.
#[derive(Debug)]
pub struct KdaState {
    /// [heads][kda_state_len(d, d)].
    recurrent: Vec<f32>,
    /// [heads][q, k, v][K-1][d], oldest first.
    history: Vec<f32>,
    draft: Draft,
    /// Copies of `recurrent` and `history`, one after the other, per slot.
    marks: Vec<f32>,
}

/// What the tokens of a draft put into the recurrence, before the convolution: [draft_max, width].
#[derive(Debug)]
struct Draft {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    z: Vec<f32>,
    beta: Vec<f32>,
}

/// The projections of some tokens of one sequence, as the products left them.
#[derive(Clone, Copy, Debug)]
pub struct KdaRaw<'a> {
    /// Queries [tokens, P] before the convolution.
    pub q: &'a [f32],
    /// Keys [tokens, P] before the convolution.
    pub k: &'a [f32],
    /// Values [tokens, P] before the convolution.
    pub v: &'a [f32],
    /// Decay gate [tokens, P] before its formula.
    pub z: &'a [f32],
    /// Beta [tokens, H] after the sigmoid.
    pub beta: &'a [f32],
}

/// Small vectors of one KDA layer.
#[derive(Clone, Debug)]
pub struct KdaHeadParams {
    /// Taps of the queries' convolution, [H, K, d].
    pub q_conv: Vec<f32>,
    /// Taps of the keys' convolution, [H, K, d].
    pub k_conv: Vec<f32>,
    /// Taps of the values' convolution, [H, K, d].
    pub v_conv: Vec<f32>,
    /// e^A_log, [H].
    pub decay: Vec<f32>,
    /// [P].
    pub dt_bias: Vec<f32>,
}

impl<'a> KdaRaw<'a> {
    /// Those of some of the tokens.
    ///
    /// # Panics
    /// When there are fewer.
    #[must_use]
    pub fn tokens(&self, config: &KdaConfig, tokens: Range<usize>) -> KdaRaw<'a> {
        let wide = tokens.start * config.width()..tokens.end * config.width();
        KdaRaw {
            q: &self.q[wide.clone()],
            k: &self.k[wide.clone()],
            v: &self.v[wide.clone()],
            z: &self.z[wide],
            beta: &self.beta[tokens.start * config.heads..tokens.end * config.heads],
        }
    }
}

/// Zeros whose pages are there. The system only promises those of a fresh vector: reading one maps the page of
/// zeros that all share, and writing it then takes another fault and the attention of every core.
fn present_zeros(len: usize) -> Vec<f32> {
    let mut zeros = vec![0.0; len];
    for page in zeros.chunks_mut(PAGE_BYTES / size_of::<f32>()) {
        page[0] = black_box(0.0);
    }
    zeros
}

impl KdaState {
    /// Zero state, with room for a draft and for `marks` copies of the state.
    #[must_use]
    pub fn new(config: &KdaConfig, draft_tokens: usize, marks: usize) -> Self {
        let draft = |width: usize| vec![0.0; draft_tokens * width];
        Self {
            recurrent: present_zeros(config.heads * recurrent_len(config)),
            history: present_zeros(config.heads * history_len(config)),
            draft: Draft {
                q: draft(config.width()),
                k: draft(config.width()),
                v: draft(config.width()),
                z: draft(config.width()),
                beta: draft(config.heads),
            },
            marks: vec![0.0; marks * Self::mark_floats(config)],
        }
    }

    /// Floats of a copy of the state.
    #[must_use]
    pub fn mark_floats(config: &KdaConfig) -> usize {
        config.heads * (recurrent_len(config) + history_len(config))
    }

    /// The copy in `slot`.
    ///
    /// # Panics
    /// When there are fewer slots.
    #[must_use]
    pub fn mark(&self, slot: usize) -> &[f32] {
        let floats = self.recurrent.len() + self.history.len();
        &self.marks[slot * floats..][..floats]
    }

    /// The copy in `slot`, to be written.
    ///
    /// # Panics
    /// When there are fewer slots.
    pub fn mark_mut(&mut self, slot: usize) -> &mut [f32] {
        let floats = self.recurrent.len() + self.history.len();
        &mut self.marks[slot * floats..][..floats]
    }

    /// Copies the state into `slot`.
    ///
    /// # Panics
    /// When there are fewer slots.
    pub fn keep_mark(&mut self, slot: usize) {
        let floats = self.recurrent.len() + self.history.len();
        let mark = &mut self.marks[slot * floats..][..floats];
        let (recurrent, history) = mark.split_at_mut(self.recurrent.len());
        recurrent.copy_from_slice(&self.recurrent);
        history.copy_from_slice(&self.history);
    }

    /// Makes the state that of `slot`.
    ///
    /// # Panics
    /// When there are fewer slots.
    pub fn go_back(&mut self, slot: usize) {
        let floats = self.recurrent.len() + self.history.len();
        let (recurrent, history) = self.marks[slot * floats..][..floats].split_at(self.recurrent.len());
        self.recurrent.copy_from_slice(recurrent);
        self.history.copy_from_slice(history);
    }

    /// Floats of a state.
    #[must_use]
    pub fn floats(config: &KdaConfig, draft_tokens: usize) -> usize {
        config.heads * (recurrent_len(config) + history_len(config))
            + draft_tokens * (4 * config.width() + config.heads)
    }

    /// All heads' recurrent states.
    #[must_use]
    pub fn recurrent(&self) -> &[f32] {
        &self.recurrent
    }

    /// All heads' recurrent states.
    pub fn recurrent_mut(&mut self) -> &mut [f32] {
        &mut self.recurrent
    }

    /// All heads' convolution histories.
    #[must_use]
    pub fn history(&self) -> &[f32] {
        &self.history
    }

    /// All heads' convolution histories.
    pub fn history_mut(&mut self) -> &mut [f32] {
        &mut self.history
    }

    /// Zeroes state and history.
    pub fn clear(&mut self) {
        self.recurrent.fill(0.0);
        self.history.fill(0.0);
    }

    /// State and history, to be advanced.
    pub fn advance_parts(&mut self) -> (&mut [f32], &mut [f32]) {
        (&mut self.recurrent, &mut self.history)
    }

    /// True when the state has the sizes of `config`.
    #[must_use]
    pub fn fits(&self, config: &KdaConfig) -> bool {
        self.recurrent.len() == config.heads * recurrent_len(config)
            && self.history.len() == config.heads * history_len(config)
    }

    /// State and history, and the first `tokens` of the draft.
    ///
    /// # Panics
    /// When `tokens` is more than a draft may have.
    pub fn replay_parts(
        &mut self,
        config: &KdaConfig,
        tokens: usize,
    ) -> (&mut [f32], &mut [f32], KdaRaw<'_>) {
        let (wide, narrow) = (tokens * config.width(), tokens * config.heads);
        let draft = &self.draft;
        let raw = KdaRaw {
            q: &draft.q[..wide],
            k: &draft.k[..wide],
            v: &draft.v[..wide],
            z: &draft.z[..wide],
            beta: &draft.beta[..narrow],
        };
        (&mut self.recurrent, &mut self.history, raw)
    }

    /// Keeps the tokens of a draft for a later replay.
    ///
    /// # Panics
    /// When there are more of them than a draft may have.
    pub fn keep_draft(&mut self, raw: &KdaRaw<'_>) {
        self.draft.q[..raw.q.len()].copy_from_slice(raw.q);
        self.draft.k[..raw.k.len()].copy_from_slice(raw.k);
        self.draft.v[..raw.v.len()].copy_from_slice(raw.v);
        self.draft.z[..raw.z.len()].copy_from_slice(raw.z);
        self.draft.beta[..raw.beta.len()].copy_from_slice(raw.beta);
    }
}

/// Floats of one head's recurrent state.
#[must_use]
pub fn recurrent_len(config: &KdaConfig) -> usize {
    kda_state_len(config.head_dim, config.head_dim)
}

/// Floats of one head's three convolution histories.
#[must_use]
pub fn history_len(config: &KdaConfig) -> usize {
    3 * (config.conv_kernel - 1) * config.head_dim
}

/// Floats of scratch that [`run_head`] needs, with a copy of one head's state for drafts.
#[must_use]
pub fn kda_head_scratch(config: &KdaConfig) -> usize {
    recurrent_len(config) + history_len(config) + 5 * HEAD_TOKENS * config.head_dim
}

/// Takes one head through the tokens of `raw`: convolutions, normalisation, decay, recurrence. `state`
/// and `history` are advanced; `emit(t, o)` gets each token's output [d], before norm and gate.
///
/// `scratch` has at least 5·32·d floats. The bits do not depend on how a sequence's tokens are divided
/// between calls.
///
/// # Panics
/// When a slice does not have the length that `config` asks for.
pub fn run_head(
    kernels: Kernels,
    config: &KdaConfig,
    (params, head): (&KdaHeadParams, usize),
    raw: &KdaRaw<'_>,
    (state, history): (&mut [f32], &mut [f32]),
    scratch: &mut [f32],
    mut emit: impl FnMut(usize, &[f32]),
) {
    let (d, heads, taps) = (config.head_dim, config.heads, config.conv_kernel);
    let (width, first) = (config.width(), head * d);
    let tokens = raw.beta.len() / heads;
    let history_one = (taps - 1) * d;
    let (q_history, rest) = history.split_at_mut(history_one);
    let (k_history, v_history) = rest.split_at_mut(history_one);
    let conv = |w: &[f32], history: &mut [f32], x: &[f32], t: usize, y: &mut [f32]| {
        kernels.conv_silu(&w[first * taps..(first + d) * taps], history, &x[t * width + first..][..d], y);
    };
    let mut rest = scratch;
    let [q, k, v, alpha, o] = std::array::from_fn(|_| cut(&mut rest, HEAD_TOKENS * d));
    for start in (0..tokens).step_by(HEAD_TOKENS) {
        let count = HEAD_TOKENS.min(tokens - start);
        for i in 0..count {
            let (t, row) = (start + i, i * d..(i + 1) * d);
            conv(&params.q_conv, q_history, raw.q, t, &mut q[row.clone()]);
            conv(&params.k_conv, k_history, raw.k, t, &mut k[row.clone()]);
            conv(&params.v_conv, v_history, raw.v, t, &mut v[row.clone()]);
            kernels.l2norm(&mut q[row.clone()], KDA_L2_EPS, (d as f32).sqrt().recip());
            kernels.l2norm(&mut k[row.clone()], KDA_L2_EPS, 1.0);
            kernels.kda_decay(
                &raw.z[t * width + first..][..d],
                &params.dt_bias[first..first + d],
                params.decay[head],
                config.lower_bound,
                &mut alpha[row],
            );
        }
        let columns = |data| Columns { data, stride: d, count, len: d };
        let run = KdaTokens {
            q: columns(q),
            k: columns(k),
            v: columns(v),
            alpha: columns(alpha),
            beta: Columns { data: &raw.beta[start * heads + head..], stride: heads, count, len: 1 },
        };
        kernels.kda_run(state, d, d, &run, Out::new(o, d, d, count));
        for (i, o) in o.chunks_exact(d).take(count).enumerate() {
            emit(start + i, o);
        }
    }
}
