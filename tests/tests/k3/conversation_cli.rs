//! Tokens to text and back, conversations and sampling through the real binary.

use std::io::Write;
use std::process::{Command, Stdio};

use k3_tests::binary::{assert_refused, k3, run};
use serde_json::{Value, json};

use crate::conversation::{RESIDENT, model};

fn arguments<'a>(command: &'a str, dir: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = vec![command, "--model", dir];
    if matches!(command, "chat" | "generate") {
        arguments.extend(["--preset", "demo"]);
        arguments.extend(RESIDENT.iter().flat_map(|set| ["--set", *set]));
    }
    arguments.extend(more);
    arguments
}

fn json_of(args: &[&str]) -> Value {
    let ended = run(args);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    serde_json::from_str(&ended.stdout).unwrap()
}

#[test]
fn the_binary_tokenizes_and_back() {
    let model = model(true);
    // Nothing but the tokenizer's files is read.
    std::fs::remove_file(model.file("config.json")).unwrap();
    let dir = model.path().to_str().unwrap();
    let ended = run(&arguments("tokenize", dir, &["--text", "<|open|>é ba"]));
    assert_eq!(
        (ended.code, ended.stdout.as_str()),
        (Some(0), "60,124,111,112,101,110,124,62,195,169,32,257\n")
    );
    let special = json_of(&arguments("tokenize", dir, &["--special", "--json", "--text", "<|open|>é"]));
    assert_eq!(special, json!({"count": 3, "ids": [307, 195, 169]}));
    let back = run(&arguments("detokenize", dir, &["--ids", "307,195,169, 257"]));
    assert_eq!((back.code, back.stdout.as_str()), (Some(0), "<|open|>éba"));
    let lossy = json_of(&arguments("detokenize", dir, &["--json", "--ids", "195"]));
    assert_eq!(lossy, json!({"count": 1, "text": "\u{fffd}"}));
    let none = run(&arguments("detokenize", dir, &["--file", "/dev/stdin"]));
    assert_eq!(none.code, Some(2), "a file is a regular file: {none:#?}");
    let none = run(&arguments("detokenize", dir, &[]));
    assert_eq!((none.code, none.stdout.as_str()), (Some(0), ""), "nothing in, nothing out");
    assert_refused("none", &arguments("detokenize", dir, &["--ids", ""]), 2, &["--ids: no token ids"]);
    assert_refused("id", &arguments("detokenize", dir, &["--ids", "320"]), 2, &["token id 320", "0 to 319"]);
    assert_refused("word", &arguments("detokenize", dir, &["--ids", "1,x"]), 2, &["\"x\" is not a token id"]);
    assert_refused(
        "dir",
        &arguments("tokenize", "/nowhere", &["--text", "x"]),
        2,
        &["/nowhere/tiktoken.model"],
    );
    model.edit_text("tiktoken.model", |text| text.replacen("AQ== 1\n", "AQ== 2\n", 1));
    assert_refused("rank", &arguments("tokenize", dir, &["--text", "x"]), 2, &["tiktoken.model:3", "rank 2"]);
}

