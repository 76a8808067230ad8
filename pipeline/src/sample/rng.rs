//! Random numbers that are the same on every machine: ChaCha with 8 rounds.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Where a sequence of random numbers stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomState {
    /// The seed.
    pub seed: u64,
    /// 32-bit words taken so far.
    pub words: u64,
}

/// Key: the seed, little endian, then zeros; stream 0.
#[derive(Debug)]
pub(super) struct Random {
    seed: u64,
    generator: ChaCha8Rng,
}

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        Self { seed, generator: ChaCha8Rng::from_seed(key) }
    }

    pub(super) fn at(state: RandomState) -> Self {
        let mut random = Self::new(state.seed);
        random.generator.set_word_pos(state.words.into());
        random
    }

    pub(super) fn state(&self) -> RandomState {
        // 2^64 words are never reached.
        let words = u64::try_from(self.generator.get_word_pos()).unwrap_or(u64::MAX);
        RandomState { seed: self.seed, words }
    }

    /// Uniform in [0, 1): the upper 53 bits of the next 64, two words.
    pub(super) fn unit(&mut self) -> f64 {
        (self.generator.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_every_machine() {
        let mut random = Random::new(42);
        let bits: Vec<u64> = (0..3).map(|_| random.unit().to_bits()).collect();
        // Computed by an independent ChaCha8.
        assert_eq!(bits, [0x3fd6_49cd_1c46_63ea, 0x3fd2_48e2_a905_a77c, 0x3fdf_950d_87d9_3f24]);
        assert_eq!(random.state(), RandomState { seed: 42, words: 6 });
    }

    #[test]
    fn a_state_goes_on() {
        let mut random = Random::new(7);
        for _ in 0..37 {
            random.unit();
        }
        let mut other = Random::at(random.state());
        assert!((0..100).all(|_| random.unit().to_bits() == other.unit().to_bits()));
    }
}
