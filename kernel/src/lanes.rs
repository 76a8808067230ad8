//! The one vector width that every kernel body is written for: [`LANES`] logical `f32` lanes.
//!
//! AVX2 holds them in one register, NEON in two, scalar code in an array. A body that is generic over
//! [`Lanes`] therefore performs the same operations in the same order everywhere, and gets the same
//! bits. The only operation that crosses lanes is [`Lanes::sum`], whose tree is
//! written here.
//!
//! A value that implements [`Lanes`] is a token: holding it proves that this processor has the
//! instructions, so its methods are safe. Bodies are `#[inline(always)]` and take the token by value;
//! [`dispatch!`](crate::dispatch) inlines them under the right `#[target_feature]`. Closures do not
//! inherit target features: bodies use loops.

/// Number of logical `f32` lanes of every vector, on every instruction set.
pub const LANES: usize = 8;

/// Lane-wise operations on [`LANES`] `f32` or `i32` values.
///
/// Every operation is IEEE 754 binary32, rounded to nearest even, subnormals kept. Not-a-number results
/// are not-a-number everywhere, but their sign and payload are the processor's.
pub trait Lanes: Copy {
    /// [`LANES`] `f32` values.
    type F: Copy;
    /// [`LANES`] `i32` values.
    type I: Copy;
    /// [`LANES`] truth values.
    type M: Copy;

    /// The same value in every lane.
    fn splat(self, x: f32) -> Self::F;
    /// The first [`LANES`] values of `x`; panics when there are fewer.
    fn load(self, x: &[f32]) -> Self::F;
    /// Writes the lanes to the first [`LANES`] places of `y`; panics when there are fewer.
    fn store(self, v: Self::F, y: &mut [f32]);

    /// `a + b`.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Square root.
    fn sqrt(self, a: Self::F) -> Self::F;
    /// `a > b`; false where either is not a number.
    fn gt(self, a: Self::F, b: Self::F) -> Self::M;
    /// `a` where `m` holds, else `b`.
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F;

    /// The bits of each lane.
    fn bits(self, a: Self::F) -> Self::I;
    /// The value with these bits.
    #[allow(clippy::wrong_self_convention)] // `self` is the token
    fn from_bits(self, a: Self::I) -> Self::F;
    /// The same integer in every lane.
    fn splat_i(self, x: i32) -> Self::I;
    /// Wrapping `a + b`.
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Wrapping `a - b`.
    fn sub_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise and.
    fn and_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise or.
    fn or_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Shifts each lane left by `N` bits.
    fn shl_i<const N: i32>(self, a: Self::I) -> Self::I;
    /// Shifts each lane right by `N` bits, copying the sign.
    fn sra_i<const N: i32>(self, a: Self::I) -> Self::I;

    /// The larger of the two: `a` where `a > b`, else `b` (so `b` where either is not a number, or where
    /// both are zeros).
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        self.select(self.gt(a, b), a, b)
    }

    /// The first [`LANES`] values of `x`, or all of them and then +0.
    #[inline(always)]
    fn load_some(self, x: &[f32]) -> Self::F {
        if x.len() >= LANES {
            return self.load(x);
        }
        let mut lanes = [0.0; LANES];
        lanes[..x.len()].copy_from_slice(x);
        self.load(&lanes)
    }

    /// Writes the lanes to the first [`LANES`] places of `y`, or as many as there are places.
    #[inline(always)]
    fn store_some(self, v: Self::F, y: &mut [f32]) {
        if y.len() >= LANES {
            return self.store(v, y);
        }
        y.copy_from_slice(&self.to_array(v)[..y.len()]);
    }

    /// `|a|`.
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        self.from_bits(self.and_i(self.bits(a), self.splat_i(i32::MAX)))
    }

    /// `-a`.
    #[inline(always)]
    fn neg(self, a: Self::F) -> Self::F {
        self.from_bits(self.add_i(self.bits(a), self.splat_i(i32::MIN)))
    }

    /// The lanes as an array.
    #[inline(always)]
    fn to_array(self, v: Self::F) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        lanes
    }

    /// The sum of the lanes: `((0+4) + (2+6)) + ((1+5) + (3+7))`.
    #[inline(always)]
    fn sum(self, v: Self::F) -> f32 {
        let x = self.to_array(v);
        ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    }
}
