//! The golden vectors: single operations computed with the released code. A value passes when it is within
//! 1e-5 of the largest value of its row.

use k3_golden::{Golden, golden_dir};
use k3_kernel::act::bf16_to_f32;
use k3_kernel::conv::conv_taps;
use k3_kernel::kda::{KdaTokens, kda_state_index, kda_state_len};
use k3_kernel::moe::{RouterParams, router_choose};
use k3_kernel::testing::worst_error;
use k3_kernel::{Columns, Kernels, Out, each_isa, math};

const TOLERANCE: f64 = 1e-5;

fn golden() -> Golden {
    Golden::open(&golden_dir().join("vectors/kernels-shared.safetensors")).unwrap()
}

fn bf16(golden: &Golden, name: &str) -> Vec<f32> {
    let bytes = golden.bf16_bytes(name).unwrap().data.concat();
    let mut wide = vec![0.0; bytes.len() / 2];
    bf16_to_f32(&bytes, &mut wide);
    wide
}

fn eps(golden: &Golden, case: &str) -> f32 {
    golden.f64(&format!("{case}.eps")).unwrap().data[0] as f32
}

/// Compares with `name`, row by row of its last axis.
#[track_caller]
fn check(golden: &Golden, name: &str, found: &[f32]) {
    let expected = golden.f64(name).unwrap();
    assert_eq!(found.len(), expected.data.len(), "{name}");
    let width = expected.data.len() / expected.rows();
    let rows = (0..expected.rows()).zip(found.chunks(width));
    let worst = rows.map(|(i, found)| worst_error(found, expected.row(i))).fold(0.0, f64::max);
    println!("{name}: {worst:.1e}");
    assert!(worst <= TOLERANCE, "{name}: {worst:e} of the row's largest value");
}

#[test]
fn norms() {
    let golden = golden();
    for case in ["rmsnorm", "rmsnorm_lowrank", "rmsnorm_latent"] {
        let x = golden.f32(&format!("{case}.x")).unwrap();
        let weight = bf16(&golden, &format!("{case}.weight"));
        each_isa!(|k| {
            let mut y = vec![0.0; x.data.len()];
            for (x, y) in x.data.chunks(weight.len()).zip(y.chunks_mut(weight.len())) {
                k.rmsnorm(x, &weight, eps(&golden, case), y);
            }
            check(&golden, &format!("{case}.y_f64"), &y);
        });
    }
}

#[test]
fn situ() {
    let golden = golden();
    let read = |name: &str| golden.f32(&format!("situ.{name}")).unwrap().data;
    let (gate, up) = (read("gate"), read("up"));
    each_isa!(|k| {
        let mut y = vec![0.0; gate.len()];
        k.situ(&gate, &up, read("beta")[0], read("linear_beta")[0], &mut y);
        check(&golden, "situ.y_f64", &y);
    });
}

#[test]
fn short_convolution() {
    let golden = golden();
    let read = |name: &str| golden.f32(&format!("shortconv.{name}")).unwrap();
    let weight = read("weight");
    let (channels, width) = (weight.shape[0], weight.shape[2]);
    let mut taps = vec![0.0; weight.data.len()];
    conv_taps(&weight.data, width, &mut taps);
    each_isa!(|k| {
        let mut hist = vec![0.0; (width - 1) * channels];
        for call in 0..4 {
            let x = read(&format!("x{call}")).data;
            let mut y = vec![0.0; x.len()];
            for (x, y) in x.chunks(channels).zip(y.chunks_mut(channels)) {
                k.conv_silu(&taps, &mut hist, x, y);
            }
            check(&golden, &format!("shortconv.y{call}_f64"), &y);
            let state = read(&format!("state{call}")).data;
            let newest = |t: usize, c: usize| state[c * width + t + 1];
            let expected: Vec<f32> = (0..hist.len()).map(|i| newest(i / channels, i % channels)).collect();
            assert_eq!(hist, expected, "history after call {call}");
        }
    });
}

#[test]
fn kda() {
    let golden = golden();
    for case in ["kda", "kda_128"] {
        each_isa!(|k| {
            let initial = golden.f32(&format!("{case}.initial_state")).unwrap();
            let [heads, dv, dk] = initial.shape[..] else { panic!("{case}: state [heads, value, key]") };
            let mut states: Vec<Vec<f32>> =
                initial.data.chunks(dv * dk).map(|state| packed(state, dk, dv)).collect();
            for call in ["t9", "t1"] {
                let name = format!("{case}.{call}");
                let (alpha, out) = kda_call(k, &golden, case, &name, &mut states);
                check(&golden, &format!("{name}.decay_f64"), &alpha);
                check(&golden, &format!("{name}.o_f64"), &out);
                assert_eq!(states.len(), heads);
                let unpacked: Vec<f32> = states.iter().flat_map(|state| unpacked(state, dk, dv)).collect();
                check(&golden, &format!("{name}.state_f64"), &unpacked);
            }
        });
    }
}

/// From the golden order [value, key] to the kernel's.
fn packed(state: &[f32], dk: usize, dv: usize) -> Vec<f32> {
    let mut packed = vec![0.0; kda_state_len(dk, dv)];
    for (n, s) in state.iter().enumerate() {
        packed[kda_state_index(dk, dv, n % dk, n / dk)] = *s;
    }
    packed
}

