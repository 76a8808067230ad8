//! How tokens are chosen and where an answer stops, as arguments.

use anyhow::anyhow;
use k3_kernel::Kernels;
use k3_pipeline::generation::Generator;
use k3_pipeline::sample::{Sampler, SamplingError, SamplingParams, StopError, StopMatcher};
use k3_pipeline::speculate::{Drafter, Gated, LookupParams, PromptLookup};
use k3_pipeline::units::TokenId;

use crate::failure::Failure;

/// Choosing tokens.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// 0 always takes the most likely token; 1 draws from the model's own distribution.
    #[arg(long, value_name = "T", allow_hyphen_values = true)]
    temperature: Option<f32>,
    /// Only the K most likely tokens; 0 is all.
    #[arg(long, value_name = "K", default_value = "0", value_parser = whole::<usize>, allow_hyphen_values = true)]
    top_k: usize,
    /// Only the most likely tokens that together reach this probability; 1 is all.
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_hyphen_values = true)]
    top_p: f32,
    /// Only tokens at least P times as likely as the most likely; 0 is all.
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_hyphen_values = true)]
    min_p: f32,
    /// Divides the positive logits of tokens in prompt and output, multiplies the others; 1 is off.
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_hyphen_values = true)]
    repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the output.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_hyphen_values = true)]
    presence_penalty: f32,
    /// Subtracted once for every time a token is in the output.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_hyphen_values = true)]
    frequency_penalty: f32,
    /// Added to the logit of a token; can be given again.
    #[arg(long, value_name = "ID=BIAS", value_parser = bias, allow_hyphen_values = true)]
    logit_bias: Vec<(TokenId, f32)>,
    /// Start of the random numbers: the same seed gives the same text on every machine.
    #[arg(long, value_name = "N", default_value = "0", value_parser = whole::<u64>, allow_hyphen_values = true)]
    seed: u64,
    /// Guess tokens from the text so far and verify several in one pass; the text stays the same.
    #[arg(long, value_enum, value_name = "HOW", default_value = "off")]
    draft: Draft,
}

/// Who guesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Draft {
    /// No drafts.
    Off,
    /// What followed the last tokens the last time they were said.
    Lookup,
}

/// Where an answer stops.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Stopping")]
pub(crate) struct StopArgs {
    /// Stop before this text; can be given again.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Stop at this token; can be given again. The model's own end token always stops.
    #[arg(long, value_name = "ID", value_parser = whole::<u32>, allow_hyphen_values = true)]
    stop_id: Vec<u32>,
}

/// A number that is not negative; the error says how large it may be.
fn whole<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    let largest = if size_of::<T>() < 8 { u64::MAX >> (64 - 8 * size_of::<T>()) } else { u64::MAX };
    text.parse().map_err(|_| format!("expected a whole number from 0 to {largest}"))
}

fn bias(text: &str) -> Result<(TokenId, f32), String> {
    let expected = "expected ID=BIAS, as in 1008=-5";
    let (id, bias) = text.split_once('=').ok_or(expected)?;
    match (id.parse(), bias.parse()) {
        (Ok(id), Ok(bias)) => Ok((TokenId(id), bias)),
        _ => Err(expected.to_owned()),
    }
}

impl SamplingArgs {
    /// The parameters, with `temperature` where none is given.
    pub(crate) fn params(&self, temperature: f32, logprobs: Option<usize>) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(temperature),
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.clone(),
            seed: self.seed,
            logprobs,
        }
    }

    /// A generator over a vocabulary.
    pub(crate) fn generator(
        &self,
        params: SamplingParams,
        vocabulary: usize,
        interruptible: bool,
    ) -> Result<Generator, Failure> {
        let sampler = Sampler::new(params, vocabulary, Kernels::detect())?;
        let drafter: Option<Box<dyn Drafter>> = match self.draft {
            Draft::Off => None,
            Draft::Lookup => Some(Box::new(Gated::new(PromptLookup::new(LookupParams::default())))),
        };
        Ok(Generator::new(sampler, drafter, interruptible))
    }
}

impl StopArgs {
    /// Whether any text stops: then a tokenizer is needed.
    pub(crate) fn has_strings(&self) -> bool {
        !self.stop.is_empty()
    }

    /// The texts and ids.
    pub(crate) fn raw(&self) -> (&[String], &[u32]) {
        (&self.stop, &self.stop_id)
    }

    /// Watches for these and for `end`.
    pub(crate) fn matcher(&self, vocabulary: usize, end: TokenId) -> Result<StopMatcher, Failure> {
        if let Some(id) = self.stop_id.iter().find(|id| **id as usize >= vocabulary) {
            return Err(Failure::refused(anyhow!(
                "--stop-id {id} is not in the vocabulary of {vocabulary} ids"
            )));
        }
        let ids = self.stop_id.iter().copied().map(TokenId).chain([end]).collect();
        Ok(StopMatcher::new(ids, self.stop.clone())?)
    }
}

/// A parameter that is refused.
impl From<SamplingError> for Failure {
    fn from(error: SamplingError) -> Self {
        match error {
            SamplingError::Row { .. } | SamplingError::NotFinite { .. } => Self::run(error),
            _ => Self::refused(error),
        }
    }
}

/// A stop string that is refused.
impl From<StopError> for Failure {
    fn from(error: StopError) -> Self {
        Self::refused(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_seeds_are_not_negative() {
        assert_eq!(whole("18446744073709551615"), Ok(u64::MAX));
        let says = |limit: u64| format!("expected a whole number from 0 to {limit}");
        for bad in ["-1", "1.5", "", "18446744073709551616"] {
            assert_eq!(whole::<u64>(bad), Err(says(u64::MAX)), "{bad}");
            assert_eq!(whole::<u32>(bad), Err(says(u32::MAX.into())), "{bad}");
        }
    }

    #[test]
    fn a_bias_is_an_id_and_a_number() {
        assert_eq!(bias("7=-2.5"), Ok((TokenId(7), -2.5)));
        for bad in ["7", "=1", "x=1", "7=", "-1=2"] {
            assert!(bias(bad).is_err(), "{bad}");
        }
    }
}
