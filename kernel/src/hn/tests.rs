//! Tests of the module above.

use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::dispatch::Kernels;

/// Weights whose high bytes are few, but for every `rare`-th.
fn weights(rows: usize, cols: usize, rare: usize) -> Vec<u8> {
    (0..rows * cols)
        .flat_map(|i| {
            let mixed = i.wrapping_mul(2_654_435_761) >> 7;
            let high = if i % rare == rare - 1 { (mixed >> 3) as u8 } else { [0x3b, 0xbb, 0x3c][mixed % 3] };
            [mixed as u8, high]
        })
        .collect()
}

fn encode(bytes: &[u8], rows: usize, cols: usize) -> Option<Vec<u8>> {
    let mut code = vec![0xa5; hn_encoded_max(rows, cols).unwrap()];
    let length = hn_encode(Bf16Rows::new(bytes, rows, cols).unwrap(), &mut code)?;
    code.truncate(length);
    Some(code)
}

fn tiled(bytes: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let mut tiled = vec![0; tiled_bytes(rows, cols).unwrap()];
    Kernels::scalar().tile_rows(Bf16Rows::new(bytes, rows, cols).unwrap(), &mut tiled);
    tiled
}

#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter")]
fn what_is_encoded_comes_back() {
    for (rows, cols) in [(16, 64), (17, 64), (5, 256), (48, 33), (100, 130), (33, 1027)] {
        for rare in [1_000_000, 50, 7] {
            let bytes = weights(rows, cols, rare);
            let Some(code) = encode(&bytes, rows, cols) else {
                assert!(rare == 7 || rows % 16 != 0 || cols < 64, "{rows} x {cols} did not get smaller");
                continue;
            };
            let view = HnTiled::new(&code, rows, cols).unwrap();
            let mut decoded = vec![3; tiled_bytes(rows, cols).unwrap()];
            hn_decode(&view, &mut decoded);
            assert_eq!(decoded, tiled(&bytes, rows, cols), "{rows} x {cols}, every {rare}-th rare");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter")]
fn trained_spread_takes_three_quarters() {
    let (rows, cols) = (64, 2048);
    let bytes: Vec<u8> = (0..rows * cols)
        .flat_map(|i: usize| {
            let sum: f32 = (1..5)
                .map(|k| (i.wrapping_mul(k * 2_654_435_761) >> 8 & 0xffff) as f32 / 32768.0 - 1.0)
                .sum();
            ((sum * 0.02).to_bits() >> 16).to_le_bytes()[..2].to_vec()
        })
        .collect();
    let code = encode(&bytes, rows, cols).unwrap();
    assert!((code.len() as f64) < 0.755 * bytes.len() as f64, "{} of {}", code.len(), bytes.len());
}

#[test]
fn what_does_not_get_smaller_is_left() {
    let noise: Vec<u8> = (0..64 * 64 * 2).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    assert_eq!(encode(&noise, 64, 64), None);
    let bytes = weights(16, 64, 1000);
    let length = encode(&bytes, 16, 64).unwrap().len();
    let src = Bf16Rows::new(&bytes, 16, 64).unwrap();
    assert_eq!(hn_encode(src, &mut vec![0; length - 1]), None);
    assert_eq!(hn_encode(src, &mut vec![0; length]), Some(length));
}

#[test]
fn damaged_codes_are_refused() {
    let (rows, cols) = (40, 64);
    let bytes = weights(rows, cols, 50);
    let code = encode(&bytes, rows, cols).unwrap();
    let refused = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut damaged = code.clone();
        edit(&mut damaged);
        HnTiled::new(&damaged, rows, cols).unwrap_err()
    };
    assert!(matches!(refused(&|c| c.truncate(63)), ShapeError::Length { .. }));
    assert!(matches!(refused(&|c| c.push(0)), ShapeError::Length { .. }));
    assert!(matches!(refused(&|c| c.truncate(c.len() - 1)), ShapeError::Length { .. }));
    assert_eq!(refused(&|c| c[4] = 2), ShapeError::HnHeader { offset: 4 });
    assert_eq!(refused(&|c| c[63] = 1), ShapeError::HnHeader { offset: 63 });
    assert!(matches!(refused(&|c| c[8] = 41), ShapeError::HnShape { found: (41, 64), .. }));
    assert!(matches!(refused(&|c| c[16..20].fill(255)), ShapeError::Length { .. }));
    let lists = HEADER + 3 * 16 * QUAD_BYTES;
    let first = lists + 4 * 4;
    assert_eq!(refused(&|c| c[lists] = 1), ShapeError::HnEscape { tile: 0 });
    assert_eq!(refused(&|c| c[lists + 7] = 1), ShapeError::HnEscape { tile: 1 });
    assert_eq!(refused(&|c| c[lists + 12] -= 1), ShapeError::HnEscape { tile: 3 });
    assert_eq!(refused(&|c| c[first + 3] = 255), ShapeError::HnEscape { tile: 0 });
    assert_eq!(refused(&|c| c.copy_within(first..first + 4, first + 4)), ShapeError::HnEscape { tile: 0 });
    // A row that is only padding: the third tile has 8.
    assert_eq!(
        refused(&|c| {
            let at = c.len() - 3;
            c[at] |= 15
        }),
        ShapeError::HnEscape { tile: 2 }
    );
}

proptest! {
    #[test]
    fn hostile_bytes_never_panic(mut edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6)) {
        let (rows, cols) = (40, 64);
        let mut code = encode(&weights(rows, cols, 50), rows, cols).unwrap();
        for (at, byte) in edits.drain(..) {
            let at = at.index(code.len());
            code[at] = byte;
        }
        if let Ok(view) = HnTiled::new(&code, rows, cols) {
            hn_decode(&view, &mut vec![0; tiled_bytes(rows, cols).unwrap()]);
            let mut y = vec![0.0; rows];
            for k in crate::dispatch::Isa::ALL.into_iter().filter_map(Kernels::new) {
                let x = crate::out::Columns::one(&[1.0; 64]);
                k.matmul(crate::weights::Matrix::Hn(view), 0..rows, x, crate::out::Out::one(&mut y));
            }
        }
    }
}
