//! Which instruction set a kernel runs on. No arithmetic stands here.
#![allow(unsafe_code)]

use core::fmt;
use core::str::FromStr;

#[cfg(all(feature = "avx2", target_arch = "x86_64"))]
use crate::isa::avx2::Avx2;
#[cfg(all(feature = "neon", target_arch = "aarch64"))]
use crate::isa::neon::Neon;
use crate::isa::scalar::Scalar;

/// An instruction set. All give the same bits; they differ in speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Portable code, on every processor.
    Scalar,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// 64-bit ARM.
    Neon,
}

impl Isa {
    /// Every instruction set, slowest first.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Neon];

    /// The name used in settings: `scalar`, `avx2` or `neon`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Neon => "neon",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The text is not the name of an instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownIsa;

impl fmt::Display for UnknownIsa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unknown instruction set: expected `scalar`, `avx2` or `neon`")
    }
}

impl core::error::Error for UnknownIsa {}

impl FromStr for Isa {
    type Err = UnknownIsa;

    fn from_str(text: &str) -> Result<Self, UnknownIsa> {
        Self::ALL.into_iter().find(|isa| isa.name() == text).ok_or(UnknownIsa)
    }
}

/// All kernels, on one instruction set. Holding a value proves that this processor has it.
///
/// The kernels are methods, each documented in its own module. All panic when the lengths of their
/// slices contradict each other or a documented rule, and for no other reason.
#[derive(Clone, Copy, Debug)]
pub struct Kernels(pub(crate) Level);

/// The token of the instruction set that a [`Kernels`] runs on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Level {
    Scalar(Scalar),
    #[cfg(all(feature = "avx2", target_arch = "x86_64"))]
    Avx2(Avx2),
    #[cfg(all(feature = "neon", target_arch = "aarch64"))]
    Neon(Neon),
}

impl Kernels {
    /// Portable kernels.
    pub const fn scalar() -> Self {
        Self(Level::Scalar(Scalar))
    }

    /// The kernels for `isa`; `None` where this processor lacks it or the crate was built without it.
    pub fn new(isa: Isa) -> Option<Self> {
        match isa {
            Isa::Scalar => Some(Self::scalar()),
            Isa::Avx2 => detect_avx2(),
            Isa::Neon => detect_neon(),
        }
    }

    /// The fastest kernels that this processor can run.
    pub fn detect() -> Self {
        detect_avx2().or_else(detect_neon).unwrap_or(Self::scalar())
    }

    /// The instruction set that these kernels run on.
    pub const fn isa(self) -> Isa {
        match self.0 {
            Level::Scalar(_) => Isa::Scalar,
            #[cfg(all(feature = "avx2", target_arch = "x86_64"))]
            Level::Avx2(_) => Isa::Avx2,
            #[cfg(all(feature = "neon", target_arch = "aarch64"))]
            Level::Neon(_) => Isa::Neon,
        }
    }
}

#[cfg(all(feature = "avx2", target_arch = "x86_64"))]
fn detect_avx2() -> Option<Kernels> {
    if !has_avx2() {
        return None;
    }
    // SAFETY: just asked.
    let token = unsafe { Avx2::assume() };
    Some(Kernels(Level::Avx2(token)))
}

#[cfg(not(all(feature = "avx2", target_arch = "x86_64")))]
fn detect_avx2() -> Option<Kernels> {
    None
}

#[cfg(all(feature = "neon", target_arch = "aarch64", target_feature = "neon"))]
fn detect_neon() -> Option<Kernels> {
    // SAFETY: the target that this is compiled for includes NEON.
    let token = unsafe { Neon::assume() };
    Some(Kernels(Level::Neon(token)))
}

#[cfg(not(all(feature = "neon", target_arch = "aarch64", target_feature = "neon")))]
fn detect_neon() -> Option<Kernels> {
    None
}

/// Asks the processor (Intel SDM volume 1, section 14.3): AVX2, FMA, and that the system saves the
/// 128- and 256-bit registers.
#[cfg(all(feature = "avx2", target_arch = "x86_64"))]
fn has_avx2() -> bool {
    use core::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

    const FMA: u32 = 1 << 12;
    const OSXSAVE: u32 = 1 << 27;
    const AVX: u32 = 1 << 28;
    const AVX2: u32 = 1 << 5;
    const SAVED: u64 = 0b110;

    #[target_feature(enable = "xsave")]
    unsafe fn saved() -> u64 {
        // SAFETY: the caller has seen OSXSAVE, so the instruction exists and register 0 may be read.
        unsafe { _xgetbv(0) }
    }

    #[allow(unused_unsafe)] // safe from Rust 1.94 on
    // SAFETY: every x86-64 processor has the instruction; leaf 7 is asked for only where it exists.
    let (highest, first) = unsafe { (__cpuid(0).eax, __cpuid(1).ecx) };
    if highest < 7 || first & (FMA | OSXSAVE | AVX) != FMA | OSXSAVE | AVX {
        return false;
    }
    #[allow(unused_unsafe)]
    // SAFETY: as above; OSXSAVE is set.
    let (leaf7, saved) = unsafe { (__cpuid_count(7, 0).ebx, saved()) };
    leaf7 & AVX2 != 0 && saved & SAVED == SAVED
}

/// Runs a body that is generic over [`Lanes`](crate::lanes::Lanes) on the instruction set of a
/// [`Kernels`]: `dispatch!(kernels, body(x: &[f32] = x, y: &mut [f32] = y) -> f32)` calls
/// `body(token, x, y)` inside a function that has the instruction set's `#[target_feature]`. The body
/// must be `#[inline(always)]`, or it is compiled without it.
macro_rules! dispatch {
    ($kernels:expr, $body:path, ($($arg:ident: $type:ty),* $(,)?)) => {
        crate::dispatch::dispatch!($kernels, $body, ($($arg: $type),*) -> ())
    };
    ($kernels:expr, $body:path, ($($arg:ident: $type:ty),* $(,)?) -> $out:ty) => {{
        match $kernels.0 {
            crate::dispatch::Level::Scalar(token) => $body(token, $($arg),*),
            #[cfg(all(feature = "avx2", target_arch = "x86_64"))]
            crate::dispatch::Level::Avx2(token) => {
                #[allow(unsafe_code, clippy::too_many_arguments)]
                #[target_feature(enable = "avx2,fma")]
                unsafe fn avx2(token: crate::isa::avx2::Avx2, $($arg: $type),*) -> $out {
                    $body(token, $($arg),*)
                }
                #[allow(unsafe_code)]
                // SAFETY: the token proves that the processor has AVX2 and FMA.
                let out = unsafe { avx2(token, $($arg),*) };
                out
            }
            #[cfg(all(feature = "neon", target_arch = "aarch64"))]
            crate::dispatch::Level::Neon(token) => {
                #[allow(unsafe_code, clippy::too_many_arguments)]
                #[target_feature(enable = "neon")]
                unsafe fn neon(token: crate::isa::neon::Neon, $($arg: $type),*) -> $out {
                    $body(token, $($arg),*)
                }
                #[allow(unsafe_code)]
                // SAFETY: the token proves that the processor has NEON.
                let out = unsafe { neon(token, $($arg),*) };
                out
            }
        }
    }};
}
pub(crate) use dispatch;
