//! `cargo xtask miri`: the scalar kernels, the arenas and the compute threads under Miri, which sees reads
//! out of bounds, use of memory that is not initialised, broken aliasing rules and data races.
//!
//! It needs a nightly toolchain: `rustup toolchain install nightly --profile minimal --component miri
//! --component rust-src`. Where there is none, that is said, and nothing ran.

use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};
use clap::Args;

use crate::{Failure, root};

/// Settings of `cargo xtask miri`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  cargo xtask miri
  cargo xtask miri --require     for CI: no nightly toolchain is a failure

A nightly toolchain with Miri is needed:
  rustup toolchain install nightly --profile minimal --component miri --component rust-src")]
pub struct Options {
    /// Fail where Miri cannot be run, instead of reporting it.
    #[arg(long)]
    require: bool,
}

/// What runs: a name, and arguments of `cargo miri test`. An interpreter is some thousand times slower than
/// a processor, so these are the tests of the code that has `unsafe` in it, or is called from there.
const SUITES: &[(&str, &[&str])] = &[
    ("scalar products", &["-p", "k3-kernel", "--lib", "--no-default-features", "--features", "testing"]),
    ("other scalar kernels", &["-p", "k3-kernel", "--test", "kernels", "--no-default-features"]),
    ("arenas and compute threads", &["-p", "k3-pipeline", "--lib", "--", "memory::", "team::"]),
];

/// Runs every suite.
pub fn run(options: &Options) -> Result<(), Failure> {
    let probe = miri().arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !probe.is_ok_and(|status| status.success()) {
        let missing =
            "`rustup run nightly cargo miri` cannot be run: there is no nightly toolchain with Miri";
        if options.require {
            return Err(anyhow!("{missing}").into());
        }
        println!("did not run: {missing}");
        return Ok(());
    }
    for (name, args) in SUITES {
        eprintln!("miri: {name} ...");
        let status = miri().args(["test", "--locked"]).args(*args).status().context("cannot start rustup")?;
        if !status.success() {
            return Err(Failure::Verification(anyhow!("Miri found a fault in the {name}, or a test failed")));
        }
        println!("{name}: clean under Miri");
    }
    Ok(())
}

/// `cargo miri` of the nightly toolchain, whatever toolchain this program was started by.
fn miri() -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo", "miri"]).current_dir(root());
    for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    // proptest reads the clock and its environment.
    command.env("MIRIFLAGS", "-Zmiri-disable-isolation").env("PROPTEST_CASES", "1");
    command
}
