//! Every kernel: the same bits on each instruction set, the right values, and the golden vectors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod elementwise;
mod golden;
mod kda;
mod math;
mod mla;
mod moe;

/// Lengths around the lane width, the partial vectors and the chunk of a sum; a few for an interpreter.
const LENGTHS: &[usize] = if cfg!(miri) {
    &[1, 7, 8, 41]
} else {
    &[
        1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 20, 31, 32, 33, 39, 40, 41, 63, 64, 65, 128, 152, 1023, 1024, 1025,
        3584,
    ]
};
