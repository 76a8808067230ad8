use k3_kernel::act::bf16_to_f32;
use k3_kernel::conv::conv_taps;
use k3_kernel::testing::{self, Random, assert_same_bits, same_on_each_isa, worst_error};

use crate::LENGTHS;

/// Runs an operation with two inputs on regular and on rough values; bits must agree.
fn check(what: &str, run: impl Fn(k3_kernel::Kernels, &[f32], &[f32]) -> Vec<f32>) {
    for &n in LENGTHS {
        let mut random = Random::new(n as u64);
        for (a, b) in [(random.vec(n, 5.0), random.vec(n, 2.0)), (random.rough(n), random.rough(n))] {
            same_on_each_isa(&format!("{what} of {n}"), |k| run(k, &a, &b));
        }
    }
}

#[test]
fn same_bits() {
    check("add", |k, a, b| {
        let mut y = b.to_vec();
        k.add(a, &mut y);
        y
    });
    check("sigmoid_mul", |k, a, b| {
        let mut y = b.to_vec();
        k.sigmoid_mul(&mut y, a);
        y
    });
    check("situ", |k, a, b| {
        let mut y = vec![0.0; a.len()];
        k.situ(a, b, 4.0, 25.0, &mut y);
        y
    });
    check("rmsnorm", |k, a, b| {
        let mut y = vec![0.0; a.len()];
        k.rmsnorm(a, b, 1e-5, &mut y);
        y
    });
    check("rmsnorm_gated", |k, a, b| {
        let mut y = vec![0.0; a.len()];
        k.rmsnorm_gated(a, b, 1e-5, a, &mut y);
        y
    });
    check("l2norm", |k, a, _| {
        let mut y = a.to_vec();
        k.l2norm(&mut y, 1e-6, 0.25);
        y
    });
    check("softmax", |k, a, _| {
        let mut y = a.to_vec();
        k.softmax(&mut y);
        y
    });
}

#[test]
fn right_values() {
    for &n in LENGTHS {
        let mut random = Random::new(7 + n as u64);
        let (x, w, gate) = (random.vec(n, 3.0), random.vec(n, 2.0), random.vec(n, 30.0));
        let mut y = vec![0.0; n];
        k3_kernel::each_isa!(|k| {
            k.rmsnorm(&x, &w, 1e-5, &mut y);
            let expected = testing::rmsnorm(&x, &w, 1e-5);
            assert!(worst_error(&y, &expected) < 4e-7, "rmsnorm of {n}");

            k.rmsnorm_gated(&x, &w, 1e-5, &gate, &mut y);
            let sigmoids = gate.iter().map(|g| testing::sigmoid(f64::from(*g)));
            let gated: Vec<f64> = expected.iter().zip(sigmoids).map(|(e, s)| e * s).collect();
            assert!(worst_error(&y, &gated) < 6e-7, "rmsnorm_gated of {n}");

            y.copy_from_slice(&x);
            k.l2norm(&mut y, 1e-6, 0.3);
            assert!(worst_error(&y, &testing::l2norm(&x, 1e-6, 0.3)) < 4e-7, "l2norm of {n}");

            k.situ(&gate, &x, 4.0, 25.0, &mut y);
            assert!(worst_error(&y, &testing::situ(&gate, &x, 4.0, 25.0)) < 6e-7, "situ of {n}");

            y.copy_from_slice(&gate);
            k.softmax(&mut y);
            let wide: Vec<f64> = gate.iter().map(|g| f64::from(*g)).collect();
            assert!(worst_error(&y, &testing::softmax(&wide)) < 6e-7, "softmax of {n}");
        });
    }
}

/// A norm of a constant vector times large numbers of elements shows how rounding grows with the length.
#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter; `right_values` runs the same code")]
fn long_sums_stay_accurate() {
    let x = vec![1.000_123; 1 << 17];
    let w = vec![1.0; x.len()];
    let mut y = vec![0.0; x.len()];
    k3_kernel::Kernels::detect().rmsnorm(&x, &w, 0.0, &mut y);
    assert!(worst_error(&y, &testing::rmsnorm(&x, &w, 0.0)) < 1e-6);
}

#[test]
fn bf16_widens_exactly() {
    let all = (0..=u16::MAX).step_by(if cfg!(miri) { 1009 } else { 1 });
    let bytes: Vec<u8> = all.clone().flat_map(u16::to_le_bytes).collect();
    let mut wide = vec![0.0; bytes.len() / 2];
    bf16_to_f32(&bytes, &mut wide);
    assert!(wide.iter().zip(all).all(|(wide, bits)| wide.to_bits() == u32::from(bits) << 16));
}

#[test]
fn convolution() {
    let channel_counts: &[usize] = if cfg!(miri) { &[5, 13] } else { &[1, 5, 8, 13, 16, 40, 128] };
    for &channels in channel_counts {
        for width in [1, 2, 4, 5] {
            let mut random = Random::new((channels * 10 + width) as u64);
            let (w, x) = (random.vec(channels * width, 1.0), random.vec(7 * channels, 2.0));
            let run = |k: k3_kernel::Kernels, channels: std::ops::Range<usize>| {
                let all = w.len() / width;
                let mut taps = vec![0.0; channels.len() * width];
                conv_taps(&w[channels.start * width..channels.end * width], width, &mut taps);
                let mut hist = vec![0.0; channels.len() * (width - 1)];
                let mut y = vec![0.0; channels.len() * 7];
                for (x, y) in x.chunks(all).zip(y.chunks_mut(channels.len())) {
                    k.conv_silu(&taps, &mut hist, &x[channels.clone()], y);
                }
                // The history holds the last inputs, oldest first.
                let last: Vec<f32> =
                    x.chunks(all).skip(8 - width).flat_map(|x| &x[channels.clone()]).copied().collect();
                assert_same_bits("history", &hist, &last);
                y
            };
            let y = same_on_each_isa("conv_silu", |k| run(k, 0..channels));
            assert!(worst_error(&y, &testing::conv_silu(&w, width, &x)) < 6e-7);
            // A part of the channels alone gets the same bits.
            let part = channels / 3..channels;
            let alone = run(k3_kernel::Kernels::detect(), part.clone());
            let cut: Vec<f32> = y.chunks(channels).flat_map(|y| &y[part.clone()]).copied().collect();
            assert_same_bits("part of the channels", &alone, &cut);
        }
    }
}

#[test]
fn residual() {
    for &n in LENGTHS {
        for sources in [1, 2, 3, 9] {
            let mut random = Random::new((n * 16 + sources) as u64);
            let data: Vec<Vec<f32>> = (0..sources).map(|i| random.vec(n, 1.0 + i as f32)).collect();
            let data: Vec<&[f32]> = data.iter().map(Vec::as_slice).collect();
            let key = random.vec(n, 0.3);
            let y = same_on_each_isa("residual_mix", |k| {
                let mut y = vec![0.0; n];
                k.residual_mix(&data, &key, 1e-5, &mut y);
                y
            });
            let wide: Vec<f64> = key.iter().map(|key| f64::from(*key)).collect();
            let error = worst_error(&y, &testing::residual_mix(&data, &wide, f64::from(1e-5f32)));
            assert!(error < 5e-6, "{sources} sources of {n}: {error:e}");
        }
    }
}
