//! Whole halves of a layer against the golden vectors: linear attention and latent attention with their
//! caches carried, and a block of experts, each with weights and inputs of its own.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use k3_golden::vectors::TOLERANCE;
use k3_golden::{Golden, golden_dir};
use k3_pipeline::forward::{Commit, LayerHalf, LogitsWanted, SequenceRun};
use k3_pipeline::model::synth::{Fill, SynthTensor, SynthType, write_checkpoint};
use k3_pipeline::model::tensors::MatrixKind;
use k3_pipeline::units::{LayerIndex, TokenId};
use k3_tests::harness::{Model, Setup};
use serde_json::{Value, json};

use crate::options::config_with;

/// Gives tensors of one part of layer 0 the contents of a case.
struct FromCase<'g> {
    golden: &'g Golden,
    case: &'static str,
    part: &'static str,
    filled: usize,
}

impl Fill for FromCase<'_> {
    fn fill(&mut self, tensor: &SynthTensor, file: &File, offset: u64) -> io::Result<()> {
        let Some((_, name)) = tensor.name.split_once(self.part) else { return Ok(()) };
        let name = format!("{}.{name}", self.case);
        let bytes: Vec<u8> = match tensor.dtype {
            SynthType::F32 => {
                self.golden.f32(&name).unwrap().data.iter().flat_map(|v| v.to_le_bytes()).collect()
            }
            SynthType::Bf16 => self.golden.bf16_bytes(&name).unwrap().data.concat(),
            SynthType::U8 => self.golden.u8(&name).unwrap().data,
        };
        assert_eq!(bytes.len() as u64, tensor.bytes(), "{name}");
        self.filled += 1;
        file.write_all_at(&bytes, offset)
    }
}

/// The sizes of all layer cases, as a model of one layer.
fn sizes(more: &[(&'static str, Value)]) -> String {
    let mut changes = vec![
        ("num_hidden_layers", json!(1)),
        ("hidden_size", json!(64)),
        ("linear_attn_config.num_heads", json!(3)),
        ("linear_attn_config.head_dim", json!(16)),
        ("num_attention_heads", json!(4)),
        ("num_key_value_heads", json!(4)),
        ("q_lora_rank", json!(48)),
        ("kv_lora_rank", json!(32)),
        ("qk_nope_head_dim", json!(24)),
        ("qk_rope_head_dim", json!(8)),
        ("v_head_dim", json!(16)),
        ("num_experts", json!(8)),
        ("num_experts_per_token", json!(3)),
        ("routed_expert_hidden_size", json!(64)),
        ("moe_intermediate_size", json!(96)),
        ("intermediate_size", json!(112)),
        ("linear_attn_config.full_attn_layers", json!([])),
        ("linear_attn_config.kda_layers", json!([1])),
    ];
    changes.extend(more.iter().cloned());
    config_with(&changes)
}

/// A model of one layer with the weights of `case`.
fn model(golden: &Golden, case: &'static str, part: &'static str, config: &str) -> Model {
    let dir = tempfile::tempdir().unwrap();
    let mut fill = FromCase { golden, case, part, filled: 0 };
    write_checkpoint(dir.path(), config, &mut fill).unwrap();
    assert!(fill.filled > 5, "{case}: {} tensors filled", fill.filled);
    Model::open(dir.path())
}

fn golden() -> Golden {
    Golden::open(&golden_dir().join("vectors/kernels-shared.safetensors")).unwrap()
}

/// Runs the calls of a case one after the other on one sequence and compares each output, row by row.
fn check(model: &Model, half: LayerHalf, golden: &Golden, case: &str, calls: &[(&str, &str)]) {
    let setup = Setup::default();
    let mut weights = model.weights(&setup);
    if half == LayerHalf::FeedForward {
        weights.begin_at(MatrixKind::Router);
    }
    let mut executor = model.executor_over(&setup, weights, model.experts(&setup));
    let mut state = model.state();
    for (input, output) in calls {
        let x = golden.f32(&format!("{case}.{input}")).unwrap();
        let want = golden.f64(&format!("{case}.{output}")).unwrap();
        let tokens = vec![TokenId(0); x.rows()];
        let run = SequenceRun {
            state: &mut state,
            tokens: &tokens,
            commit: Commit::All,
            logits: LogitsWanted::None,
        };
        let y = executor.half((LayerIndex(0), half), &x.data, run).unwrap();
        for (row, found) in y.chunks_exact(model.config.hidden).enumerate() {
            let want = want.row(row);
            let scale = want.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
            for (found, want) in found.iter().zip(want) {
                let share = (f64::from(*found) - want).abs() / scale;
                assert!(
                    share <= TOLERANCE,
                    "{case}.{output} row {row}: {share:e} of the row's largest value"
                );
            }
        }
    }
}

const THREE_CALLS: &[(&str, &str)] = &[("x0", "y0_f64"), ("x1", "y1_f64"), ("x2", "y2_f64")];

#[test]
fn linear_attention_is_that_of_the_released_code() {
    let golden = golden();
    let model = model(&golden, "kda_layer", ".self_attn.", &sizes(&[]));
    check(&model, LayerHalf::Attention, &golden, "kda_layer", THREE_CALLS);
}

#[test]
fn latent_attention_is_that_of_the_released_code() {
    let golden = golden();
    let lists =
        [("linear_attn_config.full_attn_layers", json!([1])), ("linear_attn_config.kda_layers", json!([]))];
    let model = model(&golden, "mla_layer", ".self_attn.", &sizes(&lists));
    check(&model, LayerHalf::Attention, &golden, "mla_layer", THREE_CALLS);
}

#[test]
fn latent_experts_are_those_of_the_released_code() {
    let golden = golden();
    let moe_first = [("first_k_dense_replace", json!(0))];
    let model = model(&golden, "latent_moe", ".block_sparse_moe.", &sizes(&moe_first));
    check(&model, LayerHalf::FeedForward, &golden, "latent_moe", &[("x", "y_f64")]);
}
