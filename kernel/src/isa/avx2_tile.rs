//! Tile operations with AVX2: the first vector holds the even rows, the second the odd ones, so that a
//! shift and a mask widen 16 bf16 weights.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use crate::hn::{QUAD_BYTES, QUAD_COLS};
use crate::isa::avx2::Avx2;
use crate::lanes::{LANES, Lanes};
use crate::tile::{COLUMN_BYTES, TileLanes};
use crate::weights::TILE_ROWS;

impl Avx2 {
    #[inline(always)]
    fn load_256(self, bytes: &[u8; 32]) -> __m256i {
        // SAFETY: `self` proves AVX2; 32 bytes are readable; the load may be unaligned.
        unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store_256(self, v: __m256i, bytes: &mut [u8; 32]) {
        // SAFETY: `self` proves AVX2; 32 bytes are writable; the store may be unaligned.
        unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), v) }
    }

    /// 16 bf16 weights to f32: the even ones, the odd ones.
    #[inline(always)]
    fn widen(self, raw: __m256i) -> [__m256; 2] {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let odd = _mm256_and_si256(raw, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(raw)), _mm256_castsi256_ps(odd)]
        }
    }

    /// Decodes 4 columns of 16 bf16 weights, rows ascending.
    #[inline(always)]
    fn hn_raw(self, quad: &[u8; QUAD_BYTES], table: __m256i) -> [__m256i; QUAD_COLS] {
        let (parts, _) = quad.as_chunks::<32>();
        let (low0, low1, nibbles) =
            (self.load_256(&parts[0]), self.load_256(&parts[1]), self.load_256(&parts[2]));
        // SAFETY: `self` proves AVX2.
        unsafe {
            let mask = _mm256_set1_epi8(15);
            let high0 = _mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, mask));
            let high1 = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16::<4>(nibbles), mask));
            [
                _mm256_unpacklo_epi8(low0, high0),
                _mm256_unpackhi_epi8(low0, high0),
                _mm256_unpacklo_epi8(low1, high1),
                _mm256_unpackhi_epi8(low1, high1),
            ]
        }
    }
}

impl TileLanes for Avx2 {
    type Table = __m256i;

    #[inline(always)]
    fn bf16_column(self, column: &[u8; COLUMN_BYTES]) -> [Self::F; 2] {
        self.widen(self.load_256(column))
    }

    #[inline(always)]
    fn bf16_rows(self, rows: [&[u8; 16]; LANES]) -> [Self::F; 8] {
        // SAFETY: `self` proves AVX2; each load reads the 16 bytes of a row and may be unaligned.
        let pairs = unsafe {
            let mut r = [_mm256_setzero_si256(); 4];
            for (i, r) in r.iter_mut().enumerate() {
                let low = _mm_loadu_si128(rows[i].as_ptr().cast());
                let high = _mm_loadu_si128(rows[i + 4].as_ptr().cast());
                *r = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
            }
            // Columns 2 c and 2 c + 1 stay together: a shift and a mask part them.
            let (a01, a23) = (_mm256_unpacklo_epi32(r[0], r[1]), _mm256_unpacklo_epi32(r[2], r[3]));
            let (b01, b23) = (_mm256_unpackhi_epi32(r[0], r[1]), _mm256_unpackhi_epi32(r[2], r[3]));
            [
                _mm256_unpacklo_epi64(a01, a23),
                _mm256_unpackhi_epi64(a01, a23),
                _mm256_unpacklo_epi64(b01, b23),
                _mm256_unpackhi_epi64(b01, b23),
            ]
        };
        let [p0, p1, p2, p3] =
            [self.widen(pairs[0]), self.widen(pairs[1]), self.widen(pairs[2]), self.widen(pairs[3])];
        [p0[0], p0[1], p1[0], p1[1], p2[0], p2[1], p3[0], p3[1]]
    }

