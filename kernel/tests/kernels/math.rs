use k3_kernel::testing::{self, Random, same_on_each_isa};
use k3_kernel::{Kernels, math};

type InPlace = fn(Kernels, &mut [f32]);
type Single = fn(f32) -> f32;
type Exact = fn(f64) -> f64;

const FUNCTIONS: [(&str, InPlace, Single, Exact); 4] = [
    ("exp", Kernels::exp, math::exp, f64::exp),
    ("sigmoid", Kernels::sigmoid, math::sigmoid, testing::sigmoid),
    ("tanh", Kernels::tanh, math::tanh, f64::tanh),
    ("softplus", Kernels::softplus, math::softplus, testing::softplus),
];

/// A sample of every exponent and both signs, and all specials.
fn samples() -> Vec<f32> {
    let mut random = Random::new(3);
    let specials = [
        0.0,
        -0.0,
        f32::MIN_POSITIVE,
        1e-45,
        -1e-45,
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        88.722_83,
        88.722_84,
        -87.336_55,
        -103.97,
        -103.98,
        -104.0,
        0.6,
    ];
    let any = (0..SAMPLES).map(|_| f32::from_bits((random.bits() >> 32) as u32));
    let usual: Vec<f32> = any.collect();
    specials.into_iter().chain(usual).chain(Random::new(4).vec(SAMPLES + 3, 110.0)).collect()
}

/// Of each kind.
const SAMPLES: usize = if cfg!(miri) { 50 } else { 200_000 };

#[test]
fn same_bits_and_within_two_ulp() {
    for (name, in_place, single, exact) in FUNCTIONS {
        let x = samples();
        let y = same_on_each_isa(name, |k| {
            let mut y = x.clone();
            in_place(k, &mut y);
            y
        });
        for (x, y) in x.iter().zip(&y) {
            let error = testing::ulps(*y, exact(f64::from(*x)));
            assert!(error <= 2.0, "{name}({x:e}) = {y:e}, {error} ulp off");
        }
        for (x, y) in x.iter().zip(&y).step_by(97) {
            assert!(single(*x).to_bits() == y.to_bits() || y.is_nan(), "{name}({x}) alone");
        }
    }
}

#[test]
fn ends() {
    assert_eq!(math::exp(89.0), f32::INFINITY);
    assert_eq!(math::exp(f32::NEG_INFINITY).to_bits(), 0);
    assert_eq!(math::exp(-0.0), 1.0);
    assert_eq!(math::tanh(-0.0).to_bits(), (-0.0f32).to_bits());
    assert_eq!((math::tanh(40.0), math::tanh(f32::NEG_INFINITY)), (1.0, -1.0));
    assert_eq!((math::sigmoid(f32::INFINITY), math::sigmoid(f32::NEG_INFINITY)), (1.0, 0.0));
    assert_eq!((math::softplus(f32::INFINITY), math::softplus(-200.0)), (f32::INFINITY, 0.0));
    assert!([math::exp, math::tanh, math::sigmoid, math::softplus].iter().all(|f| f(f32::NAN).is_nan()));
}
