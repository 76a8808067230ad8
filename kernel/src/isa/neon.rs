//! NEON: the eight lanes are two 128-bit registers.
#![allow(unsafe_code)]

use core::arch::aarch64::*;

use crate::lanes::{LANES, Lanes};

/// Proof that this processor has NEON.
#[derive(Clone, Copy, Debug)]
pub struct Neon(());

impl Neon {
    /// The proof, taken on trust.
    ///
    /// # Safety
    /// The processor has NEON.
    pub(crate) unsafe fn assume() -> Self {
        Self(())
    }
}

/// Applies a 128-bit operation to both halves.
macro_rules! halves {
    ($op:ident($($arg:expr),*)) => {{
        // SAFETY: `self` proves NEON.
        unsafe { ($op($($arg.0),*), $op($($arg.1),*)) }
    }};
}

impl Lanes for Neon {
    type F = (float32x4_t, float32x4_t);
    type I = (int32x4_t, int32x4_t);
    type M = (uint32x4_t, uint32x4_t);

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        // SAFETY: `self` proves NEON.
        let v = unsafe { vdupq_n_f32(x) };
        (v, v)
    }

    #[inline(always)]
    fn load(self, x: &[f32]) -> Self::F {
        let x = &x[..LANES];
        // SAFETY: `self` proves NEON; `x` holds LANES readable values.
        unsafe { (vld1q_f32(x.as_ptr()), vld1q_f32(x.as_ptr().add(4))) }
    }

    #[inline(always)]
    fn store(self, v: Self::F, y: &mut [f32]) {
        let y = &mut y[..LANES];
        // SAFETY: `self` proves NEON; `y` holds LANES writable values.
        unsafe {
            vst1q_f32(y.as_mut_ptr(), v.0);
            vst1q_f32(y.as_mut_ptr().add(4), v.1);
        }
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        halves!(vaddq_f32(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        halves!(vsubq_f32(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        halves!(vmulq_f32(a, b))
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        halves!(vdivq_f32(a, b))
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // The instruction adds to its first operand.
        halves!(vfmaq_f32(c, a, b))
    }

    #[inline(always)]
    fn sqrt(self, a: Self::F) -> Self::F {
        halves!(vsqrtq_f32(a))
    }

    #[inline(always)]
    fn gt(self, a: Self::F, b: Self::F) -> Self::M {
        halves!(vcgtq_f32(a, b))
    }

    #[inline(always)]
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F {
        halves!(vbslq_f32(m, a, b))
    }

    #[inline(always)]
    fn bits(self, a: Self::F) -> Self::I {
        halves!(vreinterpretq_s32_f32(a))
    }

    #[inline(always)]
    fn from_bits(self, a: Self::I) -> Self::F {
        halves!(vreinterpretq_f32_s32(a))
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        // SAFETY: `self` proves NEON.
        let v = unsafe { vdupq_n_s32(x) };
        (v, v)
    }

    #[inline(always)]
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        halves!(vaddq_s32(a, b))
    }

    #[inline(always)]
    fn sub_i(self, a: Self::I, b: Self::I) -> Self::I {
        halves!(vsubq_s32(a, b))
    }

    #[inline(always)]
    fn and_i(self, a: Self::I, b: Self::I) -> Self::I {
        halves!(vandq_s32(a, b))
    }

    #[inline(always)]
    fn or_i(self, a: Self::I, b: Self::I) -> Self::I {
        halves!(vorrq_s32(a, b))
    }

    #[inline(always)]
    fn shl_i<const N: i32>(self, a: Self::I) -> Self::I {
        // SAFETY: `self` proves NEON.
        unsafe { (vshlq_n_s32::<N>(a.0), vshlq_n_s32::<N>(a.1)) }
    }

    #[inline(always)]
    fn sra_i<const N: i32>(self, a: Self::I) -> Self::I {
        // SAFETY: `self` proves NEON.
        unsafe { (vshrq_n_s32::<N>(a.0), vshrq_n_s32::<N>(a.1)) }
    }
}
