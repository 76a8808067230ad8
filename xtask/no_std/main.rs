//! A program without a standard library that calls kernels: `cargo xtask` links it to show that they need none.
#![no_std]
#![no_main]

use k3_kernel::{Columns, Kernels, Out, kda, mla};

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    loop {}
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, n: usize) -> *mut u8 {
    let mut i = 0;
    while i < n {
        unsafe { to.add(i).write_volatile(from.add(i).read_volatile()) };
        i += 1;
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, n: usize) -> *mut u8 {
    let mut i = 0;
    while i < n {
        let at = if (to as usize) < from as usize { i } else { n - 1 - i };
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
        i += 1;
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, n: usize) -> *mut u8 {
    let mut i = 0;
    while i < n {
        unsafe { to.add(i).write_volatile(byte as u8) };
        i += 1;
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, n: usize) -> i32 {
    let mut i = 0;
    while i < n {
        let (a, b) = unsafe { (a.add(i).read_volatile(), b.add(i).read_volatile()) };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
        i += 1;
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, n: usize) -> i32 {
    unsafe { memcmp(a, b, n) }
}

#[unsafe(no_mangle)]
extern "C" fn _start() -> ! {
    let k = Kernels::detect();
    let (x, mut y, mut state, mut scratch) = ([0.5f32; 64], [0.0f32; 64], [0.0f32; 64], [0.0f32; 4096]);
    k.rmsnorm(&x, &x, 1e-5, &mut y);
    k.situ(&x, &x, 4.0, 25.0, &mut y);
    k.softplus(&mut y);
    let column = Columns::one(&x[..8]);
    let tokens = kda::KdaTokens { q: column, k: column, v: column, alpha: column, beta: Columns::one(&x[..1]) };
    k.kda_run(&mut state, 8, 8, &tokens, Out::one(&mut y[..8]));
    k.mla_attend(&x, mla::Latent { data: &x, rank: 6, rope: 2 }, 0.3, &mut y[..48], &mut scratch);
    k.moe_combine(&x, &x[..2], &mut y[..32]);
    k.q23_quantize(&x, &mut [0; k3_kernel::q23_bytes(64)]);
    loop {}
}
