//! Exact CPU kernels for Kimi K3.
//!
//! **Contract.** Every function gives identical bits on every instruction set, for every way of
//! splitting rows between threads, and for every batch width: a column of a batch gets the bits it
//! would get alone. Sums are either integers (order cannot matter) or have one written order. Rounding
//! is to nearest even, subnormals are kept, and the only contraction is an `fma` that is written down.
//!
//! The crate is `no_std`, allocates nothing, starts no thread and does no I/O.
#![no_std]

#[cfg(any(test, feature = "testing"))]
extern crate std;

pub mod act;
pub mod bf16;
pub mod conv;
pub mod dispatch;
pub mod hn;
pub mod isa;
pub mod kda;
pub mod lanes;
pub mod math;
#[cfg(any(test, feature = "testing"))]
pub mod matrix_oracle;
pub mod mla;
pub mod moe;
pub mod mxfp4;
pub mod norm;
pub mod out;
pub mod residual;
#[cfg(feature = "testing")]
pub mod testing;
mod tile;
pub mod weights;

pub use dispatch::{Isa, Kernels};
pub use mxfp4::{Q23, Q23_BATCH_MAX, q23_bytes};
pub use out::{Columns, Out};
pub use weights::{Bf16Rows, Bf16Tiled, F32Rows, GROUP_COLS, HnTiled, Matrix, Mxfp4, ShapeError, TILE_ROWS};
