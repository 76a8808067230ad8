//! MXFP4 operations, portable.

use core::array;

use crate::isa::scalar::Scalar;
use crate::lanes::LANES;
use crate::mxfp4::{CodeLanes, PAIR_DIGITS, PairRows};
use crate::weights::GROUP_COLS;

/// 2 * E2M1 of each code.
const TWICE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl CodeLanes for Scalar {
    /// `[row][column parity][group, 16 columns]`
    type Codes = [[[i8; GROUP_COLS]; 2]; LANES];

    #[inline(always)]
    fn codes(self, rows: PairRows<'_>) -> Self::Codes {
        rows.map(|row| {
            [row.map(|two| TWICE[usize::from(two & 15)]), row.map(|two| TWICE[usize::from(two >> 4)])]
        })
    }

    #[inline(always)]
    fn dots(self, codes: &Self::Codes, digits: &[u8; PAIR_DIGITS], _: [i32; 2]) -> [Self::I; 2] {
        let (halves, _) = digits.as_chunks::<16>();
        array::from_fn(|group| {
            array::from_fn(|row| {
                let mut dot = 0;
                for (digit, weight) in [1, 1 << 8, 1 << 16].into_iter().enumerate() {
                    for (parity, codes) in codes[row].iter().enumerate() {
                        let digits = &halves[digit * 4 + parity * 2 + group];
                        let codes = &codes.as_chunks::<16>().0[group];
                        let products = codes
                            .iter()
                            .zip(digits)
                            .map(|(&w, &d)| i32::from(w) * i32::from(d.cast_signed()));
                        dot += products.sum::<i32>() * weight;
                    }
                }
                dot
            })
        })
    }

    #[inline(always)]
    fn dots_of(self, rows: PairRows<'_>, digits: &[u8; PAIR_DIGITS], surplus: [i32; 2]) -> [Self::I; 2] {
        self.dots(&self.codes(rows), digits, surplus)
    }

    #[inline(always)]
    fn int_to_f32(self, v: Self::I) -> Self::F {
        v.map(|i| i as f32)
    }

    #[inline(always)]
    fn transpose_bytes(self, from: [&[u8; 8]; LANES]) -> [[u8; LANES]; 8] {
        array::from_fn(|g| array::from_fn(|r| from[r][g]))
    }

    #[inline(always)]
    fn e8m0(self, bytes: &[u8; LANES]) -> Self::F {
        bytes.map(|s| match s {
            0 => f32::from_bits(1 << 22),
            255 => f32::NAN,
            s => f32::from_bits(u32::from(s) << 23),
        })
    }

    #[inline(always)]
    fn low_bytes(self, v: [Self::I; 4]) -> [[u8; 16]; 2] {
        let v = v.as_flattened();
        array::from_fn(|parity| array::from_fn(|i| v[2 * i + parity] as u8))
    }
}
