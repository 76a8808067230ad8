//! Prints a digest of every kernel's results over seeded inputs, for one instruction set:
//! `digest scalar|avx2|neon`. All instruction sets and machines must print the same lines.
//!
//! Exit code 3 where this processor lacks the instruction set.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;

use k3_kernel::conv::conv_taps;
use k3_kernel::hn::{hn_encode, hn_encoded_max};
use k3_kernel::kda::{KdaTokens, kda_state_len};
use k3_kernel::mla::{Latent, mla_scratch};
use k3_kernel::testing::Random;
use k3_kernel::weights::tiled_bytes;
use k3_kernel::{
    Bf16Rows, Bf16Tiled, Columns, F32Rows, HnTiled, Isa, Kernels, Matrix, Mxfp4, Out, Q23, ShapeError,
    q23_bytes,
};

type Case = fn(Kernels, &mut Digest) -> Result<(), ShapeError>;

const CASES: &[(&str, Case)] = &[
    ("functions", functions),
    ("norms", norms),
    ("activations", activations),
    ("convolution", convolution),
    ("residual_mix", residual_mix),
    ("kda_decay", kda_decay),
    ("kda_run", kda_run),
    ("mla_attend", mla_attend),
    ("moe_combine", moe_combine),
    ("matmul", matmul),
    ("q23_quantize", q23_quantize),
    ("mxfp4_matmul", mxfp4_matmul),
];

/// FNV-1a, 64 bits.
struct Digest(u64);

impl Digest {
    fn bytes(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// The bits of each value; all not-a-numbers count as one.
    fn values(&mut self, values: &[f32]) {
        for value in values {
            let bits = if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() };
            self.bytes(&bits.to_le_bytes());
        }
    }
}

fn main() -> ExitCode {
    let Some(isa) = std::env::args().nth(1).and_then(|name| name.parse::<Isa>().ok()) else {
        eprintln!("usage: digest scalar|avx2|neon");
        return ExitCode::from(2);
    };
    let Some(kernels) = Kernels::new(isa) else {
        eprintln!("this processor, or this build, lacks {isa}");
        return ExitCode::from(3);
    };
    for (name, case) in CASES {
        let mut digest = Digest(0xcbf2_9ce4_8422_2325);
        if let Err(error) = case(kernels, &mut digest) {
            eprintln!("{name}: {error}");
            return ExitCode::from(1);
        }
        println!("{name} {:016x}", digest.0);
    }
    ExitCode::SUCCESS
}

fn functions(k: Kernels, digest: &mut Digest) -> Result<(), ShapeError> {
    for function in [Kernels::exp, Kernels::sigmoid, Kernels::tanh, Kernels::softplus] {
        // Every 9973rd bit pattern, and a denser sample of the usual range.
        let mut x: Vec<f32> = (0..=u32::MAX / 9973).map(|i| f32::from_bits(i * 9973)).collect();
        x.extend(Random::new(1).vec(100_001, 110.0));
        function(k, &mut x);
        digest.values(&x);
    }
    Ok(())
}

fn norms(k: Kernels, digest: &mut Digest) -> Result<(), ShapeError> {
    for n in [1, 7, 8, 20, 33, 128, 1024, 1031, 7168] {
        let mut random = Random::new(n as u64);
        let (mut x, w, gate) = (random.vec(n, 3.0), random.rough(n), random.rough(n));
        let mut y = vec![0.0; n];
        k.rmsnorm(&x, &w, 1e-5, &mut y);
        digest.values(&y);
        k.rmsnorm_gated(&x, &w, 1e-5, &gate, &mut y);
        digest.values(&y);
        k.l2norm(&mut x, 1e-6, 0.1);
        digest.values(&x);
    }
    Ok(())
}

fn activations(k: Kernels, digest: &mut Digest) -> Result<(), ShapeError> {
    for n in [1, 8, 13, 3072] {
        let mut random = Random::new(n as u64);
        for (gate, mut up) in [(random.vec(n, 20.0), random.vec(n, 60.0)), (random.rough(n), random.rough(n))]
        {
            let mut y = vec![0.0; n];
            k.situ(&gate, &up, 4.0, 25.0, &mut y);
            digest.values(&y);
            k.sigmoid_mul(&mut up, &gate);
            k.add(&gate, &mut up);
            digest.values(&up);
            k.softmax(&mut up);
            digest.values(&up);
        }
    }
    Ok(())
}

