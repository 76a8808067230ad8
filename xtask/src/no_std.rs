//! Proof that the kernel crate needs neither the standard library nor libc: it is linked into a program
//! that has none.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, anyhow};

use crate::{Failure, cargo, root};

/// A program without libraries that calls into the kernels. It brings the four memory functions that the
/// compiler may call anywhere, and nothing else, so any other dependence ends as an undefined symbol; a
/// standard library behind the kernels would define the panic handler twice.
const PROGRAM: &str = include_str!("../no_std/main.rs");

/// Builds and links the program.
pub fn run() -> Result<(), Failure> {
    let dir = root().join("target/no_std");
    let build = cargo()
        .args(["rustc", "--quiet", "--locked", "-p", "k3-kernel", "--lib"])
        // What is linked does not depend on it, and it builds faster.
        .args(["--config", "profile.dev.package.k3-kernel.opt-level=1"])
        .arg("--target-dir")
        .arg(&dir)
        .args(["--", "-C", "panic=abort"])
        .status()
        .context("cannot start cargo")?;
    if !build.success() {
        return Err(anyhow!("the kernel crate does not build without std").into());
    }
    let source = dir.join("program.rs");
    std::fs::write(&source, PROGRAM).with_context(|| format!("cannot write {}", source.display()))?;
    if !link_program(&dir, &source)? {
        return Err(anyhow!("the kernel crate does not link without std and libc").into());
    }
    Ok(())
}

fn link_program(dir: &Path, source: &Path) -> Result<bool, Failure> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let status = Command::new(rustc)
        .current_dir(root())
        .args([
            "--edition",
            "2024",
            "-C",
            "panic=abort",
            "-C",
            "opt-level=1",
            "-C",
            "relocation-model=static",
        ])
        .args(["-C", "link-args=-nostartfiles -nostdlib -static"])
        .arg("--extern")
        .arg(format!("k3_kernel={}", dir.join("debug/libk3_kernel.rlib").display()))
        .arg("-o")
        .arg(dir.join("program"))
        .arg(source)
        .status()
        .context("cannot start rustc")?;
    Ok(status.success())
}
