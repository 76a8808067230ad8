//! How to choose the next token, and what is refused.

use crate::units::TokenId;

/// Largest absolute logit bias.
pub const LOGIT_BIAS_MAX: f32 = 100.0;
/// Largest absolute presence or frequency penalty.
pub const PENALTY_MAX: f32 = 2.0;
/// Most alternatives whose log-probabilities are reported per token.
pub const LOGPROBS_MAX: usize = 100;
/// Largest repetition penalty; its inverse is the smallest.
pub const REPETITION_MAX: f32 = 100.0;
/// Largest temperature.
pub const TEMPERATURE_MAX: f32 = 100.0;

/// How to choose the next token. The default is greedy, without penalties.
///
/// In this order: logit bias; repetition penalty over every token of prompt and output; frequency
/// and presence penalty over the output; division by the temperature; min-p; top-k; top-p (over
/// what the others left); choice in proportion to what remains.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy: the highest logit, the lowest id among equals.
    pub temperature: f32,
    /// Only the `top_k` highest; 0 is all.
    pub top_k: usize,
    /// Only the most probable that together reach `top_p`; 1 is all.
    pub top_p: f32,
    /// Only those at least `min_p` times as probable as the most probable; 0 is all.
    pub min_p: f32,
    /// Logits of seen tokens: the positive divided, the others multiplied by it; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the output.
    pub presence_penalty: f32,
    /// Subtracted from a logit once for every time its token is in the output.
    pub frequency_penalty: f32,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Start of the random numbers: the same seed gives the same text everywhere.
    pub seed: u64,
    /// Report the log-probability of the token chosen and of so many of the most probable.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            logprobs: None,
        }
    }
}

/// A parameter or a row of logits that is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A parameter outside its range.
    #[error("{name} is {found}: expected {expected}")]
    Range {
        /// The parameter.
        name: &'static str,
        /// Its value.
        found: f64,
        /// What is accepted.
        expected: &'static str,
    },
    /// A bias for a token that the vocabulary does not have.
    #[error("logit_bias names token {id}, but the vocabulary has {vocabulary} tokens")]
    BiasToken {
        /// The token.
        id: TokenId,
        /// Number of tokens.
        vocabulary: usize,
    },
    /// Two biases for one token.
    #[error("logit_bias names token {id} twice")]
    BiasTwice {
        /// The token.
        id: TokenId,
    },
    /// More alternatives than there are.
    #[error("logprobs is {found}: expected at most {max}")]
    Logprobs {
        /// Asked for.
        found: usize,
        /// The most that is reported.
        max: usize,
    },
    /// A token that the vocabulary does not have.
    #[error("token {id} is not in the vocabulary of {vocabulary} tokens")]
    UnknownToken {
        /// The token.
        id: TokenId,
        /// Number of tokens.
        vocabulary: usize,
    },
    /// A row of another length.
    #[error("{found} logits for a vocabulary of {vocabulary} tokens")]
    Row {
        /// Length of the row.
        found: usize,
        /// Number of tokens.
        vocabulary: usize,
    },
    /// A logit that is not a number, or infinite.
    #[error("the logit of token {id} is {value}")]
    NotFinite {
        /// The token.
        id: TokenId,
        /// Its logit.
        value: f32,
    },
}

impl SamplingParams {
    /// Whether tokens are drawn, not just the highest taken.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Whether earlier tokens matter.
    #[must_use]
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Checks every parameter against its range and the vocabulary.
    ///
    /// # Errors
    /// The first parameter that is refused.
    pub fn check(&self, vocabulary: usize) -> Result<(), SamplingError> {
        let within = |name, value: f32, good: bool, expected| {
            if good { Ok(()) } else { Err(SamplingError::Range { name, found: f64::from(value), expected }) }
        };
        let penalty = -PENALTY_MAX..=PENALTY_MAX;
        let (t, r) = (self.temperature, self.repetition_penalty);
        within("temperature", t, (0.0..=TEMPERATURE_MAX).contains(&t), "0 (greedy) to 100")?;
        within("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "above 0, at most 1 (all)")?;
        within("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "0 (all) to 1")?;
        let repetition = (1.0 / REPETITION_MAX..=REPETITION_MAX).contains(&r);
        within("repetition_penalty", r, repetition, "0.01 to 100 (1 changes nothing)")?;
        let p = self.presence_penalty;
        within("presence_penalty", p, penalty.contains(&p), "-2 to 2")?;
        let p = self.frequency_penalty;
        within("frequency_penalty", p, penalty.contains(&p), "-2 to 2")?;
        for (index, (id, bias)) in self.logit_bias.iter().enumerate() {
            let bias_range = (-LOGIT_BIAS_MAX..=LOGIT_BIAS_MAX).contains(bias);
            within("logit_bias", *bias, bias_range, "-100 to 100")?;
            if id.0 as usize >= vocabulary {
                return Err(SamplingError::BiasToken { id: *id, vocabulary });
            }
            if self.logit_bias[..index].iter().any(|(earlier, _)| earlier == id) {
                return Err(SamplingError::BiasTwice { id: *id });
            }
        }
        let max = LOGPROBS_MAX.min(vocabulary);
        match self.logprobs {
            Some(found) if found > max => Err(SamplingError::Logprobs { found, max }),
            _ => Ok(()),
        }
    }
}
