//! What was said before, and the penalties for it.

use super::params::SamplingParams;
use crate::units::TokenId;

/// Counts of the tokens seen.
#[derive(Debug)]
pub(super) struct History {
    /// Per token: times in the output.
    output: Vec<u32>,
    /// Per token: whether it is in `seen`.
    is_seen: Vec<bool>,
    /// Every token of prompt and output once.
    seen: Vec<TokenId>,
}

impl History {
    /// A history of tokens below `vocabulary`; of none where it is 0.
    pub(super) fn new(vocabulary: usize) -> Self {
        Self {
            output: vec![0; vocabulary],
            is_seen: vec![false; vocabulary],
            seen: Vec::with_capacity(vocabulary),
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        for id in self.seen.drain(..) {
            self.output[id.0 as usize] = 0;
            self.is_seen[id.0 as usize] = false;
        }
    }

    /// Counts a token; one beyond the vocabulary is not kept.
    pub(super) fn see(&mut self, id: TokenId, is_output: bool) {
        let index = id.0 as usize;
        let (Some(count), Some(is_seen)) = (self.output.get_mut(index), self.is_seen.get_mut(index)) else {
            return;
        };
        *count += u32::from(is_output);
        if !std::mem::replace(is_seen, true) {
            self.seen.push(id);
        }
    }

    /// Repetition penalty for all seen tokens, then frequency and presence penalty for the output's.
    pub(super) fn penalise(&self, logits: &mut [f32], params: &SamplingParams) {
        for id in &self.seen {
            let index = id.0 as usize;
            let logit = &mut logits[index];
            if *logit > 0.0 {
                *logit /= params.repetition_penalty;
            } else {
                *logit *= params.repetition_penalty;
            }
            let count = self.output[index];
            if count > 0 {
                *logit -= params.frequency_penalty * count as f32;
                *logit -= params.presence_penalty;
            }
        }
    }
}
