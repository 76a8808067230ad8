use std::collections::HashMap;

use k3_kernel::math;
use proptest::prelude::*;

use super::*;

fn ids(numbers: &[u32]) -> Vec<TokenId> {
    numbers.iter().copied().map(TokenId).collect()
}

fn sampler(params: SamplingParams, vocabulary: usize) -> Sampler {
    Sampler::new(params, vocabulary, Kernels::detect()).unwrap()
}

/// The parameters' own definition, token by token, with maps and full sorts.
fn slow(logits: &[f32], params: &SamplingParams, prompt: &[TokenId], output: &[TokenId]) -> Vec<(u32, f32)> {
    let bias: HashMap<_, _> = params.logit_bias.iter().copied().collect();
    let adjusted: Vec<f32> = (0..logits.len())
        .map(|i| {
            let id = TokenId(i as u32);
            let mut x = logits[i] + bias.get(&id).copied().unwrap_or(0.0);
            let count = output.iter().filter(|o| **o == id).count();
            if prompt.contains(&id) || count > 0 {
                x = if x > 0.0 { x / params.repetition_penalty } else { x * params.repetition_penalty };
            }
            if count > 0 {
                x = x - params.frequency_penalty * count as f32 - params.presence_penalty;
            }
            x
        })
        .collect();
    let highest = adjusted.iter().copied().fold(f32::MIN, f32::max);
    if params.temperature == 0.0 {
        let first = adjusted.iter().position(|x| *x == highest).unwrap();
        return vec![(first as u32, 1.0)];
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| adjusted[*b].partial_cmp(&adjusted[*a]).unwrap().then(a.cmp(b)));
    let weight = |i: usize| math::exp((adjusted[i] - highest) / params.temperature);
    order.retain(|i| weight(*i) >= params.min_p);
    if params.top_k > 0 {
        order.truncate(params.top_k);
    }
    if params.top_p < 1.0 {
        let total: f64 = order.iter().map(|i| f64::from(weight(*i))).sum();
        let keep = (1..=order.len()).find(|n| {
            order[..*n].iter().map(|i| f64::from(weight(*i))).sum::<f64>() >= f64::from(params.top_p) * total
        });
        order.truncate(keep.unwrap_or(order.len()));
    }
    order.into_iter().map(|i| (i as u32, weight(i))).collect()
}

prop_compose! {
    fn params()(
        temperature in prop_oneof![Just(0.0_f32), 0.05_f32..3.0],
        top_k in 0_usize..14,
        top_p in prop_oneof![Just(1.0_f32), 0.01_f32..1.0],
        min_p in prop_oneof![Just(0.0_f32), 0.0_f32..=1.0],
        repetition_penalty in prop_oneof![Just(1.0_f32), 0.5_f32..2.0],
        presence_penalty in prop_oneof![Just(0.0_f32), -2.0_f32..=2.0],
        frequency_penalty in prop_oneof![Just(0.0_f32), -2.0_f32..=2.0],
        bias in prop::collection::hash_map(0_u32..12, -5.0_f32..5.0, 0..3),
        seed in any::<u64>(),
    ) -> SamplingParams {
        SamplingParams {
            temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
            logit_bias: bias.into_iter().map(|(id, b)| (TokenId(id), b)).collect(),
            seed,
            logprobs: None,
        }
    }
}

