//! Tests of the module above.

use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::F32Rows;
use crate::dispatch::Isa;
use crate::hn::{hn_encode, hn_encoded_max};
use crate::matrix_oracle as matrix;
use crate::testing::cases;

fn kernels() -> impl Iterator<Item = Kernels> {
    Isa::ALL.into_iter().filter_map(Kernels::new)
}

/// Weights near a normal distribution in spread, with a few of any bits.
fn weights(rows: usize, cols: usize, seed: u64, wild: bool) -> Vec<u8> {
    let mut state = seed;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    let mut bytes = Vec::with_capacity(rows * cols * 2);
    for _ in 0..rows * cols {
        let value = (0..4).map(|_| next() as f32 / 2f32.powi(30) - 1.0).sum::<f32>() * 0.02;
        let mut bits = (value.to_bits() >> 16) as u16;
        if wild && next() % 97 == 0 {
            bits = next() as u16;
        }
        bytes.extend_from_slice(&bits.to_le_bytes());
    }
    bytes
}

fn values(len: usize, seed: u32) -> Vec<f32> {
    (0..len as u32)
        .map(|i| ((i.wrapping_add(seed).wrapping_mul(2_654_435_761) >> 8) as f32 / 8e6 - 1.0).powi(3))
        .collect()
}

fn row_values(bytes: &[u8], row: usize, cols: usize) -> Vec<f32> {
    bytes[row * cols * 2..][..cols * 2].as_chunks().0.iter().map(|w| matrix::widen(*w)).collect()
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.to_bits() == f32::NAN.to_bits())
}

fn bits(y: &[f32]) -> Vec<u32> {
    y.iter().map(|y| y.to_bits()).collect()
}