#[test]
fn the_binary_chats_and_samples() {
    let model = model(true);
    let dir = model.path().to_str().unwrap();
    let file = model.file("talk.k3s");
    let file = file.to_str().unwrap();
    let chat = |more: &[&str]| {
        let common = ["--message", "hi", "--max-tokens", "8", "--json"];
        let mut report = json_of(&arguments("chat", dir, &[&common, more].concat()));
        report["stats"].take();
        report
    };
    let first = chat(&["--seed", "3"]);
    assert_eq!(chat(&["--seed", "3", "--draft", "lookup"]), first);
    assert_ne!(chat(&["--seed", "4"]), first);
    assert_eq!(chat(&["--seed", "3", "--session", file])["response"], first["response"]);
    let second = chat(&["--session", file]);
    // The first turn is not read again.
    assert!(second["prompt_tokens"].as_u64() < Some(150), "{second}");

    let sample = ["--ids", "1,2,3", "--max-tokens", "12", "--json"];
    let generate = |more: &[&str]| {
        let mut report = json_of(&arguments("generate", dir, &[&sample, more].concat()));
        report["stats"].take();
        report
    };
    let warm = generate(&["--temperature", "0.8", "--seed", "1", "--logprobs", "2"]);
    assert_eq!(warm["logprobs"].as_array().unwrap().len(), warm["generated_ids"].as_array().unwrap().len());
    assert_eq!(warm["logprobs"][0]["top"].as_array().unwrap().len(), 2);
    let drafted = ["--temperature", "0.8", "--seed", "1", "--logprobs", "2", "--draft", "lookup"];
    assert_eq!(generate(&drafted), warm);
    let fourth = warm["generated_ids"][3].to_string();
    let stopped = generate(&["--temperature", "0.8", "--seed", "1", "--stop-id", &fourth]);
    assert_eq!(stopped["finish_reason"], "stop");
    assert!(stopped["generated_ids"].as_array().unwrap().len() <= 4);

    let refused = |case, more: &[&str], says| {
        assert_refused(case, &arguments("generate", dir, &[&sample[..4], more].concat()), 2, &[says]);
    };
    refused("top-p", &["--top-p", "1.5"], "top_p is 1.5");
    refused("temperature", &["--temperature", "-1"], "temperature is -1");
    refused("bias", &["--logit-bias", "320=1"], "token 320");
    refused("stop", &["--stop", ""], "stop string 1 is empty");
    refused("stop id", &["--stop-id", "320"], "--stop-id 320");
    assert_refused("effort", &arguments("chat", dir, &["--effort", "medium"]), 2, &["low, high or max"]);
    std::fs::write(file, "no session").unwrap();
    let bad = arguments("chat", dir, &["--message", "x", "--session", file]);
    assert_refused("session", &bad, 2, &["not a session file"]);
}

#[test]
fn sessions_of_chat_and_generate_are_told_apart() {
    let model = model(true);
    let dir = model.path().to_str().unwrap();
    let (talk, text) = (model.file("talk.k3s"), model.file("text.k3s"));
    let (talk, text) = (talk.to_str().unwrap(), text.to_str().unwrap());
    let chat = ["--message", "hi", "--max-tokens", "4", "--session"];
    let generate = ["--ids", "1,2", "--max-tokens", "4", "--session"];
    json_of(&arguments("chat", dir, &[&chat[..], &[talk, "--json"]].concat()));
    json_of(&arguments("generate", dir, &[&generate[..], &[text, "--json"]].concat()));
    let says = [text, "not the session of a conversation", "k3 generate --session"];
    assert_refused("text", &arguments("chat", dir, &[&chat[..], &[text]].concat()), 2, &says);
    let says = [talk, "not saved by `k3 generate`", "k3 chat --session"];
    assert_refused("talk", &arguments("generate", dir, &[&generate[..], &[talk]].concat()), 2, &says);
}

#[test]
fn what_cannot_be_done_is_said_and_the_conversation_goes_on() {
    let model = model(true);
    let args = arguments("chat", model.path().to_str().unwrap(), &["--session", "/dev/null"]);
    assert_refused("a device", &args, 2, &["--session", "not a regular file"]);
    let mut child = Command::new(k3())
        .args(&args[..args.len() - 2])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let long = format!("{}\n", "word ".repeat(1100));
    let lines = ["/set max-tokens 99999\n", "/sing\n", &long, "/exit\n"].concat();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    for says in [
        "99999 tokens do not fit in a context of 1024\n  hint: raise `context.tokens`",
        "/sing is no command",
        "too many for a context of 1024; shorten the text or raise `context.tokens`",
    ] {
        assert!(stderr.contains(says), "{says}: {stderr}");
    }
}

#[test]
fn quiet_is_quiet() {
    let model = model(true);
    let dir = model.path().to_str().unwrap();
    let file = model.file("talk.k3s");
    let chat = ["--message", "hi", "--max-tokens", "3", "--session", file.to_str().unwrap()];
    let talk = |more: &[&str]| {
        let ended = run(&arguments("chat", dir, &[&chat, more].concat()));
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        ended.stderr
    };
    talk(&[]);
    let loud = talk(&[]);
    assert!(loud.contains("Resumed") && loud.contains("[as many tokens as allowed]"), "{loud}");
    assert_eq!(talk(&["--quiet"]), "");
}
