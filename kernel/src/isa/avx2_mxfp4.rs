//! MXFP4 operations with AVX2.
//!
//! Weights are 2 * E2M1 + 12 (0..=24), the unsigned operand of the byte multiply-add; the surplus
//! 12 * sum q is the same for all rows and is taken off at the end. Sums wrap; the difference does not,
//! since |sum (2 * E2M1) q| < 2^31.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use crate::isa::avx2::Avx2;
use crate::lanes::LANES;
use crate::mxfp4::{CodeLanes, DIGITS, PAIR_CODES, PAIR_DIGITS, PairRows};

/// 2 * E2M1 + 12 of each code.
const RAISED: [i8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

impl Avx2 {
    /// The weights of two groups of a row: even columns, odd columns.
    #[inline(always)]
    fn raised(self, row: &[u8; PAIR_CODES]) -> [__m256i; 2] {
        // SAFETY: `self` proves AVX2; 32 bytes of `row` and 16 of the table are readable, unaligned.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(RAISED.as_ptr().cast()));
            let mask = _mm256_set1_epi8(15);
            let codes = _mm256_loadu_si256(row.as_ptr().cast());
            let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), mask);
            [_mm256_shuffle_epi8(table, _mm256_and_si256(codes, mask)), _mm256_shuffle_epi8(table, odd)]
        }
    }

    /// In each 128-bit lane (a group): two parts of the sum of row a, two of that of row b.
    #[inline(always)]
    fn row_pair(self, a: [__m256i; 2], b: [__m256i; 2], digits: &[u8; PAIR_DIGITS]) -> __m256i {
        let (digits, _) = digits.as_chunks::<32>();
        // SAFETY: `self` proves AVX2; each load reads 32 bytes, unaligned. Four products of at most
        // 24 * 128 meet in an i16, and then eight.
        unsafe {
            let mut parts = [_mm256_setzero_si256(); DIGITS];
            for (digit, part) in parts.iter_mut().enumerate() {
                let even = _mm256_loadu_si256(digits[2 * digit].as_ptr().cast());
                let odd = _mm256_loadu_si256(digits[2 * digit + 1].as_ptr().cast());
                let a = _mm256_add_epi16(_mm256_maddubs_epi16(a[0], even), _mm256_maddubs_epi16(a[1], odd));
                let b = _mm256_add_epi16(_mm256_maddubs_epi16(b[0], even), _mm256_maddubs_epi16(b[1], odd));
                *part = _mm256_add_epi16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
            }
            let one = _mm256_set1_epi16(1);
            let high = _mm256_madd_epi16(parts[2], _mm256_set1_epi16(256));
            let high = _mm256_add_epi32(high, _mm256_madd_epi16(parts[1], one));
            _mm256_add_epi32(_mm256_slli_epi32::<8>(high), _mm256_madd_epi16(parts[0], one))
        }
    }

    /// The sums of 8 rows, less the surplus, from what [`Self::row_pair`] leaves of them.
    #[inline(always)]
    fn gather(self, pairs: [__m256i; 4], surplus: [i32; 2]) -> [__m256i; 2] {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let low = _mm256_hadd_epi32(pairs[0], pairs[1]);
            let high = _mm256_hadd_epi32(pairs[2], pairs[3]);
            [
                _mm256_sub_epi32(_mm256_permute2x128_si256::<0x20>(low, high), _mm256_set1_epi32(surplus[0])),
                _mm256_sub_epi32(_mm256_permute2x128_si256::<0x31>(low, high), _mm256_set1_epi32(surplus[1])),
            ]
        }
    }
}

impl CodeLanes for Avx2 {
    type Codes = [[__m256i; 2]; LANES];

    #[inline(always)]
    fn codes(self, rows: PairRows<'_>) -> Self::Codes {
        [
            self.raised(rows[0]),
            self.raised(rows[1]),
            self.raised(rows[2]),
            self.raised(rows[3]),
            self.raised(rows[4]),
            self.raised(rows[5]),
            self.raised(rows[6]),
            self.raised(rows[7]),
        ]
    }

    #[inline(always)]
    fn dots(self, c: &Self::Codes, digits: &[u8; PAIR_DIGITS], surplus: [i32; 2]) -> [Self::I; 2] {
        let pairs = [
            self.row_pair(c[0], c[1], digits),
            self.row_pair(c[2], c[3], digits),
            self.row_pair(c[4], c[5], digits),
            self.row_pair(c[6], c[7], digits),
        ];
        self.gather(pairs, surplus)
    }

