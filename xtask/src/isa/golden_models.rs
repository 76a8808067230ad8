//! The golden models through the `k3` program of one processor: one digest of all logits per prompt.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow, bail};
use k3_golden::{Golden, sha256_hex};

use super::{Digests, Machine, command};

/// Generated after each prompt, so that decoding is met too and not only the prompt's passes.
const DECODED: &str = "6";

/// Builds `k3` for `machine` and runs every golden model that has prompts.
pub(super) fn digests(isa: &str, machine: &Machine) -> anyhow::Result<Digests> {
    let program = build(machine)?;
    let scratch = tempfile::tempdir().context("no temporary directory")?;
    let mut found = Digests::new();
    for dir in k3_golden::model_dirs()? {
        let golden = Golden::open(&dir.join("golden/golden.safetensors"))?;
        let model = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for prompt in golden.names()?.iter().filter_map(|name| name.strip_suffix(".logits_f64")) {
            let ids = golden.i32(&format!("{prompt}.ids"))?.data;
            let ids: Vec<String> = ids.iter().map(i32::to_string).collect();
            let logits = scratch.path().join("logits.safetensors");
            let mut run = machine.program(&program);
            run.args(["generate", "--preset", "demo", "--max-tokens", DECODED, "--ids", &ids.join(",")]);
            run.arg("--model").arg(&dir).arg("--dump-logits").arg(&logits).env("K3_ISA", isa);
            let output = run.stdin(Stdio::null()).output();
            let output = output.with_context(|| format!("cannot run {}", program.display()))?;
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr);
                bail!("k3 fails on {isa} with {model}, prompt {prompt}: {}", said.trim());
            }
            let bytes =
                std::fs::read(&logits).with_context(|| format!("cannot read {}", logits.display()))?;
            found.insert(format!("{model}/{prompt}"), sha256_hex(&bytes));
        }
    }
    Ok(found)
}

/// Builds `k3` and says where cargo put it.
fn build(machine: &Machine) -> anyhow::Result<PathBuf> {
    let mut cargo = command(machine, "build");
    cargo.args(["--quiet", "--locked", "-p", "k3-pipeline", "--bin", "k3", "--message-format", "json"]);
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("k3 does not build");
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let messages = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let mut programs = messages.filter_map(|message| message["executable"].as_str().map(PathBuf::from));
    programs.next_back().ok_or_else(|| anyhow!("cargo names no executable of k3"))
}

impl Machine {
    /// A program built for this machine, started as it must be here.
    fn program(&self, program: &Path) -> Command {
        match self.runner.split_first() {
            None => Command::new(program),
            Some((runner, args)) => {
                let mut command = Command::new(runner);
                command.args(args).arg(program);
                command
            }
        }
    }
}
