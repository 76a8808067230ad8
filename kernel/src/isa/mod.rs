//! Instruction sets: lane-wise operations only. No loop over data and no algorithm stands here.

#[cfg(all(feature = "avx2", target_arch = "x86_64"))]
pub mod avx2;
#[cfg(all(feature = "avx2", target_arch = "x86_64", any(test, feature = "testing")))]
mod avx2_f64;
#[cfg(all(feature = "avx2", target_arch = "x86_64"))]
mod avx2_mxfp4;
#[cfg(all(feature = "avx2", target_arch = "x86_64"))]
mod avx2_tile;
#[cfg(all(feature = "neon", target_arch = "aarch64"))]
pub mod neon;
#[cfg(all(feature = "neon", target_arch = "aarch64"))]
mod neon_mxfp4;
#[cfg(all(feature = "neon", target_arch = "aarch64"))]
mod neon_tile;
pub mod scalar;
mod scalar_mxfp4;
mod scalar_tile;
