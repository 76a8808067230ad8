//! Every instruction set that can be run here: the kernels' tests, one digest of each kernel's results, and
//! one digest of the logits of each golden model's prompts. The digests must be the same everywhere.
//!
//! 64-bit ARM runs under emulation. It needs a Rust standard library for `aarch64-unknown-linux-gnu`, a
//! linker and `qemu-aarch64`; on Debian: `dpkg --add-architecture arm64 && apt-get update && apt-get install
//! rustc-web libstd-rust-web-dev:arm64 gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user`. Where
//! something is missing the leg is reported as not run, by name.

mod golden_models;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};
use clap::Args;

use crate::{Failure, cargo};

const ARM: &str = "aarch64-unknown-linux-gnu";
const ARM_LINKER: &str = "aarch64-linux-gnu-gcc";
const ARM_RUNNER: &str = "qemu-aarch64";
const ARM_LIBRARIES: &str = "/usr/aarch64-linux-gnu";
/// Debian's compiler, whose packages bring the standard library for other architectures.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

#[derive(Args)]
pub struct Options {
    /// Fail where a leg cannot be run, instead of reporting it.
    #[arg(long)]
    require_all: bool,
    /// Compare digests only; do not run the kernels' tests.
    #[arg(long)]
    digests_only: bool,
}

/// How to build and run for one kind of processor.
struct Machine {
    /// Arguments for cargo.
    args: Vec<&'static str>,
    env: Vec<(&'static str, OsString)>,
    /// What runs a program of this machine, where it cannot run by itself.
    runner: &'static [&'static str],
}

/// One instruction set, or why it cannot be run here.
struct Leg {
    isa: &'static str,
    /// Features of the kernel crate that leave this instruction set as the fastest.
    features: &'static [&'static str],
    machine: Result<Machine, String>,
}

/// Digests by what was computed: a kernel, or a golden model's prompt.
type Digests = BTreeMap<String, String>;

pub fn run(options: &Options) -> Result<(), Failure> {
    let native = || Machine { args: Vec::new(), env: Vec::new(), runner: &[] };
    let x86 = cfg!(target_arch = "x86_64");
    let avx2 = if x86 { Ok(native()) } else { Err("this processor is not an x86-64".to_owned()) };
    let neon = if cfg!(target_arch = "aarch64") { Ok(native()) } else { emulated_arm() };
    let legs = [
        Leg { isa: "scalar", features: &[], machine: Ok(native()) },
        Leg { isa: "avx2", features: &["avx2"], machine: avx2 },
        Leg { isa: "neon", features: &["neon"], machine: neon },
    ];
    let mut found: Vec<(&str, Digests)> = Vec::new();
    let mut missing = Vec::new();
    for leg in &legs {
        let reason = match &leg.machine {
            Ok(machine) => leg_digests(leg, machine, options)?,
            Err(reason) => Err(reason.clone()),
        };
        match reason {
            Ok(digests) => found.push((leg.isa, digests)),
            Err(reason) => missing.push((leg.isa, reason)),
        }
    }
    for (isa, digests) in &found {
        let prompts = digests.keys().filter(|name| name.contains('/')).count();
        let kernels = digests.len() - prompts;
        println!("{isa:8} {}  ({kernels} kernels, {prompts} prompts of golden models)", combined(digests));
    }
    for (isa, reason) in &missing {
        println!("{isa:8} did not run: {reason}");
    }
    compare(&found)?;
    if options.require_all && !missing.is_empty() {
        return Err(anyhow!("{} of {} legs did not run", missing.len(), legs.len()).into());
    }
    Ok(())
}