    #[inline(always)]
    fn f32_column(self, column: &[u8; TILE_ROWS * 4]) -> [Self::F; 2] {
        let (halves, _) = column.as_chunks::<32>();
        let (low, high) = (self.load_256(&halves[0]), self.load_256(&halves[1]));
        // SAFETY: `self` proves AVX2.
        unsafe {
            let (low, high) = (_mm256_castsi256_ps(low), _mm256_castsi256_ps(high));
            let even = _mm256_castps_pd(_mm256_shuffle_ps::<0x88>(low, high));
            let odd = _mm256_castps_pd(_mm256_shuffle_ps::<0xdd>(low, high));
            [
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(even)),
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0xd8>(odd)),
            ]
        }
    }

    #[inline(always)]
    fn rows(self, [even, odd]: [Self::F; 2]) -> [f32; TILE_ROWS] {
        let mut rows = [0.0; TILE_ROWS];
        // SAFETY: `self` proves AVX2.
        let (first, last) = unsafe {
            let (low, high) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
            (_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high))
        };
        self.store(first, &mut rows);
        self.store(last, &mut rows[8..]);
        rows
    }

    #[inline(always)]
    fn hn_table(self, high: &[u8; 16]) -> Self::Table {
        // SAFETY: `self` proves AVX2; 16 bytes are readable; the load may be unaligned.
        unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(high.as_ptr().cast())) }
    }

    #[inline(always)]
    fn hn_columns(self, quad: &[u8; QUAD_BYTES], table: Self::Table) -> [[Self::F; 2]; QUAD_COLS] {
        let raw = self.hn_raw(quad, table);
        [self.widen(raw[0]), self.widen(raw[1]), self.widen(raw[2]), self.widen(raw[3])]
    }

    #[inline(always)]
    fn hn_decode(
        self,
        quad: &[u8; QUAD_BYTES],
        table: Self::Table,
        to: &mut [[u8; COLUMN_BYTES]; QUAD_COLS],
    ) {
        for (raw, to) in self.hn_raw(quad, table).into_iter().zip(to) {
            self.store_256(raw, to);
        }
    }

    #[inline(always)]
    fn transpose(self, from: &[&[u8; 16]; TILE_ROWS], to: &mut [[u8; COLUMN_BYTES]; 8]) {
        // SAFETY: `self` proves AVX2; each load reads the 16 bytes of a row and may be unaligned.
        let columns = unsafe {
            let mut r = [_mm256_setzero_si256(); 8];
            for (i, r) in r.iter_mut().enumerate() {
                let low = _mm_loadu_si128(from[i].as_ptr().cast());
                let high = _mm_loadu_si128(from[i + 8].as_ptr().cast());
                *r = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
            }
            // Names: columns of the first row of each lane; pairs, then fours, then eights of rows.
            let (p0, p4) = (_mm256_unpacklo_epi16(r[0], r[1]), _mm256_unpackhi_epi16(r[0], r[1]));
            let (q0, q4) = (_mm256_unpacklo_epi16(r[2], r[3]), _mm256_unpackhi_epi16(r[2], r[3]));
            let (s0, s4) = (_mm256_unpacklo_epi16(r[4], r[5]), _mm256_unpackhi_epi16(r[4], r[5]));
            let (t0, t4) = (_mm256_unpacklo_epi16(r[6], r[7]), _mm256_unpackhi_epi16(r[6], r[7]));
            let (a0, a2) = (_mm256_unpacklo_epi32(p0, q0), _mm256_unpackhi_epi32(p0, q0));
            let (b0, b2) = (_mm256_unpacklo_epi32(s0, t0), _mm256_unpackhi_epi32(s0, t0));
            let (a4, a6) = (_mm256_unpacklo_epi32(p4, q4), _mm256_unpackhi_epi32(p4, q4));
            let (b4, b6) = (_mm256_unpacklo_epi32(s4, t4), _mm256_unpackhi_epi32(s4, t4));
            [
                _mm256_unpacklo_epi64(a0, b0),
                _mm256_unpackhi_epi64(a0, b0),
                _mm256_unpacklo_epi64(a2, b2),
                _mm256_unpackhi_epi64(a2, b2),
                _mm256_unpacklo_epi64(a4, b4),
                _mm256_unpackhi_epi64(a4, b4),
                _mm256_unpacklo_epi64(a6, b6),
                _mm256_unpackhi_epi64(a6, b6),
            ]
        };
        for (column, to) in columns.into_iter().zip(to) {
            self.store_256(column, to);
        }
    }

    #[inline(always)]
    fn prefetch(self, bytes: &[u8], at: usize) {
        // SAFETY: a prefetch reads nothing and faults nowhere, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(at).cast()) }
    }

    #[inline(always)]
    fn prefetch_far(self, bytes: &[u8], at: usize) {
        // SAFETY: a prefetch reads nothing and faults nowhere, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(bytes.as_ptr().wrapping_add(at).cast()) }
    }
}
