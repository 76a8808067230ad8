//! The kernels around the matrix products: recurrence, attention over the latent cache, element-wise ones.

use std::hint::black_box;

use k3_kernel::kda::{KdaTokens, kda_state_len};
use k3_kernel::mla::{Latent, mla_scratch};
use k3_kernel::testing::Random;
use k3_kernel::{Columns, Kernels, Out};

use super::measure::{Work, part};
use super::{Case, Maker};

/// All kernels but the matrix products.
pub const CASES: &[Maker] = &[
    ("kda_step", kda_cases),
    ("mla_attend", mla_cases),
    ("situ", situ_cases),
    ("rmsnorm", rmsnorm_cases),
    ("exp", exp_cases),
    ("conv_silu", conv_cases),
];

/// Heads of a layer, and the width of their keys and values.
const HEADS: usize = 96;
const WIDTH: usize = 128;
/// States of so many layers do not fit in a cache.
const COLD_LAYERS: usize = 12;

/// Work that is a closure: given a thread and their number, it makes the thread's calls.
struct Parts<F>(F);

impl<F: Fn(usize, usize) -> Box<dyn FnMut(usize)> + Sync> Work for Parts<F> {
    fn worker(&self, thread: usize, threads: usize) -> Box<dyn FnMut(usize) + '_> {
        (self.0)(thread, threads)
    }
}

/// A case of one vector that stays in the cache. `flops` and `bytes` are those of a call.
fn hot(kernel: &'static str, shape: String, flops: usize, bytes: usize, work: Box<dyn Work>) -> Case {
    let (flops, bytes) = (flops as f64, bytes as f64);
    Case { kernel, shape, batch: 1, cold: false, flops, bytes, work, reference: None }
}

/// One token through a layer's states, beside merely scaling the states in place.
fn kda_cases(kernels: Kernels) -> Vec<Case> {
    let state = kda_state_len(WIDTH, WIDTH);
    let step = move |thread, threads| -> Box<dyn FnMut(usize)> {
        let heads = part(HEADS, 1, thread, threads).len();
        let mut states = vec![0.01; COLD_LAYERS * heads * state];
        let mut random = Random::new(1);
        let (q, k, v) = (random.vec(WIDTH, 0.1), random.vec(WIDTH, 0.1), random.vec(WIDTH, 1.0));
        let (alpha, beta, mut out) = (vec![0.9; WIDTH], [0.5], vec![0.0; WIDTH]);
        Box::new(move |call| {
            let layer = call % COLD_LAYERS * heads * state;
            for state in states[layer..layer + heads * state].chunks_exact_mut(state) {
                let tokens = KdaTokens {
                    q: Columns::one(&q),
                    k: Columns::one(&k),
                    v: Columns::one(&v),
                    alpha: Columns::one(&alpha),
                    beta: Columns::one(&beta),
                };
                kernels.kda_run(state, WIDTH, WIDTH, &tokens, Out::one(&mut out));
            }
            black_box(&mut out);
        })
    };
    let scale = move |thread, threads| -> Box<dyn FnMut(usize)> {
        let layer = part(HEADS, 1, thread, threads).len() * state;
        let mut states = vec![0.01f32; COLD_LAYERS * layer];
        Box::new(move |call| {
            let first = call % COLD_LAYERS * layer;
            for s in black_box(&mut states[first..first + layer]) {
                *s *= 0.999;
            }
        })
    };
    let case = |kernel, flops: usize, work| {
        let values = HEADS * state;
        let shape = format!("{HEADS}x{WIDTH}x{WIDTH}");
        Case { cold: true, ..hot(kernel, shape, flops * values, 8 * values, work) }
    };
    vec![case("kda_step", 8, Box::new(Parts(step))), case("kda_step (scale)", 1, Box::new(Parts(scale)))]
}

/// One token's attention over the latent cache of a layer.
fn mla_cases(kernels: Kernels) -> Vec<Case> {
    let (rank, rope, positions) = (512, 64, 4096);
    let width = rank + rope;
    let attend = move |thread, threads| -> Box<dyn FnMut(usize)> {
        let heads = part(HEADS, 16, thread, threads).len();
        let mut random = Random::new(2);
        let (q, data) = (random.vec(heads * width, 1.0), random.vec(positions * width, 1.0));
        let (mut ctx, mut scratch) = (vec![0.0; heads * rank], vec![0.0; mla_scratch(heads, rank, rope)]);
        Box::new(move |_| {
            let latent = Latent { data: &data, rank, rope };
            kernels.mla_attend(&q, latent, 0.07, &mut ctx, &mut scratch);
            black_box(&mut ctx);
        })
    };
    let flops = 2 * HEADS * positions * (width + rank);
    let shape = format!("{HEADS} heads, {positions}");
    vec![hot("mla_attend", shape, flops, positions * width * 4, Box::new(Parts(attend)))]
}

fn situ_cases(kernels: Kernels) -> Vec<Case> {
    let n = 3072;
    let work = move |_, _| -> Box<dyn FnMut(usize)> {
        let (gate, up, mut y) = (Random::new(3).vec(n, 5.0), Random::new(4).vec(n, 5.0), vec![0.0; n]);
        Box::new(move |_| {
            kernels.situ(&gate, &up, 4.0, 25.0, &mut y);
            black_box(&mut y);
        })
    };
    vec![hot("situ", format!("{n}"), n, 12 * n, Box::new(Parts(work)))]
}

fn rmsnorm_cases(kernels: Kernels) -> Vec<Case> {
    let n = 7168;
    let work = move |_, _| -> Box<dyn FnMut(usize)> {
        let (x, w, mut y) = (Random::new(5).vec(n, 2.0), Random::new(6).vec(n, 2.0), vec![0.0; n]);
        Box::new(move |_| {
            kernels.rmsnorm(&x, &w, 1e-5, &mut y);
            black_box(&mut y);
        })
    };
    vec![hot("rmsnorm", format!("{n}"), 4 * n, 12 * n, Box::new(Parts(work)))]
}

fn exp_cases(kernels: Kernels) -> Vec<Case> {
    let n = 3072;
    let work = move |_, _| -> Box<dyn FnMut(usize)> {
        let (x, mut y) = (Random::new(7).vec(n, 20.0), vec![0.0; n]);
        Box::new(move |_| {
            y.copy_from_slice(&x);
            kernels.exp(&mut y);
            black_box(&mut y);
        })
    };
    vec![hot("exp", format!("{n}"), n, 8 * n, Box::new(Parts(work)))]
}

/// One token of one of a layer's three convolutions.
fn conv_cases(kernels: Kernels) -> Vec<Case> {
    let (channels, width) = (HEADS * WIDTH, 4);
    let work = move |thread, threads| -> Box<dyn FnMut(usize)> {
        let channels = part(HEADS, 1, thread, threads).len() * WIDTH;
        let mut random = Random::new(8);
        let (taps, x) = (random.vec(width * channels, 1.0), random.vec(channels, 1.0));
        let (mut hist, mut y) = (vec![0.0; (width - 1) * channels], vec![0.0; channels]);
        Box::new(move |_| {
            kernels.conv_silu(&taps, &mut hist, &x, &mut y);
            black_box(&mut y);
        })
    };
    let bytes = (4 + 3 + 3 + 2) * 4 * channels;
    vec![hot("conv_silu", format!("{channels}"), 2 * width * channels, bytes, Box::new(Parts(work)))]
}