/// Runs the tests and the digest program; the inner error says why the processor cannot.
fn leg_digests(leg: &Leg, machine: &Machine, options: &Options) -> Result<Result<Digests, String>, Failure> {
    let features = format!("testing,{}", leg.features.join(","));
    let crate_args = ["-p", "k3-kernel", "--locked", "--no-default-features", "--features", &features];
    if !options.digests_only {
        eprintln!("isa: tests on {} ...", leg.isa);
        let mut tests = command(machine, "test");
        tests.args(["--quiet"]).args(crate_args).args(["--lib", "--tests"]).stdout(Stdio::null());
        let status = tests.status().context("cannot start cargo")?;
        if !status.success() {
            return Err(Failure::Verification(anyhow!("the kernels' tests fail on {}", leg.isa)));
        }
    }
    eprintln!("isa: digests on {} ...", leg.isa);
    let mut digest = command(machine, "run");
    digest.args(["--quiet"]).args(crate_args).args(["--bin", "digest", "--", leg.isa]);
    let output = digest.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    match output.status.code() {
        Some(0) => {}
        Some(3) => return Ok(Err(format!("this processor lacks {}", leg.isa))),
        _ => return Err(anyhow!("the digest program failed on {}", leg.isa).into()),
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    let mut digests: Digests = pairs.map(|(kernel, digest)| (kernel.to_owned(), digest.to_owned())).collect();
    eprintln!("isa: golden models on {} ...", leg.isa);
    digests.extend(golden_models::digests(leg.isa, machine)?);
    Ok(Ok(digests))
}

fn command(machine: &Machine, subcommand: &str) -> Command {
    let mut command = cargo();
    command.arg(subcommand).args(&machine.args).envs(machine.env.iter().map(|(key, value)| (key, value)));
    command
}

/// All lines as one number (FNV-1a).
fn combined(digests: &Digests) -> String {
    let bytes = digests.iter().flat_map(|(kernel, digest)| kernel.bytes().chain(digest.bytes()));
    let hash = bytes
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}

/// Every leg must equal the first.
fn compare(found: &[(&str, Digests)]) -> Result<(), Failure> {
    let Some(((first, expected), rest)) = found.split_first() else { return Ok(()) };
    for (isa, digests) in rest {
        let names = expected.keys().chain(digests.keys());
        let mut differing: Vec<&str> =
            names.filter(|name| expected.get(*name) != digests.get(*name)).map(String::as_str).collect();
        differing.dedup();
        if !differing.is_empty() {
            return Err(Failure::Verification(anyhow!(
                "{isa} differs from {first} in {}",
                differing.join(", ")
            )));
        }
    }
    Ok(())
}

/// How 64-bit ARM can be run here, or what is missing.
fn emulated_arm() -> Result<Machine, String> {
    for program in [ARM_LINKER, ARM_RUNNER] {
        let probe =
            Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if !probe.is_ok_and(|status| status.success()) {
            return Err(format!("`{program}` cannot be run"));
        }
    }
    let mut env: Vec<(&'static str, OsString)> = vec![
        ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", ARM_LINKER.into()),
        ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", format!("{ARM_RUNNER} -L {ARM_LIBRARIES}").into()),
        // The emulator hangs where the dynamic loader's C library starts a thread.
        ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS", "-C target-feature=+crt-static".into()),
        // Emulation is some fifty times slower; the digests cover the breadth.
        ("PROPTEST_CASES", "4".into()),
    ];
    let mut args = vec!["--target", ARM];
    if !has_std("rustc") {
        if !has_std(DEBIAN_RUSTC) {
            return Err(format!("no compiler has a standard library for {ARM}"));
        }
        // Not the pinned compiler: its own directory, so that neither rebuilds the other's work.
        args.extend(["--ignore-rust-version", "--target-dir", "target/isa"]);
        env.push(("RUSTC", DEBIAN_RUSTC.into()));
    }
    Ok(Machine { args, env, runner: &[ARM_RUNNER, "-L", ARM_LIBRARIES] })
}

/// Whether a compiler has the standard library for ARM.
fn has_std(rustc: &str) -> bool {
    let output = Command::new(rustc)
        .args(["--print", "target-libdir", "--target", ARM])
        .current_dir(crate::root())
        .stderr(Stdio::null())
        .output();
    let Ok(output) = output else { return false };
    let dir = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let holds_core = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with("libcore-");
    std::fs::read_dir(Path::new(&dir)).is_ok_and(|entries| entries.flatten().any(holds_core))
}
