//! MXFP4 operations with NEON: weights are 2 * E2M1 as they are, the digits are signed too. Only the base
//! instruction set is used, not the dot product extension.
#![allow(unsafe_code)]

use core::arch::aarch64::*;
use core::array;

use crate::isa::neon::Neon;
use crate::lanes::LANES;
use crate::mxfp4::{CodeLanes, DIGITS, PAIR_CODES, PAIR_DIGITS, PairRows};

/// 2 * E2M1 of each code.
const TWICE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl Neon {
    /// The weights of two groups, [group][column parity].
    #[inline(always)]
    fn twice(self, row: &[u8; PAIR_CODES]) -> [[int8x16_t; 2]; 2] {
        let (groups, _) = row.as_chunks::<16>();
        // SAFETY: `self` proves NEON; 16 bytes of the group and of the table are readable.
        array::from_fn(|g| unsafe {
            let (table, codes) = (vld1q_s8(TWICE.as_ptr()), vld1q_u8(groups[g].as_ptr()));
            [vqtbl1q_s8(table, vandq_u8(codes, vdupq_n_u8(15))), vqtbl1q_s8(table, vshrq_n_u8::<4>(codes))]
        })
    }

    /// Four parts of the sum over one group of one row. `digits`: [digit][column parity].
    #[inline(always)]
    fn group_dot(self, codes: [int8x16_t; 2], digits: &[[int8x16_t; 2]; DIGITS]) -> int32x4_t {
        // SAFETY: `self` proves NEON. Four products of at most 12 * 128 meet in an i16.
        unsafe {
            let sum = |d: [int8x16_t; 2]| {
                let sum = vmull_s8(vget_low_s8(codes[0]), vget_low_s8(d[0]));
                let sum = vmlal_high_s8(sum, codes[0], d[0]);
                let sum = vmlal_s8(sum, vget_low_s8(codes[1]), vget_low_s8(d[1]));
                vmlal_high_s8(sum, codes[1], d[1])
            };
            let high = vshlq_n_s32::<8>(vpaddlq_s16(sum(digits[2])));
            let high = vshlq_n_s32::<8>(vpadalq_s16(high, sum(digits[1])));
            vpadalq_s16(high, sum(digits[0]))
        }
    }
}

impl CodeLanes for Neon {
    /// `[row][group][column parity]`
    type Codes = [[[int8x16_t; 2]; 2]; LANES];

    #[inline(always)]
    fn codes(self, rows: PairRows<'_>) -> Self::Codes {
        rows.map(|row| self.twice(row))
    }

    #[inline(always)]
    fn dots(self, codes: &Self::Codes, digits: &[u8; PAIR_DIGITS], _: [i32; 2]) -> [Self::I; 2] {
        let (halves, _) = digits.as_chunks::<16>();
        array::from_fn(|g| {
            // SAFETY: `self` proves NEON; 16 bytes are readable.
            let load = |i: usize| unsafe { vreinterpretq_s8_u8(vld1q_u8(halves[i].as_ptr())) };
            let digits = array::from_fn(|digit| [load(digit * 4 + g), load(digit * 4 + 2 + g)]);
            let row = |r: usize| self.group_dot(codes[r][g], &digits);
            // SAFETY: `self` proves NEON.
            let four = |r: usize| unsafe {
                vpaddq_s32(vpaddq_s32(row(r), row(r + 1)), vpaddq_s32(row(r + 2), row(r + 3)))
            };
            (four(0), four(4))
        })
    }

    #[inline(always)]
    fn dots_of(self, rows: PairRows<'_>, digits: &[u8; PAIR_DIGITS], surplus: [i32; 2]) -> [Self::I; 2] {
        self.dots(&self.codes(rows), digits, surplus)
    }

    #[inline(always)]
    fn int_to_f32(self, v: Self::I) -> Self::F {
        // SAFETY: `self` proves NEON.
        unsafe { (vcvtq_f32_s32(v.0), vcvtq_f32_s32(v.1)) }
    }

    #[inline(always)]
    fn transpose_bytes(self, from: [&[u8; 8]; LANES]) -> [[u8; LANES]; 8] {
        let mut to = [[0; LANES]; 8];
        // SAFETY: `self` proves NEON; each load reads 8 bytes, each store writes 16 of the 64.
        unsafe {
            let row = |r: usize| vcombine_u8(vld1_u8(from[r].as_ptr()), vdup_n_u8(0));
            // Rows r and r + 4 alternate, then all even and all odd rows, then all.
            let (r04, r15) = (vzip1q_u8(row(0), row(4)), vzip1q_u8(row(1), row(5)));
            let (r26, r37) = (vzip1q_u8(row(2), row(6)), vzip1q_u8(row(3), row(7)));
            let even = [vzip1q_u8(r04, r26), vzip2q_u8(r04, r26)];
            let odd = [vzip1q_u8(r15, r37), vzip2q_u8(r15, r37)];
            let to = to.as_flattened_mut().as_chunks_mut::<16>().0;
            for i in 0..2 {
                vst1q_u8(to[2 * i].as_mut_ptr(), vzip1q_u8(even[i], odd[i]));
                vst1q_u8(to[2 * i + 1].as_mut_ptr(), vzip2q_u8(even[i], odd[i]));
            }
        }
        to
    }

    #[inline(always)]
    fn e8m0(self, bytes: &[u8; LANES]) -> Self::F {
        // SAFETY: `self` proves NEON; the load reads 8 bytes.
        unsafe {
            let words = vmovl_u8(vld1_u8(bytes.as_ptr()));
            let scale = |s: uint32x4_t| {
                let bits = vmaxq_u32(vshlq_n_u32::<23>(s), vdupq_n_u32(1 << 22));
                // Infinity, which 255 would be, gets all bits set.
                let infinity = vdupq_n_u32(f32::INFINITY.to_bits());
                vreinterpretq_f32_u32(vorrq_u32(bits, vceqq_u32(bits, infinity)))
            };
            (scale(vmovl_u16(vget_low_u16(words))), scale(vmovl_u16(vget_high_u16(words))))
        }
    }

    #[inline(always)]
    fn low_bytes(self, v: [Self::I; 4]) -> [[u8; 16]; 2] {
        let mut bytes = [[0; 16]; 2];
        // SAFETY: `self` proves NEON; the stores write 16 bytes each.
        unsafe {
            let eight = |v: Self::I| vmovn_s16(vcombine_s16(vmovn_s32(v.0), vmovn_s32(v.1)));
            let low = vreinterpretq_u8_s8(vcombine_s8(eight(v[0]), eight(v[1])));
            let high = vreinterpretq_u8_s8(vcombine_s8(eight(v[2]), eight(v[3])));
            vst1q_u8(bytes[0].as_mut_ptr(), vuzp1q_u8(low, high));
            vst1q_u8(bytes[1].as_mut_ptr(), vuzp2q_u8(low, high));
        }
        bytes
    }
}