    #[inline(always)]
    fn dots_of(self, rows: PairRows<'_>, digits: &[u8; PAIR_DIGITS], surplus: [i32; 2]) -> [Self::I; 2] {
        let pairs = [
            self.row_pair(self.raised(rows[0]), self.raised(rows[1]), digits),
            self.row_pair(self.raised(rows[2]), self.raised(rows[3]), digits),
            self.row_pair(self.raised(rows[4]), self.raised(rows[5]), digits),
            self.row_pair(self.raised(rows[6]), self.raised(rows[7]), digits),
        ];
        self.gather(pairs, surplus)
    }

    #[inline(always)]
    fn int_to_f32(self, v: Self::I) -> Self::F {
        // SAFETY: `self` proves AVX2.
        unsafe { _mm256_cvtepi32_ps(v) }
    }

    #[inline(always)]
    fn transpose_bytes(self, from: [&[u8; 8]; LANES]) -> [[u8; LANES]; 8] {
        let mut to = [[0; LANES]; 8];
        // SAFETY: `self` proves AVX2; each load reads 8 bytes, each store writes 16 of the 64.
        unsafe {
            macro_rules! row {
                ($r:literal) => {
                    _mm_loadl_epi64(from[$r].as_ptr().cast())
                };
            }
            // Rows r and r + 4 alternate, then all even and all odd rows, then all.
            let (r04, r15) = (_mm_unpacklo_epi8(row!(0), row!(4)), _mm_unpacklo_epi8(row!(1), row!(5)));
            let (r26, r37) = (_mm_unpacklo_epi8(row!(2), row!(6)), _mm_unpacklo_epi8(row!(3), row!(7)));
            let even = [_mm_unpacklo_epi8(r04, r26), _mm_unpackhi_epi8(r04, r26)];
            let odd = [_mm_unpacklo_epi8(r15, r37), _mm_unpackhi_epi8(r15, r37)];
            let to = to.as_flattened_mut().as_chunks_mut::<16>().0;
            for i in 0..2 {
                _mm_storeu_si128(to[2 * i].as_mut_ptr().cast(), _mm_unpacklo_epi8(even[i], odd[i]));
                _mm_storeu_si128(to[2 * i + 1].as_mut_ptr().cast(), _mm_unpackhi_epi8(even[i], odd[i]));
            }
        }
        to
    }

    #[inline(always)]
    fn e8m0(self, bytes: &[u8; LANES]) -> Self::F {
        // SAFETY: `self` proves AVX2; the load reads 8 bytes.
        unsafe {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes.as_ptr().cast()));
            let bits = _mm256_max_epi32(_mm256_slli_epi32::<23>(bytes), _mm256_set1_epi32(1 << 22));
            // Infinity, which 255 would be, gets all bits set.
            let infinity = _mm256_set1_epi32(f32::INFINITY.to_bits() as i32);
            _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_cmpeq_epi32(bits, infinity)))
        }
    }

    #[inline(always)]
    fn low_bytes(self, v: [Self::I; 4]) -> [[u8; 16]; 2] {
        let mut bytes = [[0; 16]; 2];
        // SAFETY: `self` proves AVX2; the stores write 16 bytes each.
        unsafe {
            let mask = _mm256_set1_epi32(255);
            let low = _mm256_packus_epi32(_mm256_and_si256(v[0], mask), _mm256_and_si256(v[1], mask));
            let high = _mm256_packus_epi32(_mm256_and_si256(v[2], mask), _mm256_and_si256(v[3], mask));
            // In each lane: four values of each vector, in turn.
            let fours = _mm256_packus_epi16(low, high);
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let ascending = _mm256_permutevar8x32_epi32(fours, order);
            let split = _mm256_broadcastsi128_si256(_mm_setr_epi8(
                0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,
            ));
            let parities = _mm256_permute4x64_epi64::<0xd8>(_mm256_shuffle_epi8(ascending, split));
            _mm_storeu_si128(bytes[0].as_mut_ptr().cast(), _mm256_castsi256_si128(parities));
            _mm_storeu_si128(bytes[1].as_mut_ptr().cast(), _mm256_extracti128_si256::<1>(parities));
        }
        bytes
    }
}
