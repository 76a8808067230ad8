//! The first command: the model that comes with the source, through the real binary. Nothing here knows
//! what its weights say, so that they can be trained anew.

use k3_golden::golden_dir;
use k3_tests::binary::run;
use serde_json::Value;

const PROMPT: &str = "Shall I";

/// Output of a successful run.
fn stdout(args: &[&str]) -> String {
    let ended = run(args);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    ended.stdout
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&stdout(args)).unwrap()
}

#[test]
fn the_first_command_streams_a_model_that_is_larger_than_its_memory() {
    let plan = json(&["plan", "--preset", "demo", "--json"]);
    let line = |name: &str| {
        let lines = plan["ledger"]["lines"].as_array().unwrap();
        lines.iter().find(|l| l["name"] == name).and_then(|l| l["bytes"].as_u64()).unwrap()
    };
    let model = &plan["model"];
    assert!(line("ring") * 4 < plan["traffic"]["trunk_bytes"].as_u64().unwrap());
    assert!(line("expert arenas") * 2 < model["experts_bytes"].as_u64().unwrap());
    let held = ["pinned layers", "pinned head", "ring", "expert arenas", "expert staging"].map(line);
    let whole = ["trunk_bytes", "head_bytes", "experts_bytes"].map(|part| model[part].as_u64().unwrap());
    assert!(2 * held.iter().sum::<u64>() < whole.iter().sum(), "{plan}");

    let run = json(&["generate", "--preset", "demo", "--max-tokens", "6", "--json", PROMPT]);
    let read = |part: &str| run["stats"]["store"][part].as_u64().unwrap();
    assert!(read("trunk_bytes") > 0 && read("expert_bytes") > 0, "{run}");
    assert_eq!(run["generated_ids"].as_array().unwrap().len(), 6);
}

/// Six tokens from the demo model.
fn generate<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["generate", "--preset", "demo", "--max-tokens", "6"], more].concat()
}

#[test]
fn text_is_the_same_however_it_is_asked_for_and_held() {
    let text = stdout(&generate(&[PROMPT]));
    assert!(text.ends_with('\n') && !text.trim().is_empty(), "{text:?}");
    assert_eq!(stdout(&generate(&["--prompt", PROMPT])), text);
    let demo = golden_dir().join("demo");
    let demo = demo.to_str().unwrap();
    let ids = stdout(&["tokenize", "--model", demo, "--text", PROMPT]);
    assert_eq!(stdout(&generate(&["--ids", ids.trim()])), text);
    let resident = ["trunk.pinned=all", "trunk.head=pinned", "experts.cache=64 MiB", "compute.threads=1"];
    let resident: Vec<&str> = resident.iter().flat_map(|set| ["--set", *set]).collect();
    assert_eq!(stdout(&generate(&[&resident[..], &[PROMPT]].concat())), text);
    let report = json(&generate(&["--json", PROMPT]));
    let generated: Vec<String> =
        report["generated_ids"].as_array().unwrap().iter().map(Value::to_string).collect();
    let back = stdout(&["detokenize", "--model", demo, "--json", "--ids", &generated.join(",")]);
    let back: Value = serde_json::from_str(&back).unwrap();
    assert_eq!((&back["text"], format!("{}\n", report["text"].as_str().unwrap())), (&report["text"], text));
}

#[test]
fn the_golden_continuation_comes_out_as_text() {
    let golden = std::fs::read_to_string(golden_dir().join("demo/golden/golden.json")).unwrap();
    let golden: Value = serde_json::from_str(&golden).unwrap();
    let prompt = &golden["prompts"]["p7"];
    let ids: Vec<String> = prompt["ids"].as_array().unwrap().iter().map(Value::to_string).collect();
    let args = ["generate", "--preset", "demo", "--max-tokens", "24", "--json", "--ids", &ids.join(",")];
    let found = json(&args);
    assert_eq!(found["prompt_ids"], prompt["ids"]);
    let expected = prompt["greedy_ids"].as_array().unwrap();
    let generated = found["generated_ids"].as_array().unwrap();
    // A model that ends its message ends the run.
    assert!(expected.starts_with(generated) && !generated.is_empty(), "{found}");
    assert!(generated.len() == 24 || found["finish_reason"] == "stop", "{found}");
}