fn unpacked(state: &[f32], dk: usize, dv: usize) -> Vec<f32> {
    (0..dk * dv).map(|n| state[kda_state_index(dk, dv, n % dk, n / dk)]).collect()
}

/// All tokens of one call: decay factors and outputs, [T, heads, width].
fn kda_call(
    kernels: Kernels,
    golden: &Golden,
    case: &str,
    name: &str,
    states: &mut [Vec<f32>],
) -> (Vec<f32>, Vec<f32>) {
    let read = |tensor: &str| golden.f32(&format!("{name}.{tensor}")).unwrap();
    let parameter = |tensor: &str| golden.f32(&format!("{case}.{tensor}")).unwrap().data;
    let (mut q, mut k, v, g, mut beta) =
        (read("q").data, read("k").data, read("v").data, read("g").data, read("beta"));
    let (a_log, dt_bias, bound) = (parameter("A_log"), parameter("dt_bias"), parameter("lower_bound")[0]);
    let heads = states.len();
    let width = dt_bias.len() / heads;
    let tokens = beta.data.len() / heads;
    kernels.sigmoid(&mut beta.data);
    let mut alpha = vec![0.0; g.len()];
    for (n, alpha) in alpha.chunks_mut(width).enumerate() {
        let (head, part) = (n % heads, n * width..(n + 1) * width);
        let bias = &dt_bias[head * width..][..width];
        kernels.kda_decay(&g[part.clone()], bias, math::exp(a_log[head]), Some(bound), alpha);
        kernels.l2norm(&mut q[part.clone()], 1e-6, 1.0 / (width as f32).sqrt());
        kernels.l2norm(&mut k[part], 1e-6, 1.0);
    }
    let mut out = vec![0.0; v.len()];
    for (head, state) in states.iter_mut().enumerate() {
        let columns = |data, len| {
            let data: &[f32] = data;
            Columns { data: &data[head * len..], stride: heads * len, count: tokens, len }
        };
        let inputs = KdaTokens {
            q: columns(&q, width),
            k: columns(&k, width),
            v: columns(&v, width),
            alpha: columns(&alpha, width),
            beta: columns(&beta.data, 1),
        };
        let out = Out::new(&mut out[head * width..], heads * width, width, tokens);
        kernels.kda_run(state, width, width, &inputs, out);
    }
    (alpha, out)
}

#[test]
fn router() {
    let golden = golden();
    for case in ["router", "router_ties", "router_scaled"] {
        let number = |name: &str| golden.i32(&format!("{case}.{name}")).unwrap().data[0] as usize;
        let read = |name: &str| golden.f32(&format!("{case}.{name}")).unwrap();
        let (x, bias) = (read("x"), read("e_score_correction_bias").data);
        let gate = bf16(&golden, &format!("{case}.gate.weight"));
        let params = RouterParams {
            top_k: number("top_k"),
            groups: number("num_expert_group"),
            groups_kept: number("topk_group"),
            renormalize: number("renormalize") != 0,
            scaling: read("routed_scaling_factor").data[0],
        };
        let ids = golden.i32(&format!("{case}.ids")).unwrap();
        let mut all = Vec::new();
        for (t, x) in x.data.chunks(gate.len() / bias.len()).enumerate() {
            let dot =
                |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>();
            let mut scores: Vec<f32> = gate.chunks(x.len()).map(|row| dot(row) as f32).collect();
            Kernels::detect().sigmoid(&mut scores);
            let (mut chosen, mut weights) = (vec![0; params.top_k], vec![0.0; params.top_k]);
            let groups = &mut vec![0.0; params.groups];
            router_choose(&scores, &bias, &params, &mut chosen, &mut weights, groups);
            let mut pairs: Vec<(u16, f32)> = chosen.into_iter().zip(weights).collect();
            pairs.sort_by_key(|pair| pair.0);
            let rising: Vec<i32> = pairs.iter().map(|pair| i32::from(pair.0)).collect();
            assert_eq!(rising, ids.row(t), "{case}, token {t}");
            all.extend(pairs.iter().map(|pair| pair.1));
        }
        check(&golden, &format!("{case}.weights_f64"), &all);
    }
}

#[test]
fn attention_residuals() {
    let golden = golden();
    for case in ["attn_res_1", "attn_res_3", "attn_res_8"] {
        let norm = bf16(&golden, &format!("{case}.norm.weight"));
        let proj = bf16(&golden, &format!("{case}.proj.weight"));
        let key: Vec<f32> = norm.iter().zip(&proj).map(|(n, p)| n * p).collect();
        let n = key.len();
        let prefix = golden.f32(&format!("{case}.prefix_sum")).unwrap();
        let blocks = golden.f32(&format!("{case}.block_residual")).unwrap();
        each_isa!(|k| {
            let mut all = Vec::new();
            for (blocks, prefix) in blocks.data.chunks(blocks.shape[1] * n).zip(prefix.data.chunks(n)) {
                let sources: Vec<&[f32]> = blocks.chunks(n).chain([prefix]).collect();
                let mut y = vec![0.0; n];
                k.residual_mix(&sources, &key, eps(&golden, case), &mut y);
                all.extend(y);
            }
            check(&golden, &format!("{case}.y_f64"), &all);
        });
    }
}
