//! Every option of the configuration against the float64 model: those that no golden model has, too.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use k3_golden::Golden;
use k3_pipeline::model::synth::{Fill, SynthTensor, SynthType, write_checkpoint};
use k3_pipeline::units::TokenId;
use k3_tests::harness::{Model, Setup, compare, feed, ids};
use k3_tests::reference::Reference;
use k3_tests::resident::golden_model;
use serde_json::{Value, json};

#[test]
fn the_float64_model_is_the_released_code_in_float64() {
    for name in ["k3-tiny-a", "k3-tiny-b"] {
        let model = Model::golden(name);
        let golden = Golden::open(&golden_model(name).join("golden/golden.safetensors")).unwrap();
        let tokens = ids(&golden.i32("p7.ids").unwrap().data);
        let got = Reference::new(&model.config, &model.tensors, &model.files).logits(&tokens).concat();
        let want = golden.f64("p7.logits_f64").unwrap().data;
        let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
        let error = square(&mut got.iter().zip(&want).map(|(a, b)| a - b));
        let rms = (error / square(&mut want.iter().copied())).sqrt();
        // The engine's configuration holds epsilons as f32: 6e-9 is theirs.
        assert!(rms < 1e-7, "{name}: relative rms {rms:e}");
    }
}

/// Random weights of the sizes that keep activations near one.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as f64 / 2f64.powi(64)
    }

    /// Uniform in [-1, 1), times `scale`.
    fn around_zero(&mut self, scale: f64) -> f64 {
        (2.0 * self.next() - 1.0) * scale
    }

    fn value(&mut self, tensor: &SynthTensor) -> f64 {
        let (name, last) = (&tensor.name, tensor.shape.last().copied().unwrap_or(1));
        if name.ends_with("norm.weight") {
            1.0 + self.around_zero(0.3)
        } else if name.contains("conv1d") || name.ends_with("A_log") || name.ends_with("dt_bias") {
            self.around_zero(0.9)
        } else if name.ends_with("e_score_correction_bias") {
            self.around_zero(0.2)
        } else {
            self.around_zero(1.0 / (last as f64).sqrt())
        }
    }
}

impl Fill for Random {
    fn fill(&mut self, tensor: &SynthTensor, file: &File, offset: u64) -> io::Result<()> {
        let count: usize = tensor.shape.iter().product();
        let bytes: Vec<u8> = match tensor.dtype {
            SynthType::F32 => (0..count).flat_map(|_| (self.value(tensor) as f32).to_le_bytes()).collect(),
            SynthType::Bf16 => (0..count)
                .flat_map(|_| ((self.value(tensor) as f32).to_bits() >> 16).to_le_bytes()[..2].to_vec())
                .collect(),
            SynthType::U8 if tensor.name.ends_with("scale") => {
                (0..count).map(|_| 121 + (self.next() * 3.0) as u8).collect()
            }
            SynthType::U8 => (0..count).map(|_| (self.next() * 256.0) as u8).collect(),
        };
        file.write_all_at(&bytes, offset)
    }
}

/// The configuration of a golden model with some fields changed.
pub(crate) fn config_with(changes: &[(&str, Value)]) -> String {
    let text = std::fs::read_to_string(golden_model("k3-tiny-a").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    for (path, value) in changes {
        let mut at = &mut config["text_config"];
        let mut names: Vec<&str> = path.split('.').collect();
        let last = names.pop().unwrap();
        for name in names {
            at = &mut at[name];
        }
        at[last] = value.clone();
    }
    config.to_string()
}

fn check(what: &str, changes: &[(&str, Value)]) {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), &config_with(changes), &mut Random(7)).unwrap();
    let model = Model::open(dir.path());
    let tokens: Vec<TokenId> = (0..12).map(|i| TokenId((i * 37 + 11) % 256)).collect();
    let want = Reference::new(&model.config, &model.tensors, &model.files).logits(&tokens).concat();
    for chunk in [12, 5] {
        let got = feed(&mut model.executor(&Setup::default()), &mut model.state(), &tokens, chunk).unwrap();
        let (rms, _) = compare(&got, &want);
        println!("{what}: relative rms {rms:.2e}");
        assert!(rms < 3e-5, "{what} in chunks of {chunk}: relative rms {rms:e}");
    }
}

#[test]
fn options_of_linear_attention() {
    check("as the golden model", &[]);
    check("low-rank output gate", &[("linear_attn_config.use_full_rank_gate", json!(false))]);
    check("no lower bound", &[("linear_attn_config.gate_lower_bound", json!(null))]);
    check("a convolution of width 2", &[("linear_attn_config.short_conv_kernel_size", json!(2))]);
    check("heads of an odd width", &[("linear_attn_config.head_dim", json!(13))]);
}

#[test]
fn options_of_full_attention() {
    check("no query rank", &[("q_lora_rank", json!(null))]);
    check("no output gate", &[("mla_use_output_gate", json!(false))]);
    let heads = [("num_attention_heads", json!(19)), ("num_key_value_heads", json!(19))];
    check("more heads than a group", &heads);
}

#[test]
fn options_of_experts() {
    check("groups", &[("num_expert_group", json!(4)), ("topk_group", json!(2))]);
    check("weights as they are", &[("moe_renormalize", json!(false)), ("routed_scaling_factor", json!(1.7))]);
    check("no norm of the sum", &[("latent_moe_use_norm", json!(false))]);
    check("no latent width", &[("routed_expert_hidden_size", json!(null))]);
    check("three dense layers", &[("first_k_dense_replace", json!(3))]);
    check("every other layer dense", &[("moe_layer_freq", json!(2))]);
    check("one expert a token", &[("num_experts_per_token", json!(1))]);
    check("one shared expert", &[("num_shared_experts", json!(1))]);
}

#[test]
fn options_of_the_residual_stream() {
    check("plain residual network", &[("attn_res_block_size", json!(null))]);
    check("a block for every layer", &[("attn_res_block_size", json!(1))]);
    check("one block", &[("attn_res_block_size", json!(100))]);
    check("a large eps", &[("rms_norm_eps", json!(0.01))]);
}
