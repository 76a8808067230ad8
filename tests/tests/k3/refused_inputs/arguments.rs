//! Prompts, counts, sizes and choices that make no sense.

use k3_golden::golden_dir;
use k3_tests::resident::golden_model;

use super::{Case, generating};

/// Every case.
pub fn cases() -> Vec<Case> {
    let mut all = ids();
    all.extend(counts());
    all.extend(sizes());
    all.extend(sampling());
    all.extend(commands());
    all
}

fn ids() -> Vec<Case> {
    let table: &[(&str, &str, &str)] = &[
        ("id -1", "-1", "\"-1\", which is not a token id"),
        ("id of the vocabulary's size", "3,256", "256 is not in the vocabulary of 256"),
        ("id 4294967295", "4294967295", "4294967295 is not in the vocabulary"),
        ("id 2^32 + 1, which wraps to 1", "4294967297", "\"4294967297\", which is not a token id"),
        ("id of 40 digits", "1234567890123456789012345678901234567890", "not a token id"),
        ("a fraction among ids", "1.5,2", "entry 1 is \"1.5\""),
        ("words among ids", "1 2 x", "entry 1 is \"1 2 x\""),
        ("spaces between ids", "1 2 3", "\"1 2 3\", which is not a token id"),
        ("an id missing in the middle", "1,,2", "entry 2 is \"\""),
        ("a comma at the end of the ids", "1,2,", "entry 3 is \"\""),
        ("hexadecimal id", "0x10", "\"0x10\""),
        ("id with a sign", "+1", "\"+1\""),
        ("digits of another script", "１２", "not a token id"),
        ("no ids", "", "the prompt is empty"),
        ("blank ids", "  ", "the prompt is empty"),
        ("ids nan", "nan", "\"nan\""),
    ];
    let mut all: Vec<Case> = table
        .iter()
        .map(|(name, ids, says)| generating(name, &["--ids", ids, "--max-tokens", "4"], 2, &[says]))
        .collect();
    let long = vec!["7"; 40_000].join(",");
    let says = ["38976 tokens too long", "40000 tokens", "the context holds 1024", "raise `context.tokens`"];
    all.push(generating("40,000 ids over a context of 1,024", &["--ids", &long], 2, &says));
    let full = vec!["7"; 1_025].join(",");
    all.push(generating("one id over the context", &["--ids", &full], 2, &["1025", "1024"]));
    let text = ["--prompt", "hello"];
    all.push(generating("a text without a tokenizer", &text, 2, &["has no tokenizer", "--ids"]));
    all.push(generating("no prompt", &[], 2, &["required", "PROMPT", "--ids"]));
    let both = ["--ids", "1", "--prompt", "x"];
    all.push(generating("two prompts", &both, 2, &["--ids", "cannot be used with", "--prompt"]));
    all
}

fn counts() -> Vec<Case> {
    let table: &[(&str, &str)] = &[
        ("0", "must be 1 to"),
        ("-1", "whole number"),
        ("abc", "whole number"),
        ("1e8", "whole number"),
        ("100000000", "must be 1 to"),
        ("1.5", "whole number"),
        ("", "--max-tokens"),
        ("18446744073709551617", "whole number"),
        ("1025", "1025 more do not fit in a context of 1024"),
    ];
    let mut all: Vec<Case> = table
        .iter()
        .map(|(value, says)| {
            let args = ["--ids", "1,2,3", "--max-tokens", value];
            generating(&format!("--max-tokens {value:?}"), &args, 2, &[says])
        })
        .collect();
    let keys: &[(&str, &[&str])] = &[
        ("context.tokens", &["0", "-1", "nan", "1e8", "99999999999"]),
        ("pass.tokens", &["0", "-1", "100000"]),
        ("trunk.ring_slots", &["0", "-1", "abc", "1e30"]),
        ("experts.staging_slots", &["0", "1.5"]),
        ("reader.depth", &["0", "-3"]),
        ("compute.threads", &["0", "-1", "1000000", "all"]),
    ];
    for (key, values) in keys {
        for value in *values {
            let set = format!("{key}={value}");
            let says = format!("--set {set}: {key} cannot be {value}; allowed: ");
            all.push(generating(&set, &["--ids", "1", "--set", &set], 2, &[&says]));
        }
    }
    all
}

fn sizes() -> Vec<Case> {
    let mut all = Vec::new();
    for value in ["-1", "nan", "abc", "0", "-8 GB", "1e30", "8", "8 parsecs", "99999999999 TB", "inf GB"] {
        let says = format!("memory.budget cannot be {value}");
        let args = ["--ids", "1", "--memory", value];
        all.push(generating(&format!("--memory {value:?}"), &args, 2, &[&says, "allowed: "]));
    }
    for key in ["trunk.block", "experts.cache"] {
        for value in ["-1", "nan", "abc", "12 XB", "9999999 TB"] {
            let set = format!("{key}={value}");
            let says = format!("{key} cannot be {value}");
            all.push(generating(&set, &["--ids", "1", "--set", &set], 2, &[&says, "allowed: "]));
        }
    }
    let short = ["preset \"demo\" needs at least", "the budget is 1.00 MB", "short", "built-in preset"];
    all.push(generating("--memory 1MB", &["--ids", "1", "--memory", "1MB"], 2, &short));
    let dimensions = golden_dir().join("k3-dimensions.json");
    let dimensions = dimensions.to_string_lossy();
    let plan = ["plan", "--preset", "laptop", "--config", &dimensions, "--memory", "4GB"];
    let says = ["preset \"laptop\"", "the budget is 4.00 GB", "short", "--preset pocket"];
    all.push(Case::new("the release in a budget too small for laptop", &plan, 2, &says));
    for rate in ["-1", "nan", "fast", "0B/s", "3 GB"] {
        let args = ["plan", "--preset", "laptop", "--config", &dimensions, "--disk", rate];
        all.push(Case::new(&format!("--disk {rate:?}"), &args, 2, &["--disk", rate]));
    }
    all
}