/// Every form on every instruction set against the formula, for `rows` x `cols` and `count` columns.
fn check(bytes: &[u8], (rows, cols): (usize, usize), x: &[f32], count: usize) {
    let row_major = Bf16Rows::new(bytes, rows, cols).unwrap();
    let expected: Vec<f32> = (0..count * rows)
        .map(|i| matrix::c256(&row_values(bytes, i % rows, cols), &x[i / rows * cols..][..cols]))
        .collect();
    let floats: Vec<u8> =
        (0..rows).flat_map(|r| row_values(bytes, r, cols)).flat_map(f32::to_le_bytes).collect();
    for k in kernels() {
        let mut tiled = vec![1; tiled_bytes(rows, cols).unwrap()];
        k.tile_rows(row_major, &mut tiled);
        let mut code = vec![1; hn_encoded_max(rows, cols).unwrap()];
        let length = hn_encode(row_major, &mut code);
        let mut forms = vec![
            Matrix::Bf16Rows(row_major),
            Matrix::Bf16Tiled(Bf16Tiled::new(&tiled, rows, cols).unwrap()),
            Matrix::F32Rows(F32Rows::new(&floats, rows, cols).unwrap()),
        ];
        if let Some(length) = length {
            forms.push(Matrix::Hn(HnTiled::new(&code[..length], rows, cols).unwrap()));
        }
        for w in forms {
            let mut y = vec![9.0; count * rows];
            k.matmul(w, 0..rows, Columns::packed(x, cols, count), Out::new(&mut y, rows, rows, count));
            for (i, (y, expected)) in y.iter().zip(&expected).enumerate() {
                assert!(
                    same(*expected, *y),
                    "{} {w:?} x {count}, output {i}: {y:e}, expected {expected:e}",
                    k.isa()
                );
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter; `any_` runs the same code")]
fn every_length_around_lanes_tiles_and_chunks() {
    for cols in [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 255, 256, 257, 260, 511, 513] {
        for rows in [1, 2, 15, 16, 17, 33, 64, 65, 80] {
            check(&weights(rows, cols, 7, true), (rows, cols), &values(cols, 1), 1);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter; `any_` runs the code of fewer chunks")]
fn every_number_of_chunks_that_share_a_vector() {
    for cols in (3..=17).map(|chunks| chunks * CHUNK).chain([15 * CHUNK + 9]) {
        for rows in [1, 3, 4, 5, 8, 9, 31, 33] {
            check(&weights(rows, cols, 29, true), (rows, cols), &values(cols, 1), 1);
        }
    }
}

#[test]
fn every_batch_width() {
    let shapes: &[(usize, usize)] = if cfg!(miri) { &[(17, 9)] } else { &[(16, 40), (21, 300)] };
    for count in (0..=14).step_by(if cfg!(miri) { 7 } else { 1 }) {
        for &(rows, cols) in shapes {
            check(&weights(rows, cols, 3, true), (rows, cols), &values(cols * count, 5), count);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter; it runs the code of fewer columns")]
fn many_columns_share_what_is_read_for_several_tiles() {
    for count in [COLUMNS_NEAR, COLUMNS_NEAR + 1, 2 * COLUMNS_NEAR + 3] {
        for rows in [1, 17, 16 * TILES - 1, 16 * TILES, 16 * TILES + 1, 16 * TILES + 37] {
            check(&weights(rows, 270, 3, true), (rows, 270), &values(270 * count, 5), count);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter; `any_` runs the same code")]
fn special_inputs_and_weights() {
    let specials = [
        0.0,
        -0.0,
        1e-45,
        -1e-45,
        f32::MIN_POSITIVE,
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    for (i, special) in specials.into_iter().enumerate() {
        let (rows, cols) = (19, 270);
        let mut x = values(cols, 2);
        x[i * 29] = special;
        let bytes = weights(rows, cols, 11, true);
        check(&bytes, (rows, cols), &x, 1);
        let mut y = vec![0.0; rows];
        let w = Matrix::Bf16Rows(Bf16Rows::new(&bytes, rows, cols).unwrap());
        Kernels::detect().matmul(w, 0..rows, Columns::one(&x), Out::one(&mut y));
        assert!(special.is_finite() || y.iter().all(|y| !y.is_finite()), "{special} gave {y:?}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter; `any_` runs the same code")]
fn rows_split_anywhere() {
    let (rows, cols, count) = (83, 15 * CHUNK + 3, 5);
    let (bytes, x) = (weights(rows, cols, 5, true), values(cols * count, 9));
    let row_major = Bf16Rows::new(&bytes, rows, cols).unwrap();
    for k in kernels() {
        let mut tiled = vec![0; tiled_bytes(rows, cols).unwrap()];
        k.tile_rows(row_major, &mut tiled);
        let tiles = Matrix::Bf16Tiled(Bf16Tiled::new(&tiled, rows, cols).unwrap());
        for count in [1, count] {
            let x = Columns::packed(&x[..cols * count], cols, count);
            let mut whole = vec![0.0; rows * count];
            k.matmul(tiles, 0..rows, x, Out::new(&mut whole, rows, rows, count));
            for (w, cuts) in [(tiles, &[16, 48, 80][..]), (Matrix::Bf16Rows(row_major), &[1, 15, 17, 50, 82])]
            {
                for &cut in cuts {
                    let mut y = vec![0.0; rows * count];
                    let (a, b) = Out::new(&mut y, rows, rows, count).split_at(cut);
                    k.matmul(w, cut..rows, x, b);
                    k.matmul(w, 0..cut, x, a);
                    assert_eq!(bits(&y), bits(&whole), "{} cut at {cut}", k.isa());
                }
            }
        }
    }
}

#[test]
fn transposed_product() {
    let all: [&[usize]; 2] = if cfg!(miri) {
        [&[1, 17], &[3, 257]]
    } else {
        [&[1, 15, 16, 17, 63, 64, 65, 130], &[1, 3, 128, 256, 257, 600]]
    };
    for &cols in all[0] {
        for &rows in all[1] {
            let bytes = weights(rows + 2, cols, 13, true);
            let row_major = Bf16Rows::new(&bytes, rows + 2, cols).unwrap();
            let x = values(rows, 17);
            for k in kernels() {
                let mut y = vec![9.0; cols];
                k.matmul_t(Matrix::Bf16Rows(row_major), 1..rows + 1, &x, &mut y);
                let floats: Vec<u8> = (0..rows + 2)
                    .flat_map(|r| row_values(&bytes, r, cols))
                    .flat_map(f32::to_le_bytes)
                    .collect();
                let mut z = vec![9.0; cols];
                let w = Matrix::F32Rows(F32Rows::new(&floats, rows + 2, cols).unwrap());
                k.matmul_t(w, 1..rows + 1, &x, &mut z);
                for c in 0..cols {
                    let column: Vec<f32> = (1..=rows).map(|r| row_values(&bytes, r, cols)[c]).collect();
                    let expected = matrix::c256(&column, &x);
                    assert!(
                        same(expected, y[c]) && same(expected, z[c]),
                        "{} {rows} x {cols} column {c}",
                        k.isa()
                    );
                }
            }
        }
    }
}

#[test]
fn tiles_hold_every_weight() {
    for (rows, cols) in [(1, 1), (16, 8), (17, 9), (40, 33), (3, 300)] {
        let bytes = weights(rows, cols, 19, true);
        let src = Bf16Rows::new(&bytes, rows, cols).unwrap();
        for k in kernels() {
            let mut tiled = vec![7; tiled_bytes(rows, cols).unwrap()];
            k.tile_rows(src, &mut tiled);
            for (i, weight) in tiled.chunks_exact(2).enumerate() {
                let (row, col) = (i / 16 / cols * 16 + i % 16, i / 16 % cols);
                let expected = if row < rows { &bytes[(row * cols + col) * 2..][..2] } else { &[0, 0] };
                assert_eq!(weight, expected, "{} row {row} column {col}", k.isa());
            }
            let mut back = vec![7; bytes.len()];
            untile_rows(Bf16Tiled::new(&tiled, rows, cols).unwrap(), &mut back);
            assert_eq!(back, bytes);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter; `any_` runs the same code")]
fn error_against_f64() {
    let (rows, cols) = (64, 7168);
    let bytes = weights(rows, cols, 23, false);
    let mut x = values(cols, 3);
    for i in (0..cols).step_by(500) {
        x[i] *= 50.0;
    }
    let mut y = vec![0.0; rows];
    let w = Matrix::Bf16Rows(Bf16Rows::new(&bytes, rows, cols).unwrap());
    Kernels::detect().matmul(w, 0..rows, Columns::one(&x), Out::one(&mut y));
    let exact: Vec<f64> = (0..rows).map(|r| matrix::dot_f64(&row_values(&bytes, r, cols), &x)).collect();
    let error: f64 = y.iter().zip(&exact).map(|(y, e)| (f64::from(*y) - e).powi(2)).sum();
    let size: f64 = exact.iter().map(|e| e * e).sum();
    assert!((error / size).sqrt() < 5e-7, "relative error {:e}", (error / size).sqrt());
}

#[test]
#[should_panic(expected = "does not begin a tile")]
fn a_range_within_a_tile_is_refused() {
    let tiled = Bf16Tiled::new(&[0; 32], 9, 1).unwrap();
    Kernels::scalar().matmul(Matrix::Bf16Tiled(tiled), 8..9, Columns::one(&[1.0]), Out::one(&mut [0.0]));
}

/// Rows, columns and batches at random end before these; an interpreter is some thousand times slower.
const END: (usize, usize, usize) = if cfg!(miri) { (18, 280, 3) } else { (70, 600, 9) };

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(48)))]

    #[test]
    fn any_shape_any_bits(rows in 1..END.0, cols in 0..END.1, count in 1..END.2, seed: u64, any_bits: bool) {
        let mut bytes = weights(rows, cols, seed, true);
        if any_bits {
            for (i, byte) in bytes.iter_mut().enumerate() {
                *byte = (seed.wrapping_mul(i as u64 * 2 + 1) >> 29) as u8;
            }
        }
        check(&bytes, (rows, cols), &values(cols * count, seed as u32), count);
    }
}
