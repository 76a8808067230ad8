//! Scalar code: the definition of what every other instruction set must give.
//!
//! `core` has neither `fma` nor `sqrt`; both are here, correctly rounded, from integer and `f64`
//! operations that every processor has.

use crate::lanes::{LANES, Lanes};

/// Scalar arithmetic, present on every processor.
#[derive(Clone, Copy, Debug)]
pub struct Scalar;

/// `a * b + c` in `f32`, rounded once to nearest even.
///
/// The product of two `f32` is exact in `f64`. The `f64` sum `s` has the exact error `e` (Knuth's
/// two-sum; no step overflows, and none is inexact by underflow, since all operands are multiples of
/// 2^-298). Where the sum is inexact and the last bit of `s` is even, `s` is moved one place towards the
/// exact value: this is rounding to odd, after which the rounding to `f32` (29 bits shorter, more where
/// the result is subnormal) is the only one that shows (Boldo and Melquiond, 2008).
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    let p = f64::from(a) * f64::from(b);
    let c = f64::from(c);
    let s = p + c;
    let back = s - p;
    let e = (p - (s - back)) + (c - back);
    let bits = s.to_bits();
    // Not-a-number errors (from infinite operands) compare false: `s` stays.
    let inexact = (e > 0.0) | (e < 0.0);
    let even = bits & 1 == 0;
    let away = (e > 0.0) == (s > 0.0);
    let moved = if away { bits.wrapping_add(1) } else { bits.wrapping_sub(1) };
    f64::from_bits(if inexact & even { moved } else { bits }) as f32
}

/// Square root in `f32`, rounded to nearest even: the integer square root of the significand, one bit
/// longer than the result, decides the rounding (an exact tie cannot occur). Negative values give
/// not-a-number, -0 gives -0.
#[inline(always)]
pub fn sqrt(x: f32) -> f32 {
    if x == 0.0 || x == f32::INFINITY || x.is_nan() {
        return x;
    }
    if x < 0.0 {
        return f32::NAN;
    }
    // Every positive finite f32 is a normal f64: exponent and significand can be read off.
    let bits = f64::from(x).to_bits();
    let exponent = (bits >> 52) as i32 - 1023;
    // 24 bits: x = significand * 2^(exponent - 23).
    let significand = ((bits & ((1 << 52) - 1)) | (1 << 52)) >> 29;
    let odd = exponent & 1;
    // 25 bits: sqrt(x) = root * 2^((exponent - odd) / 2 - 24).
    let root = (significand << (25 + odd)).isqrt();
    let rounded = (root + 1) >> 1;
    // At most 24 bits and a bit, times a power of two well inside the range: exact.
    (rounded as f64 * f64::from_bits(((((exponent - odd) / 2 - 23) + 1023) as u64) << 52)) as f32
}

macro_rules! each_lane {
    (|$i:ident| $value:expr) => {{
        let mut lanes = [Default::default(); LANES];
        let mut $i = 0;
        while $i < LANES {
            lanes[$i] = $value;
            $i += 1;
        }
        lanes
    }};
}

