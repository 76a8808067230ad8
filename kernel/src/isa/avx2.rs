//! AVX2 with FMA: the eight lanes are one 256-bit register.
#![allow(unsafe_code)]

use core::arch::x86_64::*;

use crate::lanes::{LANES, Lanes};

/// Proof that this processor has AVX2 and FMA, and that the system saves their registers.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

impl Avx2 {
    /// The proof, taken on trust.
    ///
    /// # Safety
    /// The processor has AVX2 and FMA, and the operating system saves the 256-bit registers.
    pub(crate) unsafe fn assume() -> Self {
        Self(())
    }
}

impl Lanes for Avx2 {
    type F = __m256;
    type I = __m256i;
    type M = __m256;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, x: &[f32]) -> Self::F {
        let x = &x[..LANES];
        // SAFETY: `self` proves AVX2; `x` holds LANES readable values; the load may be unaligned.
        unsafe { _mm256_loadu_ps(x.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, v: Self::F, y: &mut [f32]) {
        let y = &mut y[..LANES];
        // SAFETY: `self` proves AVX2; `y` holds LANES writable values; the store may be unaligned.
        unsafe { _mm256_storeu_ps(y.as_mut_ptr(), v) }
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn sqrt(self, a: Self::F) -> Self::F {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_sqrt_ps(a) }
    }

    #[inline(always)]
    fn gt(self, a: Self::F, b: Self::F) -> Self::M {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_cmp_ps::<_CMP_GT_OQ>(a, b) }
    }

    #[inline(always)]
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_blendv_ps(b, a, m) }
    }

    #[inline(always)]
    fn bits(self, a: Self::F) -> Self::I {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_castps_si256(a) }
    }

    #[inline(always)]
    fn from_bits(self, a: Self::I) -> Self::F {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_castsi256_ps(a) }
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_set1_epi32(x) }
    }

    #[inline(always)]
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_add_epi32(a, b) }
    }

    #[inline(always)]
    fn sub_i(self, a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_sub_epi32(a, b) }
    }

    #[inline(always)]
    fn and_i(self, a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_and_si256(a, b) }
    }

    #[inline(always)]
    fn or_i(self, a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_or_si256(a, b) }
    }

    #[inline(always)]
    fn shl_i<const N: i32>(self, a: Self::I) -> Self::I {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_slli_epi32::<N>(a) }
    }

    #[inline(always)]
    fn sra_i<const N: i32>(self, a: Self::I) -> Self::I {
        // SAFETY: `self` proves AVX2 and FMA.
        unsafe { _mm256_srai_epi32::<N>(a) }
    }
}