proptest! {
    #[test]
    fn filters_and_penalties_equal_the_slow_reference(
        params in params(),
        // Few different values, so that equal logits are frequent.
        logits in prop::collection::vec((-6_i32..7).prop_map(|x| x as f32 * 0.75), 12),
        prompt in prop::collection::vec(0_u32..12, 0..5),
        output in prop::collection::vec(0_u32..12, 0..5),
    ) {
        let (prompt, output) = (ids(&prompt), ids(&output));
        let mut sampler = sampler(params.clone(), 12);
        // What came before the beginning does not count.
        sampler.see_output(&[TokenId(0), TokenId(0), TokenId(5)]).unwrap();
        sampler.begin(&prompt).unwrap();
        sampler.see_output(&output).unwrap();
        let found = |sampler: &mut Sampler| -> Vec<(u32, f32)> {
            sampler.distribution(&logits).unwrap().candidates().iter().map(|c| (c.id.0, c.weight)).collect()
        };
        let expected = slow(&logits, &params, &prompt, &output);
        prop_assert_eq!(&found(&mut sampler), &expected);
        let chosen = sampler.sample(&logits).unwrap();
        prop_assert!(expected.iter().any(|(id, weight)| *id == chosen.0 && *weight > 0.0));
        // What it chose is output like what it was told.
        let output = [&output[..], &[chosen]].concat();
        prop_assert_eq!(found(&mut sampler), slow(&logits, &params, &prompt, &output));
    }

    #[test]
    fn nothing_is_allocated_after_the_start(params in params(), rows in prop::collection::vec(
        prop::collection::vec(-9.0_f32..9.0, 12), 1..6)) {
        let mut sampler = sampler(SamplingParams { logprobs: Some(3), ..params }, 12);
        let room = |s: &Sampler| (s.adjusted.capacity(), s.filter.capacities(), s.logprobs.top().as_ptr());
        let before = room(&sampler);
        for row in rows {
            sampler.sample(&row).unwrap();
        }
        prop_assert_eq!(room(&sampler), before);
    }
}

#[test]
fn frequencies_follow_the_distribution() {
    let params = SamplingParams { temperature: 1.0, seed: 3, ..SamplingParams::default() };
    let mut sampler = sampler(params, 4);
    let logits = [0.0, 1.0, -1.0, 2.0];
    let probability: Vec<f64> = {
        let distribution = sampler.distribution(&logits).unwrap();
        (0..4).map(|id| distribution.probability(TokenId(id))).collect()
    };
    let n = 200_000;
    let mut counts = [0_u32; 4];
    for _ in 0..n {
        counts[sampler.sample(&logits).unwrap().0 as usize] += 1;
    }
    for (count, p) in counts.iter().zip(probability) {
        let deviation = (f64::from(*count) - f64::from(n) * p) / (f64::from(n) * p * (1.0 - p)).sqrt();
        assert!(deviation.abs() < 4.0, "{counts:?}");
    }
}

#[test]
fn the_same_seed_gives_the_same_tokens_and_a_state_goes_on() {
    let params = SamplingParams { temperature: 1.0, seed: 11, ..SamplingParams::default() };
    let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32).collect();
    let draw =
        |sampler: &mut Sampler| -> Vec<u32> { (0..20).map(|_| sampler.sample(&logits).unwrap().0).collect() };
    let (mut a, mut b) = (sampler(params.clone(), 50), sampler(params.clone(), 50));
    assert_eq!(draw(&mut a), draw(&mut b));
    let mut resumed = sampler(SamplingParams { seed: 0, ..params.clone() }, 50);
    resumed.set_random_state(a.random_state());
    assert_eq!(draw(&mut resumed), draw(&mut a));
    let mut other = sampler(SamplingParams { seed: 12, ..params }, 50);
    assert_ne!(draw(&mut other), draw(&mut b));
}

#[test]
fn logprobs_are_of_the_raw_distribution() {
    let params = SamplingParams {
        temperature: 0.5,
        top_k: 1,
        logit_bias: vec![(TokenId(0), 50.0)],
        logprobs: Some(2),
        ..SamplingParams::default()
    };
    let mut sampler = sampler(params, 4);
    let logits = [1.0_f32, 3.0, 3.0, 0.0];
    assert_eq!(sampler.sample(&logits).unwrap(), TokenId(0));
    let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
    let close = |found: f64, logit: f64| assert!((found - (logit - sum.ln())).abs() < 1e-6, "{found}");
    close(sampler.logprobs().chosen().unwrap(), 1.0);
    let top = sampler.logprobs().top();
    assert_eq!(top.iter().map(|t| t.0.0).collect::<Vec<_>>(), [1, 2]);
    top.iter().for_each(|t| close(t.1, 3.0));
}

