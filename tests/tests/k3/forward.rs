//! The forward pass against the released code's numbers, and against itself: whatever does not belong to
//! the mathematics must not change a bit.

use k3_golden::Golden;
use k3_kernel::{Columns, Isa, Kernels};
use k3_pipeline::forward::{Commit, LogitsWanted, RunError, SequenceRun, Tap, TapPoint};
use k3_pipeline::units::LayerIndex;
use k3_tests::harness::{Model, PASS_TOKENS, Setup, argmax, compare, feed, ids};
use k3_tests::resident::{Arrival, golden_model};

const MODELS: [&str; 2] = ["k3-tiny-a", "k3-tiny-b"];

fn golden(name: &str) -> Golden {
    Golden::open(&golden_model(name).join("golden/golden.safetensors")).unwrap()
}

fn prompts(golden: &Golden) -> Vec<String> {
    let names = golden.names().unwrap();
    // `pN.ids`, but not `pN.router.ids`.
    let prompts = names.iter().filter_map(|name| name.strip_suffix(".ids"));
    prompts.filter(|name| !name.contains('.')).map(str::to_owned).collect()
}

#[test]
fn logits_and_greedy_tokens_are_those_of_the_released_code() {
    for name in MODELS {
        let (model, golden) = (Model::golden(name), golden(name));
        let mut executor = model.executor(&Setup::default());
        for prompt in prompts(&golden) {
            let tokens = ids(&golden.i32(&format!("{prompt}.ids")).unwrap().data);
            let mut state = model.state();
            let logits = feed(&mut executor, &mut state, &tokens, PASS_TOKENS).unwrap();
            let reference = golden.f64(&format!("{prompt}.logits_f64")).unwrap();
            let (rms, max) = compare(&logits, &reference.data);
            println!("{name} {prompt}: relative rms {rms:.2e}, largest difference {max:.2e}");
            assert!(rms <= 3e-5 && max <= 3e-3, "{name} {prompt}: rms {rms:e}, max {max:e}");

            let vocab = model.config.vocab;
            let mut next = argmax(&logits[logits.len() - vocab..]);
            for (i, &want) in golden.i32(&format!("{prompt}.greedy_ids")).unwrap().data.iter().enumerate() {
                assert_eq!(next as i32, want, "{name} {prompt}: greedy token {i}");
                next = argmax(&feed(&mut executor, &mut state, &ids(&[want]), 1).unwrap());
            }
        }
    }
}

#[derive(Default)]
struct Recorder {
    last: Vec<(TapPoint, Option<LayerIndex>, Vec<f32>)>,
    routers: Vec<(LayerIndex, Vec<u16>, usize)>,
}

impl Tap for Recorder {
    fn values(&mut self, point: TapPoint, layer: Option<LayerIndex>, columns: Columns<'_>) {
        self.last.push((point, layer, columns.column(columns.count - 1).to_vec()));
    }

    fn router(&mut self, layer: LayerIndex, ids: &[u16], _: &[f32], k: usize) {
        self.routers.push((layer, ids.to_vec(), k));
    }
}

