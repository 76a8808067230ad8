//! The whole gate, step by step, with the time each step took.

use std::time::Instant;

use anyhow::{Context, anyhow};

use crate::{Failure, cargo, golden, no_std, tidy};

/// One step of the gate that is a command.
struct Step {
    name: &'static str,
    args: &'static [&'static str],
    env: &'static [(&'static str, &'static str)],
}

const STEPS: &[Step] = &[
    Step { name: "format", args: &["fmt", "--all", "--check"], env: &[] },
    Step {
        name: "clippy",
        args: &["clippy", "--quiet", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"],
        env: &[],
    },
    Step {
        name: "kernel without features",
        args: &["check", "--quiet", "--locked", "-p", "k3-kernel", "--no-default-features"],
        env: &[],
    },
    Step {
        name: "tests",
        args: &["test", "--workspace", "--locked"],
        env: &[("INSTA_UPDATE", "no"), ("INSTA_FORCE_PASS", "0")],
    },
    Step {
        name: "docs",
        args: &["doc", "--quiet", "--workspace", "--no-deps", "--locked"],
        env: &[("RUSTDOCFLAGS", "-D warnings")],
    },
];

/// Runs every step; stops at the first that fails.
pub fn run() -> Result<(), Failure> {
    let started = Instant::now();
    timed("tidy", tidy::run)?;
    timed("kernel without std", no_std::run)?;
    // The tests step compares the snapshots and notes which of them there are tests for.
    let references = golden::References::begin()?;
    for step in STEPS {
        timed(step.name, || run_step(step, &references))?;
    }
    timed("golden check", || golden::check_files(&references))?;
    eprintln!("check: all green in {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

fn timed(name: &str, step: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    eprintln!("check: {name} ...");
    let started = Instant::now();
    step()?;
    eprintln!("check: {name} ok ({:.0} s)", started.elapsed().as_secs_f64());
    Ok(())
}

fn run_step(step: &Step, references: &golden::References) -> Result<(), Failure> {
    let status = cargo()
        .args(step.args)
        .envs(step.env.iter().copied())
        .env(golden::REFERENCES_ENV, references.path())
        .status()
        .with_context(|| format!("cannot start `cargo {}`", step.args.join(" ")))?;
    if !status.success() {
        return Err(anyhow!("`cargo {}` failed", step.args.join(" ")).into());
    }
    Ok(())
}