#[test]
fn a_filter_keeps_what_just_reaches_its_border() {
    let kept = |params: SamplingParams, logits: &[f32]| {
        sampler(SamplingParams { temperature: 1.0, ..params }, 4)
            .distribution(logits)
            .unwrap()
            .candidates()
            .len()
    };
    let default = SamplingParams::default;
    // Four of a quarter each: one reaches a quarter, two a half.
    for (top_p, expected) in [(0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4)] {
        assert_eq!(kept(SamplingParams { top_p, ..default() }, &[2.0; 4]), expected, "{top_p}");
    }
    assert_eq!(kept(SamplingParams { min_p: 1.0, ..default() }, &[2.0, 2.0, 1.0, 2.0]), 3);
    assert_eq!(kept(SamplingParams { top_k: 4, ..default() }, &[2.0; 4]), 4);
    assert_eq!(kept(SamplingParams { top_k: 1, ..default() }, &[2.0; 4]), 1);
}

#[test]
fn extreme_logits_are_drawn_from_without_harm() {
    let params = SamplingParams { temperature: 0.001, min_p: 1.0, ..SamplingParams::default() };
    let mut extreme = sampler(params, 3);
    assert_eq!(extreme.sample(&[f32::MIN, f32::MAX, 0.0]).unwrap(), TokenId(1));
    let params = SamplingParams { repetition_penalty: 0.01, temperature: 1.0, ..SamplingParams::default() };
    let mut extreme = sampler(params, 3);
    extreme.begin(&ids(&[1])).unwrap();
    assert_eq!(extreme.sample(&[0.0, f32::MAX, f32::MIN]).unwrap(), TokenId(1));
    assert_eq!(greedy(&[-0.0, 0.0, -1.0]), TokenId(0));
}

#[test]
fn bad_parameters_and_rows_are_refused() {
    let refused = |change: fn(&mut SamplingParams), message: &str| {
        let mut params = SamplingParams::default();
        change(&mut params);
        let error = Sampler::new(params, 10, Kernels::scalar()).unwrap_err().to_string();
        assert_eq!(error, message);
    };
    refused(|p| p.temperature = -0.5, "temperature is -0.5: expected 0 (greedy) to 100");
    refused(|p| p.temperature = f32::NAN, "temperature is NaN: expected 0 (greedy) to 100");
    refused(|p| p.top_p = 0.0, "top_p is 0: expected above 0, at most 1 (all)");
    refused(|p| p.top_p = f32::NAN, "top_p is NaN: expected above 0, at most 1 (all)");
    refused(|p| p.min_p = 1.5, "min_p is 1.5: expected 0 (all) to 1");
    refused(
        |p| p.repetition_penalty = 0.0,
        "repetition_penalty is 0: expected 0.01 to 100 (1 changes nothing)",
    );
    refused(|p| p.presence_penalty = 2.5, "presence_penalty is 2.5: expected -2 to 2");
    refused(|p| p.frequency_penalty = -3.0, "frequency_penalty is -3: expected -2 to 2");
    refused(|p| p.logit_bias = vec![(TokenId(1), 101.0)], "logit_bias is 101: expected -100 to 100");
    refused(
        |p| p.logit_bias = vec![(TokenId(10), 1.0)],
        "logit_bias names token 10, but the vocabulary has 10 tokens",
    );
    refused(|p| p.logit_bias = vec![(TokenId(1), 1.0), (TokenId(1), 2.0)], "logit_bias names token 1 twice");
    refused(|p| p.logprobs = Some(11), "logprobs is 11: expected at most 10");

    let mut sampler = sampler(SamplingParams::default(), 3);
    let error = |e: SamplingError| e.to_string();
    assert_eq!(error(sampler.sample(&[0.0; 2]).unwrap_err()), "2 logits for a vocabulary of 3 tokens");
    let row = [0.0, f32::NAN, 0.0];
    assert_eq!(error(sampler.sample(&row).unwrap_err()), "the logit of token 1 is NaN");
    let row = [0.0, 0.0, f32::NEG_INFINITY];
    assert_eq!(error(sampler.sample(&row).unwrap_err()), "the logit of token 2 is -inf");
    let unknown = sampler.begin(&ids(&[3])).unwrap_err();
    assert_eq!(error(unknown), "token 3 is not in the vocabulary of 3 tokens");
}
