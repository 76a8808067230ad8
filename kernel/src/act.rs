//! Element-wise operations.

use crate::dispatch::{Kernels, dispatch};
use crate::lanes::{LANES, Lanes};

impl Kernels {
    /// `y += x`, element by element. `x`, `y`: [n].
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add(self, x: &[f32], y: &mut [f32]) {
        assert_eq!(x.len(), y.len(), "add: x and y must have one length");
        dispatch!(self, add, (x: &[f32], y: &mut [f32]));
    }
}

#[inline(always)]
fn add<L: Lanes>(l: L, x: &[f32], y: &mut [f32]) {
    let (xs, x_tail) = x.as_chunks::<LANES>();
    let (ys, y_tail) = y.as_chunks_mut::<LANES>();
    for (x, y) in xs.iter().zip(ys) {
        l.store(l.add(l.load(y), l.load(x)), y);
    }
    for (x, y) in x_tail.iter().zip(y_tail) {
        *y += x;
    }
}
