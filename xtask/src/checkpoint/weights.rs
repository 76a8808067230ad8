//! Seeded weights of sane magnitudes, for synthetic checkpoints: every row of every tensor has a stream of
//! its own, so that any part can be written alone.

use std::ops::Range;

use k3_pipeline::model::synth::{SynthTensor, SynthType};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Mean and standard deviation of a tensor's values.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Spread {
    mean: f32,
    deviation: f32,
}

/// Rows of a tensor and their length: a vector is one row, a convolution has one per channel.
#[must_use]
pub fn rows_of(tensor: &SynthTensor) -> (usize, usize) {
    match tensor.shape[..] {
        [] => (1, 1),
        [n] => (1, n),
        [rows, ref rest @ ..] => (rows, rest.iter().product()),
    }
}

/// Bytes of `rows` of `tensor` as stored, appended to `out`.
pub fn append_rows(seed: u64, tensor: &SynthTensor, rows: Range<usize>, out: &mut Vec<u8>) {
    let stream = xxh3_64_with_seed(tensor.name.as_bytes(), seed);
    let (_, cols) = rows_of(tensor);
    let spread = spread_of(&tensor.name, cols);
    for row in rows {
        let mut random = SplitMix64(stream.wrapping_add((row as u64).wrapping_mul(ROW_STRIDE)));
        match tensor.dtype {
            SynthType::F32 => (0..cols).for_each(|_| out.extend(spread.value(&mut random).to_le_bytes())),
            SynthType::Bf16 => {
                (0..cols).for_each(|_| out.extend(bf16_bits(spread.value(&mut random)).to_le_bytes()));
            }
            SynthType::U8 if tensor.name.ends_with("_scale") => {
                (0..cols).for_each(|_| out.push(SCALE_LEAST + (random.next() >> 62) as u8));
            }
            SynthType::U8 => append_bytes(&mut random, cols, out),
        }
    }
}

/// Keeps the streams of neighbouring rows apart.
const ROW_STRIDE: u64 = 0xD1B5_4A32_D192_ED03;
/// Scales of 2^-10 to 2^-7: with codes of about 2.7, rows of a few thousand columns keep a vector's size.
const SCALE_LEAST: u8 = 117;

fn append_bytes(random: &mut SplitMix64, count: usize, out: &mut Vec<u8>) {
    let end = out.len() + count;
    while out.len() < end {
        let bytes = random.next().to_le_bytes();
        out.extend(&bytes[..bytes.len().min(end - out.len())]);
    }
}

/// What a tensor of this name holds.
fn spread_of(name: &str, cols: usize) -> Spread {
    let per_column = 1.0 / (cols as f32).sqrt();
    let (mean, deviation) = match name {
        n if n.ends_with("conv1d.weight") => (0.0, 0.4),
        n if n.ends_with("A_log") || n.ends_with("dt_bias") => (0.0, 0.5),
        n if n.ends_with("e_score_correction_bias") => (0.0, 0.02),
        n if n.ends_with("norm.weight") => (1.0, 0.1),
        n if n.ends_with("embed_tokens.weight") => (0.0, 1.0),
        n if n.ends_with("lm_head.weight") => (0.0, 3.0 * per_column),
        n if n.ends_with("block_sparse_moe.gate.weight") => (0.0, 1.5 * per_column),
        _ => (0.0, per_column),
    };
    Spread { mean, deviation }
}

impl Spread {
    /// Sum of four uniform numbers: near enough to a normal distribution, and the same bits everywhere.
    fn value(self, random: &mut SplitMix64) -> f32 {
        let bits = random.next();
        let sum: i32 = (0..4).map(|i| i32::from((bits >> (16 * i)) as u16)).sum();
        // Mean 2 * 65535; deviation of one part 65536 / sqrt(12), of four twice that.
        let unit = (sum - 2 * 65_535) as f32 / 37_837.0;
        self.mean + self.deviation * unit
    }
}

/// Rounds to nearest, ties to even; for finite values.
fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014).
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, dtype: SynthType, shape: &[usize]) -> SynthTensor {
        SynthTensor { name: name.to_owned(), dtype, shape: shape.to_vec() }
    }

    fn bytes(t: &SynthTensor, rows: Range<usize>) -> Vec<u8> {
        let mut out = Vec::new();
        append_rows(7, t, rows, &mut out);
        out
    }

    #[test]
    fn any_part_can_be_written_alone_and_tensors_differ() {
        for (name, dtype, shape, row_bytes) in [
            ("a.q_proj.weight", SynthType::Bf16, &[5, 33][..], 66),
            ("a.q_conv1d.weight", SynthType::F32, &[5, 1, 4][..], 16),
            ("a.w1.weight_packed", SynthType::U8, &[5, 13][..], 13),
        ] {
            let t = tensor(name, dtype, shape);
            let whole = bytes(&t, 0..5);
            assert_eq!(whole.len() as u64, t.bytes());
            assert_eq!(bytes(&t, 2..4), whole[2 * row_bytes..4 * row_bytes], "{name}");
            assert_ne!(bytes(&t, 2..3), bytes(&t, 3..4), "{name}");
            assert_ne!(bytes(&tensor("b", dtype, shape), 0..5), whole, "{name}");
        }
    }

    #[test]
    fn values_have_the_spread_asked_for() {
        let t = tensor("x.norm.weight", SynthType::F32, &[20_000]);
        let values: Vec<f64> = bytes(&t, 0..1)
            .chunks_exact(4)
            .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
            .collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
        assert!((mean - 1.0).abs() < 3e-3 && (variance.sqrt() - 0.1).abs() < 2e-3, "{mean} {variance}");
    }

    #[test]
    fn scales_are_neither_subnormal_nor_nan() {
        let t = tensor("x.w1.weight_scale", SynthType::U8, &[40, 10]);
        assert!(bytes(&t, 0..40).iter().all(|&b| (SCALE_LEAST..SCALE_LEAST + 4).contains(&b)));
    }

    #[test]
    fn bf16_rounds_to_nearest_even() {
        assert_eq!(bf16_bits(1.0), 0x3F80);
        assert_eq!(bf16_bits(f32::from_bits(0x3F80_8000)), 0x3F80);
        assert_eq!(bf16_bits(f32::from_bits(0x3F81_8000)), 0x3F82);
        assert_eq!(bf16_bits(f32::from_bits(0x3F80_8001)), 0x3F81);
    }
}