impl Lanes for Scalar {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type M = [bool; LANES];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, x: &[f32]) -> Self::F {
        let x = &x[..LANES];
        each_lane!(|i| x[i])
    }

    #[inline(always)]
    fn store(self, v: Self::F, y: &mut [f32]) {
        y[..LANES].copy_from_slice(&v);
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        each_lane!(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        each_lane!(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        each_lane!(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        each_lane!(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        each_lane!(|i| fma(a[i], b[i], c[i]))
    }

    #[inline(always)]
    fn sqrt(self, a: Self::F) -> Self::F {
        each_lane!(|i| sqrt(a[i]))
    }

    #[inline(always)]
    fn gt(self, a: Self::F, b: Self::F) -> Self::M {
        each_lane!(|i| a[i] > b[i])
    }

    #[inline(always)]
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F {
        each_lane!(|i| if m[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn bits(self, a: Self::F) -> Self::I {
        each_lane!(|i| a[i].to_bits() as i32)
    }

    #[inline(always)]
    fn from_bits(self, a: Self::I) -> Self::F {
        each_lane!(|i| f32::from_bits(a[i] as u32))
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        [x; LANES]
    }

    #[inline(always)]
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        each_lane!(|i| a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    fn sub_i(self, a: Self::I, b: Self::I) -> Self::I {
        each_lane!(|i| a[i].wrapping_sub(b[i]))
    }

    #[inline(always)]
    fn and_i(self, a: Self::I, b: Self::I) -> Self::I {
        each_lane!(|i| a[i] & b[i])
    }

    #[inline(always)]
    fn or_i(self, a: Self::I, b: Self::I) -> Self::I {
        each_lane!(|i| a[i] | b[i])
    }

    #[inline(always)]
    fn shl_i<const N: i32>(self, a: Self::I) -> Self::I {
        each_lane!(|i| a[i] << N)
    }

    #[inline(always)]
    fn sra_i<const N: i32>(self, a: Self::I) -> Self::I {
        each_lane!(|i| a[i] >> N)
    }
}

#[cfg(test)]
mod tests {
    use super::{fma, sqrt};

    /// Pseudo-random 32-bit patterns (splitmix64): every kind of `f32` turns up.
    struct Bits(u64);

    /// An interpreter is some thousand times slower.
    const CASES: u32 = if cfg!(miri) { 200 } else { 2_000_000 };

    impl Bits {
        fn next(&mut self) -> u32 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z >> 32) as u32
        }

        /// A value with its exponent in `low..=high` (biased; 0 is subnormal).
        fn within(&mut self, low: u32, high: u32) -> f32 {
            let exponent = low + self.next() % (high - low + 1);
            f32::from_bits((self.next() & 0x807f_ffff) | (exponent << 23))
        }
    }

    fn same(a: f32, b: f32) -> bool {
        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
    }

    #[track_caller]
    fn check(a: f32, b: f32, c: f32) {
        let (got, expected) = (fma(a, b, c), a.mul_add(b, c));
        assert!(same(got, expected), "fma({a:e}, {b:e}, {c:e}) = {got:e}, the processor says {expected:e}");
    }

    #[test]
    fn fma_equals_hardware() {
        let mut bits = Bits(1);
        for _ in 0..CASES {
            // Any bit patterns; then results around the subnormal range.
            let [a, b, c] = [0; 3].map(|_| f32::from_bits(bits.next()));
            check(a, b, c);
            check(bits.within(20, 107), bits.within(0, 40), bits.within(0, 3));
            // Cancelling: c is the product, rounded, give or take an ulp.
            let (a, b) = (bits.within(60, 190), bits.within(60, 190));
            let c = f32::from_bits((-(a * b)).to_bits().wrapping_add(bits.next() % 5).wrapping_sub(2));
            check(a, b, c);
            // The product lies just at or beside half an ulp of c.
            let c = bits.within(100, 150);
            let ulp = f32::from_bits((c.to_bits() & 0x7f80_0000) - (24 << 23));
            let near = 1.0 + ((bits.next() % 5) as f32 - 2.0) * f32::EPSILON;
            check(ulp, near, c);
            check(-ulp * near, 1.0 - f32::EPSILON, c);
        }
        let special = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            f32::MIN_POSITIVE,
            -f32::MIN_POSITIVE,
            1e-45,
            -1e-45,
            f32::MAX,
            f32::MIN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            f32::EPSILON,
        ];
        for a in special {
            for b in special {
                for c in special {
                    check(a, b, c);
                }
            }
        }
    }

    #[test]
    fn sqrt_equals_hardware() {
        let mut bits = Bits(2);
        for i in 0..2 * CASES {
            let x = f32::from_bits(if i % 2 == 0 { bits.next() } else { i * 3 });
            assert!(
                same(sqrt(x), x.sqrt()),
                "sqrt({x:e}) = {:e}, the processor says {:e}",
                sqrt(x),
                x.sqrt()
            );
        }
    }
}
