//! Exact CPU kernels for Kimi K3.
//!
//! **Contract.** Every function gives identical bits on every instruction set, for every way of
//! splitting rows between threads, and for every batch width: a column of a batch gets the bits it
//! would get alone. Sums are either integers (order cannot matter) or have one written order. Rounding
//! is to nearest even, subnormals are kept, and the only contraction is an `fma` that is written down.
//!
//! The crate is `no_std`, allocates nothing, starts no thread and does no I/O.
#![no_std]

#[cfg(test)]
extern crate std;

mod act;
pub mod dispatch;
pub mod isa;
pub mod lanes;

pub use dispatch::{Isa, Kernels};
