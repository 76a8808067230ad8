//! Tile operations with NEON: rows in their order.
#![allow(unsafe_code)]

use core::arch::aarch64::*;

use crate::hn::{QUAD_BYTES, QUAD_COLS};
use crate::isa::neon::Neon;
use crate::lanes::{LANES, Lanes};
use crate::tile::{COLUMN_BYTES, TileLanes};
use crate::weights::TILE_ROWS;

impl Neon {
    #[inline(always)]
    fn load_128(self, bytes: &[u8; 16]) -> uint8x16_t {
        // SAFETY: `self` proves NEON; 16 bytes are readable.
        unsafe { vld1q_u8(bytes.as_ptr()) }
    }

    #[inline(always)]
    fn store_128(self, v: uint8x16_t, bytes: &mut [u8; 16]) {
        // SAFETY: `self` proves NEON; 16 bytes are writable.
        unsafe { vst1q_u8(bytes.as_mut_ptr(), v) }
    }

    #[inline(always)]
    fn widen(self, raw: uint8x16_t) -> (float32x4_t, float32x4_t) {
        // SAFETY: `self` proves NEON.
        unsafe {
            let raw = vreinterpretq_u16_u8(raw);
            (
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(raw))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_high_u16(raw))),
            )
        }
    }

    /// 8 columns of 8 rows of 16-bit weights: in vector c row r stands at place r.
    #[inline(always)]
    fn columns(self, rows: [&[u8; 16]; LANES]) -> [uint8x16_t; 8] {
        // SAFETY: `self` proves NEON.
        unsafe {
            let r: [uint16x8_t; 8] = core::array::from_fn(|i| vreinterpretq_u16_u8(self.load_128(rows[i])));
            // Names: the first column; pairs, then fours, then eights of rows.
            let pair = |i: usize| (vzip1q_u16(r[i], r[i + 1]), vzip2q_u16(r[i], r[i + 1]));
            let four = |a: uint16x8_t, b: uint16x8_t| {
                let (a, b) = (vreinterpretq_u32_u16(a), vreinterpretq_u32_u16(b));
                (vreinterpretq_u64_u32(vzip1q_u32(a, b)), vreinterpretq_u64_u32(vzip2q_u32(a, b)))
            };
            let ((p0, p4), (q0, q4), (s0, s4), (t0, t4)) = (pair(0), pair(2), pair(4), pair(6));
            let ((a0, a2), (b0, b2)) = (four(p0, q0), four(s0, t0));
            let ((a4, a6), (b4, b6)) = (four(p4, q4), four(s4, t4));
            let eight =
                |a, b| [vreinterpretq_u8_u64(vzip1q_u64(a, b)), vreinterpretq_u8_u64(vzip2q_u64(a, b))];
            let [[c0, c1], [c2, c3], [c4, c5], [c6, c7]] =
                [eight(a0, b0), eight(a2, b2), eight(a4, b4), eight(a6, b6)];
            [c0, c1, c2, c3, c4, c5, c6, c7]
        }
    }

    /// Decodes 4 columns of bf16 weights: rows 0..8, rows 8..16 of each.
    #[inline(always)]
    fn hn_raw(self, quad: &[u8; QUAD_BYTES], table: uint8x16_t) -> [[uint8x16_t; 2]; QUAD_COLS] {
        let (parts, _) = quad.as_chunks::<16>();
        // SAFETY: `self` proves NEON.
        let mut columns = [[unsafe { vdupq_n_u8(0) }; 2]; QUAD_COLS];
        for half in 0..2 {
            let nibbles = self.load_128(&parts[4 + half]);
            let (low0, low1) = (self.load_128(&parts[half]), self.load_128(&parts[2 + half]));
            // SAFETY: `self` proves NEON.
            unsafe {
                let high0 = vqtbl1q_u8(table, vandq_u8(nibbles, vdupq_n_u8(15)));
                let high1 = vqtbl1q_u8(table, vshrq_n_u8::<4>(nibbles));
                columns[0][half] = vzip1q_u8(low0, high0);
                columns[1][half] = vzip2q_u8(low0, high0);
                columns[2][half] = vzip1q_u8(low1, high1);
                columns[3][half] = vzip2q_u8(low1, high1);
            }
        }
        columns
    }
}