fn sampling() -> Vec<Case> {
    let table: &[(&str, &str, &str)] = &[
        ("--temperature", "-1", "temperature"),
        ("--temperature", "nan", "temperature"),
        ("--temperature", "warm", "--temperature"),
        ("--top-p", "1.5", "top_p"),
        ("--top-p", "nan", "top_p"),
        ("--min-p", "-0.5", "min_p"),
        ("--top-k", "1.5", "--top-k"),
        ("--repetition-penalty", "0", "repetition_penalty"),
        ("--presence-penalty", "inf", "presence_penalty"),
        ("--logit-bias", "7", "expected ID=BIAS"),
        ("--logit-bias", "256=1", "logit_bias names token 256"),
        ("--logit-bias", "1=nan", "logit_bias is NaN"),
        ("--top-k", "-1", "-1"),
        ("--throttle", "0B/s", "--throttle"),
        ("--trace", "", "--trace"),
        ("--seed", "1.5", "--seed"),
        ("--seed", "-1", "expected a whole number from 0 to 18446744073709551615"),
        ("--draft", "magic", "--draft"),
        ("--stop-id", "256", "256 is not in the vocabulary"),
        ("--stop", "end", "has no tokenizer"),
    ];
    let case = |(option, value, says): &(&str, &str, &str)| {
        generating(&format!("{option} {value}"), &["--ids", "1", option, value], 2, &[says])
    };
    table.iter().map(case).collect()
}

fn commands() -> Vec<Case> {
    let demo = golden_dir().join("demo");
    let demo = demo.to_string_lossy();
    let tiny = golden_model("k3-tiny-a");
    let tiny = tiny.to_string_lossy();
    vec![
        Case::new("no subcommand", &[], 2, &["Usage"]),
        Case::new("an unknown subcommand", &["genrate"], 2, &["'genrate'", "generate"]),
        generating("an unknown option", &["--ids", "1", "--max-token", "3"], 2, &["'--max-token' found"]),
        generating("an unknown option, not taken for a prompt", &["--greedy"], 2, &["'--greedy' found"]),
        generating("--ids without a value", &["--ids"], 2, &["--ids"]),
        Case::new(
            "no model",
            &["generate", "--preset", "laptop", "--ids", "1"],
            2,
            &["names no model", "--model DIR"],
        ),
        Case::new("plan without a model", &["plan", "--preset", "laptop"], 2, &["--config FILE"]),
        Case::new(
            "a tokenizer that is not there",
            &["tokenize", "--model", "/nonexistent", "--text", "x"],
            2,
            &["/nonexistent"],
        ),
        Case::new(
            "detokenize: id -1",
            &["detokenize", "--model", &demo, "--ids=-1"],
            2,
            &["\"-1\" is not a token id"],
        ),
        Case::new(
            "detokenize: no such id",
            &["detokenize", "--model", &demo, "--ids", "4294967295"],
            2,
            &["4294967295"],
        ),
        Case::new(
            "chat without a tokenizer",
            &["chat", "--preset", "demo", "--model", &tiny, "--message", "x"],
            2,
            &["k3-tiny-a/tiktoken.model"],
        ),
        Case::new("chat: no tokens", &["chat", "--message", "x", "--max-tokens", "0"], 2, &["--max-tokens"]),
        Case::new(
            "chat: more tokens than the context",
            &["chat", "--preset", "demo", "--message", "x", "--max-tokens", "1000000"],
            2,
            &["--max-tokens: 1000000 tokens do not fit in a context of", "context.tokens"],
        ),
        Case::new(
            "chat: nothing said",
            &["chat", "--message", ""],
            2,
            &["--message", "the message is empty"],
        ),
        Case::new(
            "chat: blanks said",
            &["chat", "--message", " "],
            2,
            &["--message", "the message is empty"],
        ),
        Case::new("chat: effort", &["chat", "--message", "x", "--effort", "huge"], 2, &["\"huge\"", "low"]),
        Case::new(
            "a pack without a place",
            &["pack", "--preset", "demo", "--model", &tiny, "--out", "/nonexistent/x.k3pack"],
            2,
            &["--out: cannot write /nonexistent/x.k3pack: No such file or directory (os error 2)\n"],
        ),
        Case::new(
            "a pack to verify that is not there",
            &["pack", "--preset", "demo", "--model", &tiny, "--out", "/nonexistent/x.k3pack", "--verify"],
            2,
            &["cannot open the pack /nonexistent/x.k3pack"],
        ),
        Case::new(
            "a pack at a throttle",
            &["pack", "--preset", "demo", "--out", "x", "--throttle", "1GB/s"],
            2,
            &["'--throttle' found"],
        ),
        Case::new("a pack with a trace", &["pack", "--out", "x", "--trace", "t"], 2, &["'--trace' found"]),
        generating(
            "a trace without a place",
            &["--ids", "1", "--trace", "/nonexistent/t"],
            2,
            &["--trace: cannot write /nonexistent/t"],
        ),
        generating("a trace to a folder", &["--ids", "1", "--trace", "/"], 2, &["--trace", "not a regular"]),
        Case::new(
            "a session without a place",
            &["chat", "--preset", "demo", "--message", "x", "--session", "/nonexistent/x"],
            2,
            &["--session: cannot write /nonexistent/x"],
        ),
        Case::new("completions for no shell", &["completions", "tcsh"], 2, &["tcsh", "bash", "zsh", "fish"]),
        Case::new("pages to a device", &["man", "--dir", "/dev/null"], 2, &["--dir", "/dev/null"]),
    ]
}
