//! Tests of the module above.

use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::dispatch::Isa;
use crate::matrix_oracle as matrix;
use crate::testing::cases;

fn kernels() -> impl Iterator<Item = Kernels> {
    Isa::ALL.into_iter().filter_map(Kernels::new)
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

/// Scale bytes as trained matrices have them.
fn scales(len: usize, seed: u64) -> Vec<u8> {
    noise(len, seed).into_iter().map(|byte| 115 + byte % 12).collect()
}

fn values(len: usize, seed: u64) -> Vec<f32> {
    let bytes = noise(len * 4, seed);
    bytes.as_chunks().0.iter().map(|b| (i32::from_le_bytes(*b) as f32 / 2f32.powi(31)).powi(3)).collect()
}

fn product(k: Kernels, w: Mxfp4<'_>, rows: Range<usize>, x: &[f32], count: usize) -> Vec<f32> {
    let mut bytes = vec![vec![9; q23_bytes(w.cols())]; count];
    for (t, bytes) in bytes.iter_mut().enumerate() {
        k.q23_quantize(&x[t * w.cols()..][..w.cols()], bytes);
    }
    let xs: Vec<Q23<'_>> = bytes.iter().map(|bytes| Q23::new(bytes, w.cols()).unwrap()).collect();
    let mut y = vec![9.0; rows.len() * count];
    let out = Out::new(&mut y, rows.len(), rows.len(), count);
    k.mxfp4_matmul(w, rows, &xs, out);
    y
}

/// Every instruction set, every column alone and in the batch, against the formula.
fn check(packed: &[u8], scales: &[u8], rows: usize, x: &[f32], count: usize) {
    let cols = x.len() / count;
    let w = Mxfp4::new(packed, scales, rows, cols).unwrap();
    for k in kernels() {
        let batch = product(k, w, 0..rows, x, count);
        for t in 0..count {
            let x = &x[t * cols..][..cols];
            let alone = product(k, w, 0..rows, x, 1);
            for r in 0..rows {
                let expected = matrix::q23(w.packed_row(r), w.scale_row(r), x);
                let expected = if expected.is_nan() { f32::NAN } else { expected };
                let found = [alone[r], batch[t * rows + r]];
                assert_eq!(
                    found.map(f32::to_bits),
                    [expected.to_bits(); 2],
                    "{} {rows} x {cols}, vector {t} of {count}, row {r}: {found:?}, expected {expected:e}",
                    k.isa()
                );
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter; `any_` runs the same code")]
fn every_length_around_lanes_pairs_and_blocks() {
    for groups in [1, 2, 3, 4, 7, 8, 9, 10, 15, 16, 17, 31, 33] {
        for rows in [1, 2, 7, 8, 9, 16, 19] {
            let packed = noise(rows * groups * 16, 1);
            check(&packed, &scales(rows * groups, 2), rows, &values(groups * 32, 3), 1);
        }
    }
}

#[test]
fn every_batch_width() {
    for count in 1..=if cfg!(miri) { 2 } else { Q23_BATCH_MAX } {
        let (rows, groups) = (11, 9);
        let packed = noise(rows * groups * 16, 4);
        check(&packed, &scales(rows * groups, 5), rows, &values(groups * 32 * count, 6), count);
    }
}

#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter; `any_` runs the same code")]
fn all_codes_with_all_scale_bytes() {
    let packed: Vec<u8> = (0..256 * 16).map(|i| (i % 8 * 2) as u8 | ((i % 8 * 2 + 1) as u8) << 4).collect();
    let scale_bytes: Vec<u8> = (0..=255).collect();
    for x in [values(32, 7), vec![1.0; 32], vec![0.0; 32], vec![f32::MAX; 32], vec![1e-45; 32]] {
        check(&packed, &scale_bytes, 256, &x, 1);
    }
    // One code at a time: the weight itself comes out.
    for (code, value) in (0u8..).zip(matrix::E2M1) {
        let mut packed = vec![0; 256 * 16];
        packed.iter_mut().step_by(16).for_each(|two| *two = code << 4);
        let mut x = vec![0.0; 32];
        x[1] = 1.0;
        let w = Mxfp4::new(&packed, &scale_bytes, 256, 32).unwrap();
        for k in kernels() {
            let y = product(k, w, 0..256, &x, 1);
            for (s, y) in y[..255].iter().enumerate() {
                let expected = (f64::from(value) * matrix::e8m0(s as u8)) as f32;
                assert!(*y == expected, "{} code {code} scale {s}: {y:e}, expected {expected:e}", k.isa());
            }
            assert!(y[255].is_nan());
        }
    }
}

#[test]
fn a_group_of_zeros_has_no_subnormal_grid() {
    let mut x = [0.0; 128];
    (x[0], x[40], x[97]) = (1.0, -0.0, 1e-45);
    for k in kernels() {
        let mut bytes = vec![9; q23_bytes(x.len())];
        k.q23_quantize(&x, &mut bytes);
        let grids = Q23::new(&bytes, x.len()).unwrap().scales.as_flattened();
        let grids: Vec<f32> = grids.iter().map(|g| f32::from_le_bytes(*g)).collect();
        assert_eq!(grids, [2f32.powi(-22), 1.0, 1.0, 1e-45], "{}", k.isa());
    }
}

#[test]
fn special_inputs() {
    let (rows, groups) = (9, 5);
    let (packed, scales) = (noise(rows * groups * 16, 8), scales(rows * groups, 9));
    let specials =
        [0.0, -0.0, 1e-45, -1e-45, 1e-39, f32::MIN_POSITIVE, 1e-30, 4e6, -8.4e6, 1e30, f32::MAX, f32::MIN];
    for special in specials.into_iter().step_by(if cfg!(miri) { 5 } else { 1 }) {
        let mut x = values(groups * 32, 10);
        x[70] = special;
        check(&packed, &scales, rows, &x, 1);
        x[64..96].fill(0.0);
        x[70] = special;
        check(&packed, &scales, rows, &x, 1);
        // The whole vector at the size of the special value.
        let scaled: Vec<f32> = values(groups * 32, 11).iter().map(|x| x * special).collect();
        check(&packed, &scales, rows, &scaled, 1);
    }
}

#[test]
fn a_non_finite_input_spoils_every_row_and_a_zero_group_none() {
    let (rows, groups) = (9, 5);
    let packed = vec![0; rows * groups * 16];
    let scales = vec![0; rows * groups];
    let w = Mxfp4::new(&packed, &scales, rows, groups * 32).unwrap();
    let stride = if cfg!(miri) { 3 } else { 1 };
    for k in kernels() {
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN].into_iter().step_by(stride) {
            for at in [0, 31, 32, 100, 159].into_iter().step_by(stride) {
                let mut x = vec![0.0; groups * 32];
                x[at] = bad;
                let y = product(k, w, 0..rows, &x, 1);
                assert!(
                    y.iter().all(|y| y.to_bits() == f32::NAN.to_bits()),
                    "{} {bad} at {at}: {y:?}",
                    k.isa()
                );
            }
        }
        assert_eq!(product(k, w, 0..rows, &vec![0.0; groups * 32], 1), vec![0.0; rows]);
    }
}

#[test]
fn extreme_sums_do_not_wrap() {
    // Every |q| at 2^22 and every weight at 6: the largest group sums there are, and with signs mixed.
    for (codes, signs) in [(0x77, [1.0, 1.0]), (0xff, [1.0, 1.0]), (0xf7, [1.0, -1.0]), (0xf7, [1.0, 1.0])] {
        let x: Vec<f32> = (0..64).map(|c| signs[c % 2] * 1.999_999_9).collect();
        check(&[codes; 32 * 3], &[127; 6], 3, &x, 1);
    }
}

#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter; `any_` runs the same code")]
fn rows_split_anywhere() {
    let (rows, groups, count) = (37, 6, 3);
    let (packed, scales) = (noise(rows * groups * 16, 12), scales(rows * groups, 13));
    let w = Mxfp4::new(&packed, &scales, rows, groups * 32).unwrap();
    let x = values(groups * 32 * count, 14);
    for k in kernels() {
        let whole = product(k, w, 0..rows, &x, count);
        for cut in [1, 5, 8, 9, 20, 36] {
            let (a, b) = (product(k, w, 0..cut, &x, count), product(k, w, cut..rows, &x, count));
            for t in 0..count {
                assert_eq!(a[t * cut..][..cut], whole[t * rows..][..cut]);
                assert_eq!(b[t * (rows - cut)..][..rows - cut], whole[t * rows + cut..][..rows - cut]);
            }
        }
    }
}

#[test]
fn quantised_bytes_are_the_same_everywhere() {
    for groups in [1, 2, 5, if cfg!(miri) { 9 } else { 112 }] {
        let x = values(groups * 32, 15);
        let mut reference = vec![1; q23_bytes(x.len())];
        Kernels::scalar().q23_quantize(&x, &mut reference);
        for k in kernels() {
            let mut bytes = vec![2; q23_bytes(x.len())];
            k.q23_quantize(&x, &mut bytes);
            assert_eq!(bytes, reference, "{}", k.isa());
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter; `any_` runs the same code")]
fn error_against_f64() {
    let (rows, cols) = (64, 3584);
    let (packed, scales) = (noise(rows * cols / 2, 16), scales(rows * cols / 32, 17));
    let mut x = values(cols, 18);
    for i in (0..cols).step_by(300) {
        x[i] *= 50.0;
    }
    let w = Mxfp4::new(&packed, &scales, rows, cols).unwrap();
    let y = product(Kernels::detect(), w, 0..rows, &x, 1);
    let exact: Vec<f64> = (0..rows).map(|r| matrix::mxfp4_f64(w.packed_row(r), w.scale_row(r), &x)).collect();
    let error: f64 = y.iter().zip(&exact).map(|(y, e)| (f64::from(*y) - e).powi(2)).sum();
    let size: f64 = exact.iter().map(|e| e * e).sum();
    assert!((error / size).sqrt() < 1e-6, "relative error {:e}", (error / size).sqrt());
}

/// Rows, groups and batches at random end before these; an interpreter is some thousand times slower.
const END: (usize, usize, usize) = if cfg!(miri) { (10, 6, 3) } else { (20, 20, 5) };

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(64)))]

    #[test]
    fn any_bits(rows in 1..END.0, groups in 1..END.1, count in 1..END.2, seed: u64, exponent in -150i32..128) {
        let packed = noise(rows * groups * 16, seed);
        let scale_bytes = noise(rows * groups, seed ^ 1);
        let size = 2f64.powi(exponent);
        let x: Vec<f32> =
            values(groups * 32 * count, seed ^ 2).iter().map(|x| (f64::from(*x) * size) as f32).collect();
        check(&packed, &scale_bytes, rows, &x, count);
    }
}
