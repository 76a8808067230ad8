//! Accuracy of the elementary functions over every `f32` there is.

use std::thread;

use anyhow::anyhow;
use k3_kernel::Kernels;
use k3_kernel::testing::{self, ulps};

use crate::Failure;

/// What the functions promise, in units of the last place.
const PROMISED_ULP: f64 = 2.0;
/// Values that are computed together.
const BATCH: usize = 4096;

type InPlace = fn(Kernels, &mut [f32]);
type Exact = fn(f64) -> f64;

const FUNCTIONS: [(&str, InPlace, Exact); 4] = [
    ("exp", Kernels::exp, f64::exp),
    ("sigmoid", Kernels::sigmoid, testing::sigmoid),
    ("tanh", Kernels::tanh, f64::tanh),
    ("softplus", Kernels::softplus, testing::softplus),
];

/// The largest error found, and where.
#[derive(Clone, Copy)]
struct Worst {
    ulp: f64,
    at: f32,
}

/// Compares every function with `f64` on all 2^32 bit patterns; fails where one is further off than
/// promised. Takes minutes.
pub fn run() -> Result<(), Failure> {
    let kernels = Kernels::detect();
    println!("every f32, on {}:", kernels.isa());
    let mut failed = Vec::new();
    for (name, in_place, exact) in FUNCTIONS {
        let worst = worst_of_all(kernels, in_place, exact);
        println!("{name:8} at most {:.4} ulp off, at {:e} ({:08x})", worst.ulp, worst.at, worst.at.to_bits());
        if worst.ulp > PROMISED_ULP {
            failed.push(name);
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(anyhow!("further than {PROMISED_ULP} ulp off: {}", failed.join(", ")).into())
}

/// The halves of the range on two threads.
fn worst_of_all(kernels: Kernels, in_place: InPlace, exact: Exact) -> Worst {
    thread::scope(|scope| {
        let upper = scope.spawn(|| worst_of(kernels, in_place, exact, 1 << 31));
        let lower = worst_of(kernels, in_place, exact, 0);
        match upper.join() {
            Ok(upper) if upper.ulp <= lower.ulp => lower,
            Ok(upper) => upper,
            // The thread panicked: nothing is known of its half.
            Err(_) => Worst { ulp: f64::INFINITY, at: f32::NAN },
        }
    })
}

/// The 2^31 bit patterns from `start` on.
fn worst_of(kernels: Kernels, in_place: InPlace, exact: Exact, start: u32) -> Worst {
    let mut worst = Worst { ulp: 0.0, at: 0.0 };
    let (mut x, mut y) = (vec![0.0; BATCH], vec![0.0; BATCH]);
    for batch in 0..(1u32 << 31) / BATCH as u32 {
        let first = start + batch * BATCH as u32;
        for (x, bits) in x.iter_mut().zip(first..=first + (BATCH as u32 - 1)) {
            *x = f32::from_bits(bits);
        }
        y.copy_from_slice(&x);
        in_place(kernels, &mut y);
        for (x, y) in x.iter().zip(&y) {
            let ulp = ulps(*y, exact(f64::from(*x)));
            if ulp > worst.ulp {
                worst = Worst { ulp, at: *x };
            }
        }
    }
    worst
}