#[test]
fn every_layer_and_router_agrees_with_the_released_code() {
    for name in MODELS {
        let (model, golden) = (Model::golden(name), golden(name));
        let tokens = ids(&golden.i32("p40.ids").unwrap().data);
        let (mut executor, mut state) = (model.executor(&Setup::default()), model.state());
        let mut recorder = Recorder::default();
        let run = SequenceRun {
            state: &mut state,
            tokens: &tokens,
            commit: Commit::All,
            logits: LogitsWanted::Last,
        };
        executor.pass(&mut [run], Some(&mut recorder)).unwrap();
        for (point, layer, values) in &recorder.last {
            let tensor = match point {
                TapPoint::Embedding => "embed",
                TapPoint::AttentionMix => "attn_mix",
                TapPoint::AttentionOut => "attn_out",
                TapPoint::MlpMix => "mlp_mix",
                TapPoint::MlpOut => "mlp_out",
                TapPoint::Prefix => "prefix_sum",
                TapPoint::OutputMix => "output_mix",
                TapPoint::FinalNorm => "final_norm",
            };
            let tensor = golden.f32(&format!("p40.last.{tensor}")).unwrap();
            let want = tensor.row(layer.map_or(0, LayerIndex::index));
            let want: Vec<f64> = want.iter().map(|&v| f64::from(v)).collect();
            let (rms, _) = compare(values, &want);
            assert!(rms < 3e-5, "{name} {point:?} of layer {layer:?}: relative rms {rms:e}");
        }
        let layers = golden.i32("p40.router.moe_layers").unwrap().data;
        let want = golden.i32("p40.router.ids").unwrap();
        assert_eq!(recorder.routers.len(), layers.len());
        let all = recorder.routers.iter().enumerate();
        for (i, (layer, ids, k)) in all {
            assert_eq!(layer.index() as i32, layers[i]);
            for (t, ids) in ids.chunks_exact(*k).enumerate() {
                let mut ids: Vec<i32> = ids.iter().map(|&id| i32::from(id)).collect();
                ids.sort_unstable();
                assert_eq!(ids, want.row(i * tokens.len() + t), "{name} layer {layer} token {t}");
            }
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn no_setting_changes_a_bit() {
    for name in MODELS {
        let (model, golden) = (Model::golden(name), golden(name));
        let tokens = ids(&golden.i32("p40.ids").unwrap().data);
        let run = |setup: &Setup, chunk| {
            let logits = feed(&mut model.executor(setup), &mut model.state(), &tokens, chunk).unwrap();
            bits(&logits)
        };
        let base = Setup::default();
        let want = run(&base, tokens.len());
        for chunk in [1, 7, 17, 33] {
            assert!(run(&base, chunk) == want, "{name}: chunks of {chunk}");
        }
        for threads in [1, 3, 4] {
            assert!(run(&Setup { threads, ..base }, 13) == want, "{name}: {threads} threads");
        }
        for (block_bytes, tiled) in [(1, false), (1, true), (5000, true), (1 << 30, false)] {
            let setup = Setup { block_bytes, tiled, ..base };
            assert!(run(&setup, 40) == want, "{name}: blocks of {block_bytes} bytes, tiled {tiled}");
        }
        for arrival in [Arrival::Reversed, Arrival::Rotated] {
            assert!(run(&Setup { arrival, ..base }, 40) == want, "{name}: experts {arrival:?}");
        }
        for kernels in Isa::ALL.into_iter().filter_map(Kernels::new) {
            assert!(run(&Setup { kernels, ..base }, 11) == want, "{name}: {}", kernels.isa());
        }
    }
}

#[test]
fn sequences_of_a_batch_have_the_bits_they_have_alone() {
    let model = Model::golden("k3-tiny-a");
    let golden = golden("k3-tiny-a");
    let all = ids(&golden.i32("p40.ids").unwrap().data);
    let texts = [&all[..9], &all[5..6], &all[20..40]];
    let mut executor = model.executor(&Setup::default());
    let alone: Vec<Vec<u32>> =
        texts.iter().map(|text| bits(&feed(&mut executor, &mut model.state(), text, 64).unwrap())).collect();

    let mut states = [model.state(), model.state(), model.state()];
    let mut runs: Vec<SequenceRun<'_>> = states
        .iter_mut()
        .zip(texts)
        .map(|(state, tokens)| SequenceRun { state, tokens, commit: Commit::All, logits: LogitsWanted::All })
        .collect();
    let together = bits(executor.pass(&mut runs, None).unwrap().0.data());
    assert!(together == alone.concat());
}

#[test]
fn a_draft_can_be_cut_anywhere() {
    for name in MODELS {
        let (model, golden) = (Model::golden(name), golden(name));
        let tokens = ids(&golden.i32("p40.ids").unwrap().data);
        let mut executor = model.executor(&Setup::default());
        let plain = bits(&feed(&mut executor, &mut model.state(), &tokens[..20], 64).unwrap());
        let vocab = model.config.vocab;
        for accepted in 0..=6 {
            let mut state = model.state();
            feed(&mut executor, &mut state, &tokens[..10], 64).unwrap();
            // The tokens after the accepted ones are wrong guesses.
            let mut draft = tokens[10..16].to_vec();
            draft[accepted..].iter_mut().for_each(|id| id.0 = (id.0 + 1) % vocab as u32);
            let run = SequenceRun {
                state: &mut state,
                tokens: &draft,
                commit: Commit::Deferred,
                logits: LogitsWanted::All,
            };
            let logits = bits(executor.pass(&mut [run], None).unwrap().0.data());
            let same = accepted * vocab;
            assert!(logits[..same] == plain[10 * vocab..10 * vocab + same]);
            assert!(matches!(
                feed(&mut executor, &mut state, &tokens[..1], 1),
                Err(RunError::DraftPending { tokens: 6 })
            ));
            executor.commit(&mut state, accepted).unwrap();
            assert_eq!(state.len(), 10 + accepted);
            let rest = feed(&mut executor, &mut state, &tokens[10 + accepted..20], 3).unwrap();
            assert!(bits(&rest) == plain[(10 + accepted) * vocab..], "{name}: {accepted} accepted");
        }
    }
}