fn convolution(k: Kernels, digest: &mut Digest) -> Result<(), ShapeError> {
    for channels in [5, 16, 128, 1000] {
        let mut random = Random::new(channels as u64);
        let (w, mut taps) = (random.vec(channels * 4, 1.0), vec![0.0; channels * 4]);
        conv_taps(&w, 4, &mut taps);
        let (mut hist, mut y) = (vec![0.0; channels * 3], vec![0.0; channels]);
        for _ in 0..5 {
            k.conv_silu(&taps, &mut hist, &random.vec(channels, 4.0), &mut y);
            digest.values(&y);
        }
        digest.values(&hist);
    }
    Ok(())
}

fn residual_mix(k: Kernels, digest: &mut Digest) -> Result<(), ShapeError> {
    for (n, count) in [(5, 1), (64, 3), (152, 9), (7168, 9)] {
        let mut random = Random::new(n as u64);
        let sources: Vec<Vec<f32>> = (0..count).map(|_| random.vec(n, 3.0)).collect();
        let sources: Vec<&[f32]> = sources.iter().map(Vec::as_slice).collect();
        let (key, mut y) = (random.vec(n, 0.05), vec![0.0; n]);
        k.residual_mix(&sources, &key, 1e-5, &mut y);
        digest.values(&y);
    }
    Ok(())
}

fn kda_decay(k: Kernels, digest: &mut Digest) -> Result<(), ShapeError> {
    for n in [1, 16, 20, 128] {
        let mut random = Random::new(n as u64);
        let (z, bias, mut alpha) = (random.vec(n, 9.0), random.vec(n, 3.0), vec![0.0; n]);
        for bound in [Some(-5.0), None] {
            k.kda_decay(&z, &bias, 1.3, bound, &mut alpha);
            digest.values(&alpha);
        }
    }
    Ok(())
}

fn kda_run(k: Kernels, digest: &mut Digest) -> Result<(), ShapeError> {
    for (dk, dv) in [(16, 16), (20, 20), (7, 45), (128, 128)] {
        let mut random = Random::new((dk * dv) as u64);
        let mut state = vec![0.0; kda_state_len(dk, dv)];
        let scale = 1.0 / (dk as f32).sqrt();
        let (q, key, v) = (random.vec(9 * dk, scale), random.vec(9 * dk, scale), random.vec(9 * dv, 2.0));
        let half = |x: Vec<f32>| -> Vec<f32> { x.iter().map(|x| x + 0.5).collect() };
        let (alpha, beta) = (half(random.vec(9 * dk, 0.5)), half(random.vec(9, 0.5)));
        let tokens = KdaTokens {
            q: Columns::packed(&q, dk, 9),
            k: Columns::packed(&key, dk, 9),
            v: Columns::packed(&v, dv, 9),
            alpha: Columns::packed(&alpha, dk, 9),
            beta: Columns::packed(&beta, 1, 9),
        };
        let mut out = vec![0.0; 9 * dv];
        k.kda_run(&mut state, dk, dv, &tokens, Out::new(&mut out, dv, dv, 9));
        digest.values(&out);
        digest.values(&state);
    }
    Ok(())
}

fn mla_attend(k: Kernels, digest: &mut Digest) -> Result<(), ShapeError> {
    for (heads, rank, rope, positions) in
        [(4, 32, 8, 9), (5, 36, 8, 97), (19, 300, 20, 200), (16, 512, 64, 110)]
    {
        let mut random = Random::new((heads * positions) as u64);
        let (q, data) = (random.vec(heads * (rank + rope), 1.0), random.vec(positions * (rank + rope), 1.5));
        let (mut ctx, mut scratch) = (vec![0.0; heads * rank], vec![0.0; mla_scratch(heads, rank, rope)]);
        k.mla_attend(&q, Latent { data: &data, rank, rope }, 0.1, &mut ctx, &mut scratch);
        digest.values(&ctx);
    }
    Ok(())
}

