use k3_kernel::moe::{RouterParams, router_choose};
use k3_kernel::testing::{self, Random, same_on_each_isa, worst_error};

fn choose(scores: &[f32], bias: &[f32], params: &RouterParams) -> (Vec<u16>, Vec<f32>) {
    let (mut ids, mut weights) = (vec![0; params.top_k], vec![0.0; params.top_k]);
    router_choose(scores, bias, params, &mut ids, &mut weights, &mut vec![0.0; params.groups]);
    (ids, weights)
}

#[test]
fn choice_equals_sorting() {
    let shapes = [
        (16, 4, 1, 1),
        (896, 16, 1, 1),
        (32, 8, 4, 2),
        (32, 8, 8, 8),
        (24, 6, 6, 3),
        (12, 3, 12, 4),
        (5, 5, 1, 1),
    ];
    for (experts, top_k, groups, groups_kept) in shapes {
        for seed in 0..if cfg!(miri) { 1 } else { 200 } {
            let mut random = Random::new(seed);
            // Coarse values: many ties.
            let coarse = |x: Vec<f32>| -> Vec<f32> { x.iter().map(|x| (x * 8.0).round() / 8.0).collect() };
            let scores: Vec<f32> = coarse(random.vec(experts, 0.5)).iter().map(|s| s + 0.5).collect();
            let bias = coarse(random.vec(experts, 1.0));
            for (renormalize, scaling) in [(true, 1.0), (false, 2.5)] {
                let params = RouterParams { top_k, groups, groups_kept, renormalize, scaling };
                let (ids, weights) = choose(&scores, &bias, &params);
                let (expected_ids, expected_weights) = testing::router_choose(&scores, &bias, &params);
                assert_eq!(ids, expected_ids, "{experts} experts, seed {seed}, {params:?}");
                assert!(worst_error(&weights, &expected_weights) < 4e-7);
            }
        }
    }
}

#[test]
fn a_single_choice_is_not_renormalised() {
    let params = RouterParams { top_k: 1, groups: 1, groups_kept: 1, renormalize: true, scaling: 2.0 };
    assert_eq!(choose(&[0.1, 0.4, 0.3], &[0.0, 0.0, 0.0], &params), (vec![1], vec![0.8]));
}

#[test]
fn combine() {
    for &n in crate::LENGTHS {
        for k in [1, 4, 16] {
            let mut random = Random::new((n * k) as u64);
            let (ys, weights) = (random.vec(n * k, 2.0), random.vec(k, 1.0));
            let y = same_on_each_isa("moe_combine", |kernels| {
                let mut y = vec![f32::NAN; n];
                kernels.moe_combine(&ys, &weights, &mut y);
                y
            });
            assert!(worst_error(&y, &testing::moe_combine(&ys, &weights)) < 2e-6, "{k} experts of {n}");
        }
    }
}
