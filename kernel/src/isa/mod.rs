//! Instruction sets: lane-wise operations only. No loop over data and no algorithm stands here.

#[cfg(all(feature = "avx2", target_arch = "x86_64"))]
pub mod avx2;
#[cfg(all(feature = "neon", target_arch = "aarch64"))]
pub mod neon;
pub mod scalar;