fn moe_combine(k: Kernels, digest: &mut Digest) -> Result<(), ShapeError> {
    for (n, experts) in [(9, 1), (64, 4), (3584, 16)] {
        let mut random = Random::new(n as u64);
        let (ys, weights, mut y) = (random.vec(n * experts, 2.0), random.vec(experts, 1.0), vec![0.0; n]);
        k.moe_combine(&ys, &weights, &mut y);
        digest.values(&y);
    }
    Ok(())
}

/// bf16 weights of many exponents.
fn bf16(random: &mut Random, n: usize) -> Vec<u8> {
    random
        .vec(n, 1.0)
        .iter()
        .flat_map(|w| ((w * w * w).to_bits() as u64 >> 16).to_le_bytes()[..2].to_vec())
        .collect()
}

fn matmul(k: Kernels, digest: &mut Digest) -> Result<(), ShapeError> {
    for (rows, cols) in [(1, 3), (17, 40), (48, 257), (100, 1030)] {
        let mut random = Random::new((rows * cols) as u64);
        let bytes = bf16(&mut random, rows * cols);
        let wide: Vec<u8> = random.vec(rows * cols, 1.0).iter().flat_map(|w| w.to_le_bytes()).collect();
        let row_major = Bf16Rows::new(&bytes, rows, cols)?;
        let mut tiled = vec![0; tiled_bytes(rows, cols)?];
        k.tile_rows(row_major, &mut tiled);
        digest.bytes(&tiled);
        let mut code = vec![0; hn_encoded_max(rows, cols)?];
        let code_len = hn_encode(row_major, &mut code);
        let mut forms = vec![
            Matrix::Bf16Rows(row_major),
            Matrix::F32Rows(F32Rows::new(&wide, rows, cols)?),
            Matrix::Bf16Tiled(Bf16Tiled::new(&tiled, rows, cols)?),
        ];
        if let Some(len) = code_len {
            forms.push(Matrix::Hn(HnTiled::new(&code[..len], rows, cols)?));
        }
        let x = random.vec(5 * cols, 3.0);
        for form in forms {
            for count in [1, 2, 5] {
                let mut y = vec![0.0; count * rows];
                let columns = Columns::packed(&x, cols, count);
                k.matmul(form, 0..rows, columns, Out::new(&mut y, rows, rows, count));
                digest.values(&y);
            }
        }
        let (down, mut across) = (random.vec(rows, 1.0), vec![0.0; cols]);
        k.matmul_t(Matrix::Bf16Rows(row_major), 0..rows, &down, &mut across);
        digest.values(&across);
    }
    Ok(())
}

fn q23_quantize(k: Kernels, digest: &mut Digest) -> Result<(), ShapeError> {
    for cols in [32, 64, 96, 3584] {
        let mut random = Random::new(cols as u64);
        for x in [random.vec(cols, 3.0), random.rough(cols)] {
            let mut bytes = vec![0; q23_bytes(cols)];
            k.q23_quantize(&x, &mut bytes);
            digest.bytes(&bytes);
        }
    }
    Ok(())
}

fn mxfp4_matmul(k: Kernels, digest: &mut Digest) -> Result<(), ShapeError> {
    for (rows, cols) in [(1, 32), (9, 64), (40, 352), (64, 3584)] {
        let mut random = Random::new((rows * cols) as u64);
        let packed: Vec<u8> = (0..rows * cols / 2).map(|_| random.bits() as u8).collect();
        let scales: Vec<u8> = (0..rows * cols / 32).map(|_| 110 + random.bits() as u8 % 30).collect();
        let w = Mxfp4::new(&packed, &scales, rows, cols)?;
        let vectors: Vec<Vec<u8>> = (0..5)
            .map(|_| {
                let mut bytes = vec![0; q23_bytes(cols)];
                k.q23_quantize(&random.vec(cols, 2.0), &mut bytes);
                bytes
            })
            .collect();
        let vectors: Vec<Q23<'_>> = vectors.iter().map(|v| Q23::new(v, cols)).collect::<Result<_, _>>()?;
        for count in [1, 2, 5] {
            let mut y = vec![0.0; count * rows];
            k.mxfp4_matmul(w, 0..rows, &vectors[..count], Out::new(&mut y, rows, rows, count));
            digest.values(&y);
        }
    }
    Ok(())
}