impl TileLanes for Neon {
    type Table = uint8x16_t;

    #[inline(always)]
    fn bf16_column(self, column: &[u8; COLUMN_BYTES]) -> [Self::F; 2] {
        let (halves, _) = column.as_chunks::<16>();
        [self.widen(self.load_128(&halves[0])), self.widen(self.load_128(&halves[1]))]
    }

    #[inline(always)]
    fn bf16_rows(self, rows: [&[u8; 16]; LANES]) -> [Self::F; 8] {
        let columns = self.columns(rows);
        core::array::from_fn(|c| self.widen(columns[c]))
    }

    #[inline(always)]
    fn f32_column(self, column: &[u8; TILE_ROWS * 4]) -> [Self::F; 2] {
        let (quarters, _) = column.as_chunks::<16>();
        // SAFETY: `self` proves NEON.
        let f = |i: usize| unsafe { vreinterpretq_f32_u8(self.load_128(&quarters[i])) };
        [(f(0), f(1)), (f(2), f(3))]
    }

    #[inline(always)]
    fn rows(self, v: [Self::F; 2]) -> [f32; TILE_ROWS] {
        let mut rows = [0.0; TILE_ROWS];
        self.store(v[0], &mut rows);
        self.store(v[1], &mut rows[LANES..]);
        rows
    }

    #[inline(always)]
    fn hn_table(self, high: &[u8; 16]) -> Self::Table {
        self.load_128(high)
    }

    #[inline(always)]
    fn hn_columns(self, quad: &[u8; QUAD_BYTES], table: Self::Table) -> [[Self::F; 2]; QUAD_COLS] {
        let raw = self.hn_raw(quad, table);
        core::array::from_fn(|k| [self.widen(raw[k][0]), self.widen(raw[k][1])])
    }

    #[inline(always)]
    fn hn_decode(
        self,
        quad: &[u8; QUAD_BYTES],
        table: Self::Table,
        to: &mut [[u8; COLUMN_BYTES]; QUAD_COLS],
    ) {
        for (raw, to) in self.hn_raw(quad, table).into_iter().zip(to) {
            let (halves, _) = to.as_chunks_mut::<16>();
            self.store_128(raw[0], &mut halves[0]);
            self.store_128(raw[1], &mut halves[1]);
        }
    }

    #[inline(always)]
    fn transpose(self, from: &[&[u8; 16]; TILE_ROWS], to: &mut [[u8; COLUMN_BYTES]; 8]) {
        for (half, rows) in from.as_chunks::<8>().0.iter().enumerate() {
            for (column, to) in self.columns(*rows).into_iter().zip(to.iter_mut()) {
                self.store_128(column, &mut to.as_chunks_mut::<16>().0[half]);
            }
        }
    }

    #[inline(always)]
    fn prefetch(self, bytes: &[u8], at: usize) {
        // SAFETY: a prefetch reads nothing and faults nowhere, whatever the address.
        unsafe {
            core::arch::asm!(
                "prfm pldl1keep, [{at}]",
                at = in(reg) bytes.as_ptr().wrapping_add(at),
                options(nostack, preserves_flags, readonly)
            );
        }
    }

    #[inline(always)]
    fn prefetch_far(self, bytes: &[u8], at: usize) {
        // SAFETY: a prefetch reads nothing and faults nowhere, whatever the address.
        unsafe {
            core::arch::asm!(
                "prfm pldl2keep, [{at}]",
                at = in(reg) bytes.as_ptr().wrapping_add(at),
                options(nostack, preserves_flags, readonly)
            );
        }
    }
}
