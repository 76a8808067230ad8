//! Products with f64 lanes, as engines work that widen every weight: what the benchmarks compare with. Not
//! bit-equal to anything.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use crate::isa::avx2::Avx2;
use crate::matrix_oracle::F64Lanes;

/// 2 * E2M1 of each code.
const TWICE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl Avx2 {
    #[inline(always)]
    fn sum_f64(self, v: [__m256d; 4]) -> f64 {
        let mut lanes = [0.0; 4];
        // SAFETY: `self` proves AVX2; four values are writable.
        unsafe {
            let sum = _mm256_add_pd(_mm256_add_pd(v[0], v[1]), _mm256_add_pd(v[2], v[3]));
            _mm256_storeu_pd(lanes.as_mut_ptr(), sum);
        }
        lanes.iter().sum()
    }
}

impl F64Lanes for Avx2 {
    #[inline(always)]
    fn bf16_dot(self, w: &[[u8; 32]], x: &[[f32; 16]]) -> f64 {
        // SAFETY: `self` proves AVX2 and FMA; each load lies within its array.
        unsafe {
            let mut sums = [_mm256_setzero_pd(); 4];
            for (w, x) in w.iter().zip(x) {
                for (i, sum) in sums.iter_mut().enumerate() {
                    let bits = _mm_cvtepu16_epi32(_mm_loadl_epi64(w.as_ptr().add(8 * i).cast()));
                    let w = _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32::<16>(bits)));
                    let x = _mm256_cvtps_pd(_mm_loadu_ps(x.as_ptr().add(4 * i)));
                    *sum = _mm256_fmadd_pd(w, x, *sum);
                }
            }
            self.sum_f64(sums)
        }
    }

    #[inline(always)]
    fn mxfp4_dot(self, codes: &[[u8; 16]], scales: &[u8], x: &[[f32; 32]]) -> f64 {
        let mut total = 0.0;
        for ((codes, scale), x) in codes.iter().zip(scales).zip(x) {
            // SAFETY: `self` proves AVX2 and FMA; each load lies within its array.
            let sum = unsafe {
                let table = _mm_loadu_si128(TWICE.as_ptr().cast());
                let mask = _mm_set1_epi8(15);
                let codes = _mm_loadu_si128(codes.as_ptr().cast());
                let even = _mm_shuffle_epi8(table, _mm_and_si128(codes, mask));
                let odd = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16::<4>(codes), mask));
                let mut weights = [0i8; 32];
                _mm_storeu_si128(weights.as_mut_ptr().cast(), _mm_unpacklo_epi8(even, odd));
                _mm_storeu_si128(weights.as_mut_ptr().add(16).cast(), _mm_unpackhi_epi8(even, odd));
                let mut sums = [_mm256_setzero_pd(); 4];
                for i in 0..8 {
                    let four = _mm_loadu_si32(weights.as_ptr().add(4 * i).cast());
                    let w = _mm256_cvtepi32_pd(_mm_cvtepi8_epi32(four));
                    let x = _mm256_cvtps_pd(_mm_loadu_ps(x.as_ptr().add(4 * i)));
                    sums[i % 4] = _mm256_fmadd_pd(w, x, sums[i % 4]);
                }
                self.sum_f64(sums)
            };
            total += sum * (f64::from_bits((u64::from(*scale) + 1023 - 128) << 52));
        }
        total
    }
}
