//! From a row of logits to the next token.
//!
//! Everything is computed in a written order with the engine's own exponential and with correctly
//! rounded operations, and random numbers are ChaCha8's: the same logits, parameters and seed give
//! the same token on every machine. After [`Sampler::new`] nothing is allocated.

mod filter;
mod history;
mod logprobs;
mod params;
mod rng;
mod stop;

#[cfg(test)]
mod tests;

use k3_kernel::Kernels;

pub use filter::{Candidate, Distribution};
pub use logprobs::Logprobs;
pub use params::{
    LOGIT_BIAS_MAX, LOGPROBS_MAX, PENALTY_MAX, REPETITION_MAX, SamplingError, SamplingParams, TEMPERATURE_MAX,
};
pub use rng::RandomState;
pub use stop::{STOP_BYTES_MAX, STOPS_MAX, StopError, StopMatcher};

use crate::units::TokenId;
use filter::Filter;
use history::History;
use rng::Random;

/// Chooses the tokens of one sequence.
#[derive(Debug)]
pub struct Sampler {
    params: SamplingParams,
    vocabulary: usize,
    history: History,
    filter: Filter,
    random: Random,
    logprobs: Logprobs,
    /// The row after bias and penalties: `[vocabulary]`.
    adjusted: Vec<f32>,
}

impl Sampler {
    /// A sampler for rows of `vocabulary` logits.
    ///
    /// # Errors
    /// A parameter that is refused.
    pub fn new(params: SamplingParams, vocabulary: usize, kernels: Kernels) -> Result<Self, SamplingError> {
        params.check(vocabulary)?;
        Ok(Self {
            vocabulary,
            history: History::new(if params.has_penalties() { vocabulary } else { 0 }),
            filter: Filter::new(if params.is_greedy() { 0 } else { vocabulary }, kernels),
            random: Random::new(params.seed),
            logprobs: Logprobs::new(params.logprobs, vocabulary, kernels),
            adjusted: Vec::with_capacity(vocabulary),
            params,
        })
    }

    /// The parameters.
    #[must_use]
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Begins an output after `prompt`: for the penalties, what came before is forgotten.
    ///
    /// # Errors
    /// A token that the vocabulary does not have.
    pub fn begin(&mut self, prompt: &[TokenId]) -> Result<(), SamplingError> {
        self.check_tokens(prompt)?;
        self.history.clear();
        prompt.iter().for_each(|id| self.history.see(*id, false));
        Ok(())
    }

    /// Counts tokens of the output that this sampler did not choose (of a resumed session, say).
    ///
    /// # Errors
    /// A token that the vocabulary does not have.
    pub fn see_output(&mut self, tokens: &[TokenId]) -> Result<(), SamplingError> {
        self.check_tokens(tokens)?;
        tokens.iter().for_each(|id| self.history.see(*id, true));
        Ok(())
    }

    /// Chooses the token that follows, and counts it as output.
    ///
    /// Under drafts this is called for one row after another as long as the token chosen is the
    /// drafted one. For a draft that names one token per place this *is* the rejection rule (a
    /// drafted token is accepted with its probability in the target, and another is drawn in
    /// proportion to the rest), and it takes the same random numbers as plain decoding: the text
    /// does not depend on drafts.
    ///
    /// # Errors
    /// A row of another length, or with a value that is not finite.
    pub fn sample(&mut self, logits: &[f32]) -> Result<TokenId, SamplingError> {
        self.adjust(logits)?;
        let id = if self.params.is_greedy() {
            greedy(&self.adjusted)
        } else {
            let at = self.random.unit();
            self.filter.run(&self.adjusted, &self.params).pick(at)
        };
        self.logprobs.fill(logits, id);
        if self.params.has_penalties() {
            self.history.see(id, true);
        }
        Ok(id)
    }

    /// What [`sample`](Self::sample) would draw from: after penalties, temperature and filters.
    ///
    /// # Errors
    /// As [`sample`](Self::sample).
    pub fn distribution(&mut self, logits: &[f32]) -> Result<Distribution<'_>, SamplingError> {
        self.adjust(logits)?;
        if self.params.is_greedy() {
            let id = greedy(&self.adjusted);
            return Ok(self.filter.certain(id));
        }
        Ok(self.filter.run(&self.adjusted, &self.params))
    }

    /// Log-probabilities at the last [`sample`](Self::sample), where they were asked for.
    #[must_use]
    pub fn logprobs(&self) -> &Logprobs {
        &self.logprobs
    }

    /// Where the random numbers stand; with the tokens, all that a resumed session needs.
    #[must_use]
    pub fn random_state(&self) -> RandomState {
        self.random.state()
    }

    /// Goes on where another sampler's random numbers stood.
    pub fn set_random_state(&mut self, state: RandomState) {
        self.random = Random::at(state);
    }

    fn check_tokens(&self, tokens: &[TokenId]) -> Result<(), SamplingError> {
        let vocabulary = self.vocabulary;
        match tokens.iter().find(|id| id.0 as usize >= vocabulary) {
            Some(id) => Err(SamplingError::UnknownToken { id: *id, vocabulary }),
            None => Ok(()),
        }
    }

    fn adjust(&mut self, logits: &[f32]) -> Result<(), SamplingError> {
        let vocabulary = self.vocabulary;
        if logits.len() != vocabulary {
            return Err(SamplingError::Row { found: logits.len(), vocabulary });
        }
        if let Some((value, id)) = logits.iter().zip(0..).find(|(value, _)| !value.is_finite()) {
            return Err(SamplingError::NotFinite { id: TokenId(id), value: *value });
        }
        self.adjusted.clear();
        self.adjusted.extend_from_slice(logits);
        for (id, bias) in &self.params.logit_bias {
            self.adjusted[id.0 as usize] += bias;
        }
        if self.params.has_penalties() {
            self.history.penalise(&mut self.adjusted, &self.params);
        }
        // Bias and penalties may carry the largest floats to infinity; the order stays.
        self.adjusted.iter_mut().for_each(|x| *x = x.clamp(f32::MIN, f32::MAX));
        Ok(())
    }
}

/// The highest logit, the lowest id among equals.
#[must_use]
pub fn greedy(logits: &[f32]) -> TokenId {
    let mut best = (f32::NEG_INFINITY, 0);
    for (value, id) in logits.iter().zip(0..) {
        if *value > best.0 {
            best = (*value, id);
        }
    }
    TokenId(best.1)
}
