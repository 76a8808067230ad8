//! Runs that end before they are done: output that nobody reads or that has no room, and signals.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use k3_tests::binary::{HANG_MIN, is_busy, is_soon, k3};
use serde_json::Value;

use super::generate;

/// How a run ended, and what it wrote until then.
#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
    /// From what should end it to its end.
    took: Duration,
}

fn command(args: &[String]) -> Command {
    let mut command = Command::new(k3());
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Waits for the end; a run that goes on all the same is killed, and has no exit code.
fn wait(child: &mut Child, since: Instant) -> (ExitStatus, Duration) {
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return (status, since.elapsed());
        }
        if since.elapsed() > HANG_MIN {
            // The caller sees that there is no exit code.
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn text(pipe: Option<impl Read>) -> String {
    let mut text = String::new();
    if let Some(mut pipe) = pipe {
        pipe.read_to_string(&mut text).unwrap();
    }
    text
}

/// Runs `k3` to its end with the given stdout; what it prints on stderr must fit a pipe.
fn run_into(args: &[String], stdout: Stdio) -> Ended {
    let started = Instant::now();
    let mut child = command(args).stdout(stdout).spawn().unwrap();
    drop(child.stdout.take());
    let (status, took) = wait(&mut child, started);
    Ended { code: status.code(), stdout: String::new(), stderr: text(child.stderr.take()), took }
}

fn long_run(more: &[&str]) -> Vec<String> {
    generate(&[&["--ids", "1,2,3", "--max-tokens", "1000"], more].concat())
}

/// Starts a long generation, waits for its first tokens, and sends it `signal`.
fn signalled(signal: &str) -> Ended {
    let mut child = command(&long_run(&[])).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut first = Vec::new();
    stdout.read_until(b',', &mut first).unwrap();
    let since = Instant::now();
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let mut rest = String::new();
    // Ends when the run does.
    let reader = std::thread::spawn(move || {
        stdout.read_to_string(&mut rest).unwrap();
        rest
    });
    let (status, took) = wait(&mut child, since);
    let stdout = String::from_utf8(first).unwrap() + &reader.join().unwrap();
    Ended { code: status.code(), stdout, stderr: text(child.stderr.take()), took }
}

fn assert_reported(ended: &Ended) {
    for line in ["preset demo", "memory  peak", "read    trunk"] {
        assert!(ended.stderr.contains(line), "no {line:?}: {ended:#?}");
    }
}

#[test]
fn a_signal_ends_the_run_and_the_report_still_comes() {
    for signal in ["-INT", "-TERM"] {
        let ended = signalled(signal);
        assert_eq!(ended.code, Some(1), "{ended:#?}");
        assert!(is_soon(ended.took) && !ended.stderr.contains("panicked"), "{ended:#?}");
        assert!(ended.stderr.contains("interrupted") || ended.stderr.contains("cancelled"), "{ended:#?}");
        assert_reported(&ended);
        // What was printed until then are the tokens of an undisturbed run.
        let printed: Vec<&str> = ended.stdout.trim_end().split(',').collect();
        let known = ["37", "152", "214", "177", "0", "15", "5", "5", "112", "167", "13", "37", "19", "135"];
        assert!(printed.iter().zip(known).all(|(a, b)| *a == b), "{ended:#?}");
        assert!(printed.len() < 1000, "{ended:#?}");
    }
}

#[test]
fn an_interrupted_run_says_so_in_json() {
    let mut child = command(&long_run(&["--json"])).spawn().unwrap();
    wait_until_listening(&child);
    let ended = interrupt(&mut child);
    assert_eq!(ended.code, Some(1), "{ended:#?}");
    let object: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(object["finish_reason"], "interrupted", "{ended:#?}");
    assert!(is_soon(ended.took), "{ended:#?}");
}

/// Sends SIGINT and waits for the end; `took` counts from the signal.
fn interrupt(child: &mut Child) -> Ended {
    let since = Instant::now();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let (status, took) = wait(child, since);
    let (stdout, stderr) = (text(child.stdout.take()), text(child.stderr.take()));
    Ended { code: status.code(), stdout, stderr, took }
}

/// Waits until the run takes signals: from then on it reads its prompt.
fn wait_until_listening(child: &Child) {
    let since = Instant::now();
    let threads = format!("/proc/{}/task", child.id());
    let listens = |thread: std::io::Result<std::fs::DirEntry>| {
        let name = thread.and_then(|thread| std::fs::read_to_string(thread.path().join("comm")));
        name.is_ok_and(|name| name.trim() == "ctrl-c")
    };
    while !std::fs::read_dir(&threads).is_ok_and(|mut threads| threads.any(listens)) {
        assert!(since.elapsed() < HANG_MIN, "the run takes no signals");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_signal_ends_a_slow_prompt_within_a_block() {
    let ids = vec!["7"; 200].join(",");
    // The model is read at a rate that takes a minute for the prompt, a moment for a block.
    let slow = ["--ids", &ids, "--max-tokens", "4", "--throttle", "200KB/s", "--set", "reader.depth=1"];
    let streamed = ["--set", "trunk.pinned=0", "--set", "trunk.ring_slots=1", "--set", "pass.tokens=100"];
    let mut child = command(&generate(&[&slow[..], &streamed].concat())).spawn().unwrap();
    wait_until_listening(&child);
    std::thread::sleep(Duration::from_millis(500));
    assert!(child.try_wait().unwrap().is_none(), "the prompt was not slow");
    let ended = interrupt(&mut child);
    assert_eq!(ended.code, Some(1), "{ended:#?}");
    assert!(ended.took < Duration::from_secs(2) || is_soon(ended.took) && is_busy(), "{ended:#?}");
    assert!(ended.stderr.contains("interrupted") && !ended.stderr.contains("panicked"), "{ended:#?}");
    assert!(ended.stderr.contains("read    trunk"), "{ended:#?}");
}

#[test]
fn a_reader_that_goes_away_ends_the_run_quietly() {
    let demo: Vec<String> = ["preset", "show", "demo"].map(str::to_owned).into();
    let model = k3_tests::resident::golden_model("k3-tiny-a").to_string_lossy().into_owned();
    let inspect = vec!["inspect".to_owned(), model];
    let plan: Vec<String> = ["plan", "--preset", "demo", "--json"].map(str::to_owned).into();
    for args in [demo, inspect, plan, long_run(&[])] {
        let ended = run_into(&args, Stdio::piped());
        assert_eq!(ended.code, Some(0), "{args:?}: {ended:#?}");
        for word in ["panicked", "Broken pipe", "os error", "k3: "] {
            assert!(!ended.stderr.contains(word), "{args:?}: {ended:#?}");
        }
        assert!(is_soon(ended.took), "{args:?}: {ended:#?}");
    }
}

#[test]
fn a_full_output_is_an_error() {
    let demo: Vec<String> = ["preset", "show", "demo"].map(str::to_owned).into();
    let short = generate(&["--ids", "1,2,3", "--max-tokens", "4", "--json"]);
    for args in [demo, short, long_run(&[])] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let ended = run_into(&args, full.into());
        assert_eq!(ended.code, Some(1), "{args:?}: {ended:#?}");
        let says = "k3: cannot write to standard output: No space left on device";
        assert!(ended.stderr.contains(says) && !ended.stderr.contains("panicked"), "{args:?}: {ended:#?}");
        assert!(is_soon(ended.took), "{args:?}: {ended:#?}");
    }
}

#[test]
fn logits_that_outgrow_their_place_are_an_error_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("logits.safetensors");
    let ids = vec!["7"; 40].join(",");
    let args = generate(&["--ids", &ids, "--max-tokens", "4", "--dump-logits", &path.to_string_lossy()]);
    // No file may grow beyond some kilobytes; 40 rows of 256 logits take 40.
    let script = "trap '' XFSZ; ulimit -f 16; exec \"$0\" \"$@\"";
    let output = Command::new("sh").args(["-c", script]).arg(k3()).args(&args).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(output.stdout.is_empty() && !stderr.contains("panicked"), "{stderr}");
    assert!(stderr.contains("--dump-logits: cannot write") && stderr.contains("File too large"), "{stderr}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{stderr}");
}

#[test]
fn nobody_listening_to_the_report_changes_nothing() {
    let args = generate(&["--ids", "1,2,3", "--max-tokens", "2"]);
    let mut child = command(&args).spawn().unwrap();
    drop(child.stderr.take());
    let stdout = text(child.stdout.take());
    assert_eq!((child.wait().unwrap().code(), stdout.as_str()), (Some(0), "37,152\n"));
    let mut child = command(&generate(&["--ids", "999"])).spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(2));
}
