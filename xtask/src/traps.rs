//! `cargo xtask traps`: makes each known mistake on purpose and sees the tests fail.
//!
//! Wrong code of this kind compiles, raises no NaN and writes fluent text. For every trap the task
//! copies the sources, makes the mistake in the copy, builds it, and runs the golden tests: kernel
//! vectors and golden models; then MXFP4 with every scale, of which the golden models hold few. A mistake
//! that no test notices fails the task. Slow, and no part of the gate; a test of the gate checks that
//! each place is still there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, anyhow, bail};

use crate::{Failure, root};

/// Arguments of `cargo xtask traps`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask traps                 every trap; about half a minute each
  cargo xtask traps --only eps      those whose name contains \"eps\"
  cargo xtask traps --list")]
pub(crate) struct Args {
    /// Only traps whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Print the names and stop.
    #[arg(long)]
    list: bool,
}

/// A mistake: in `file`, `right` becomes `wrong`.
struct Trap {
    name: &'static str,
    file: &'static str,
    right: &'static str,
    wrong: &'static str,
}

const TRAPS: &[Trap] = &[
    Trap {
        name: "layer lists counted from 0",
        file: "pipeline/src/model/config_json.rs",
        right: "number.checked_sub(1).and_then(|n| attention",
        wrong: "Some(number).and_then(|n| attention",
    },
    Trap {
        name: "decay of the last heads' padding instead of per head",
        file: "pipeline/src/forward/vectors.rs",
        right: ".take(config.kda.heads)\n                        .map(|&a| exp(a))",
        wrong: ".rev()\n                        .take(config.kda.heads)\n                        .map(|&a| exp(a))",
    },
    Trap {
        name: "high nibble is the even column",
        file: "kernel/src/isa/scalar_mxfp4.rs",
        right: "[row.map(|two| TWICE[usize::from(two & 15)]), row.map(|two| TWICE[usize::from(two >> 4)])]",
        wrong: "[row.map(|two| TWICE[usize::from(two >> 4)]), row.map(|two| TWICE[usize::from(two & 15)])]",
    },
    Trap {
        name: "subnormal scales are zero",
        file: "kernel/src/mxfp4.rs",
        right: "if n < -126 { 1 << (n + 149) }",
        wrong: "if n < -126 { 0 }",
    },
    Trap {
        name: "scale byte 255 is infinity",
        file: "kernel/src/isa/avx2_mxfp4.rs",
        right: "_mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_cmpeq_epi32(bits, infinity)))",
        wrong: "_mm256_castsi256_ps(_mm256_min_epi32(bits, infinity))",
    },
    Trap {
        name: "mix of normed sources",
        file: "kernel/src/residual.rs",
        right: "sum = l.fma(l.splat(*weight), l.load_some(&v[start..start + y.len()]), sum);",
        wrong: "sum = l.fma(l.splat(*weight * inverse_rms(l, v, eps)), l.load_some(&v[start..start + y.len()]), sum);",
    },
    Trap {
        name: "snapshot before the mix",
        file: "pipeline/src/forward/mod.rs",
        right: "            self.residual.mix(walk, config, mix, self.mixed)?;\n            self.tap(tap, TapPoint::AttentionMix, Some(layer));\n            if config.starts_residual_block(layer) {\n                self.residual.snapshot();\n            }\n",
        wrong: "            if config.starts_residual_block(layer) {\n                self.residual.snapshot();\n            }\n            self.residual.mix(walk, config, mix, self.mixed)?;\n            self.tap(tap, TapPoint::AttentionMix, Some(layer));\n",
    },
    Trap {
        name: "running sum not restarted at a block",
        file: "pipeline/src/forward/residual.rs",
        right: "        self.restart = true;",
        wrong: "        self.restart = false;",
    },
    Trap {
        name: "residual block boundary off by one",
        file: "pipeline/src/model/config.rs",
        right: "layer.index().is_multiple_of(n)",
        wrong: "layer.index() % n == 1 % n",
    },
    Trap {
        name: "mean instead of sum in the length of queries and keys",
        file: "kernel/src/norm.rs",
        right: "inverse_sqrt(l, dot(l, x, x) + eps) * scale",
        wrong: "inverse_sqrt(l, dot(l, x, x) / x.len() as f32 + eps) * scale",
    },
    Trap {
        name: "no eps in the length of queries and keys",
        file: "pipeline/src/model/config.rs",
        right: "pub const KDA_L2_EPS: f32 = 1e-6;",
        wrong: "pub const KDA_L2_EPS: f32 = 0.0;",
    },
    Trap {
        name: "queries of linear attention not scaled",
        file: "pipeline/src/state/kda.rs",
        right: "KDA_L2_EPS, (d as f32).sqrt().recip());",
        wrong: "KDA_L2_EPS, 1.0);",
    },
    Trap {
        name: "lower bound as a clamp",
        file: "kernel/src/kda.rs",
        right: "Some(bound) => l.mul(l.splat(bound), sigmoid_lanes(l, l.mul(gain, z))),",
        wrong: "Some(bound) => l.max(l.splat(bound), l.neg(l.mul(gain, softplus_lanes(l, z)))),",
    },
    Trap {
        name: "output reads the state before the update",
        file: "kernel/src/kda.rs",
        right: "                o[n] = l.fma(q, s, o[n]);",
        wrong: "                o[n] = l.fma(q, l.sub(s, l.mul(k, d[n])), o[n]);",
    },
    Trap {
        name: "no sigmoid on the write strength",
        file: "pipeline/src/forward/attention_kda.rs",
        right: "        walk.tools.kernels.sigmoid(beta);\n",
        wrong: "",
    },
    Trap {
        name: "gate before the norm of the output",
        file: "pipeline/src/forward/attention_kda.rs",
        right: "kernels.rmsnorm_gated(value, self.out_norm, self.eps, gate, o.row(t));",
        wrong: "let mut gated = value.to_vec();\n                kernels.sigmoid_mul(&mut gated, gate);\n                kernels.rmsnorm(&gated, self.out_norm, self.eps, o.row(t));",
    },
    Trap {
        name: "convolution taps newest first",
        file: "kernel/src/conv.rs",
        right: "taps[k * channels + c] = *w;",
        wrong: "taps[(width - 1 - k) * channels + c] = *w;",
    },
    Trap {
        name: "rms_norm_eps in the low-rank norms",
        file: "pipeline/src/model/config.rs",
        right: "pub const MLA_LOW_RANK_EPS: f32 = 1e-6;",
        wrong: "pub const MLA_LOW_RANK_EPS: f32 = 1e-5;",
    },
    Trap {
        name: "rope columns dropped",
        file: "pipeline/src/forward/attention_mla.rs",
        right: "            to_rope.copy_from_slice(rope);",
        wrong: "            to_rope.fill(0.0 * rope[0]);",
    },
    Trap {
        name: "score scale over the nope columns only",
        file: "pipeline/src/forward/attention_mla.rs",
        right: "let scale = (c.query_width() as f32).sqrt().recip();",
        wrong: "let scale = (c.nope_dim as f32).sqrt().recip();",
    },
    Trap {
        name: "no output gate on full attention",
        file: "pipeline/src/forward/attention_mla.rs",
        right: "                kernels.sigmoid_mul(o.row(t), &gate[t * value_width..][cols]);",
        wrong: "                let _ = (kernels, o.row(t), &gate[t * value_width..][cols]);",
    },
    Trap {
        name: "biased scores combine",
        file: "kernel/src/moe.rs",
        right: "        *weight = scores[usize::from(*id)];",
        wrong: "        *weight = scores[usize::from(*id)] + bias[usize::from(*id)];",
    },
    Trap {
        name: "bias ignored in the choice",
        file: "kernel/src/moe.rs",
        right: "chosen = insert(scores[expert] + bias[expert], expert, ids, weights, chosen);",
        wrong: "chosen = insert(scores[expert], expert, ids, weights, chosen);",
    },
    Trap {
        name: "router weights not made to sum to one",
        file: "kernel/src/moe.rs",
        right: "let share = if top_k > 1 && renormalize { *weight / (sum + 1e-20) } else { *weight };",
        wrong: "let share = if top_k > 1 && renormalize && sum < 0.0 { 0.0 } else { *weight };",
    },
    Trap {
        name: "routed scaling factor dropped",
        file: "kernel/src/moe.rs",
        right: "        *weight = share * scaling;",
        wrong: "        *weight = share * scaling.signum();",
    },
    Trap {
        name: "no norm of the sum of experts",
        file: "pipeline/src/forward/feed_forward.rs",
        right: "        kernels.rmsnorm(raw, norm, config.rms_eps, sum.row(t));",
        wrong: "        sum.row(t).copy_from_slice(&raw[..norm.len()]);",
    },
    Trap {
        name: "shared experts dropped",
        file: "pipeline/src/forward/feed_forward.rs",
        right: "        walk.tools.kernels.add(shared_out, self.mixed);\n",
        wrong: "        shared_out[0] = 0.0;\n",
    },
    Trap {
        name: "no cap on the linear half of the activation",
        file: "kernel/src/act.rs",
        right: "let linear = l.mul(linear_beta, tanh_lanes(l, l.div(up, linear_beta)));",
        wrong: "let linear = l.mul(linear_beta, l.div(up, linear_beta));",
    },
    Trap {
        name: "no cap on the gated half of the activation",
        file: "kernel/src/act.rs",
        right: "let capped = l.mul(beta, tanh_lanes(l, l.div(gate, beta)));",
        wrong: "let capped = l.mul(beta, l.div(gate, beta));",
    },
];

/// The tests that must notice.
const TESTS: &[&[&str]] = &[
    &["test", "--quiet", "-p", "k3-kernel", "--test", "kernels", "golden"],
    &["test", "--quiet", "-p", "k3-tests", "--test", "k3", "released"],
    &["test", "--quiet", "-p", "k3-kernel", "--lib", "mxfp4"],
];

/// Runs the traps; fails when one goes unnoticed.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let chosen: Vec<&Trap> =
        TRAPS.iter().filter(|trap| args.only.as_ref().is_none_or(|only| trap.name.contains(only))).collect();
    if args.list {
        chosen.iter().for_each(|trap| println!("{}", trap.name));
        return Ok(());
    }
    let copy = root().join("target/traps/source");
    let (started, mut missed) = (Instant::now(), Vec::new());
    copy_sources(&copy)?;
    if !noticed(&copy, None)?.is_empty() {
        return Err(anyhow!("the tests fail without any mistake: mend them first").into());
    }
    for (done, trap) in chosen.iter().enumerate() {
        let by = noticed(&copy, Some(trap)).with_context(|| format!("trap \"{}\"", trap.name))?;
        let verdict = if by.is_empty() { "NOT NOTICED".to_owned() } else { format!("noticed by {by}") };
        println!("{:<55} {verdict}", trap.name);
        if by.is_empty() {
            missed.push(trap.name);
        }
        let left = chosen.len() - done - 1;
        let each = started.elapsed().as_secs_f64() / (done + 1) as f64;
        eprintln!("traps: {left} to go, about {:.0} s", each * left as f64);
    }
    if missed.is_empty() {
        println!("traps: {} mistakes made, {} noticed", chosen.len(), chosen.len());
        return Ok(());
    }
    Err(Failure::Verification(anyhow!("mistakes that no test notices: {}", missed.join(", "))))
}

/// Makes the mistake, runs the tests, undoes it. Names the tests that failed.
fn noticed(copy: &Path, trap: Option<&Trap>) -> anyhow::Result<String> {
    let undo = trap.map(|trap| make(copy, trap)).transpose()?;
    let mut by = Vec::new();
    for test in TESTS {
        let package = test[3];
        if !cargo(copy, &[test, &["--no-run"][..]].concat())? {
            bail!("the mistake does not compile in {package}");
        }
        if !cargo(copy, test)? {
            by.push(package);
            break;
        }
    }
    if let Some((file, text)) = undo {
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(by.join(", "))
}

/// Writes the mistake into the copy; gives the file and its right text.
fn make(copy: &Path, trap: &Trap) -> anyhow::Result<(PathBuf, String)> {
    let file = copy.join(trap.file);
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    if text.matches(trap.right).count() != 1 {
        bail!("{} no longer has this place exactly once: {}", trap.file, trap.right);
    }
    fs::write(&file, text.replace(trap.right, trap.wrong))?;
    Ok((file, text))
}

/// Runs cargo in the copy, silently; true when it succeeded.
fn cargo(copy: &Path, args: &[&str]) -> anyhow::Result<bool> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(args)
        .env("CARGO_TARGET_DIR", copy.join("../build"))
        .env("RUSTFLAGS", "-A warnings")
        .current_dir(copy)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .context("cannot start cargo")?;
    Ok(status.success())
}

/// Copies every file that git tracks.
fn copy_sources(copy: &Path) -> anyhow::Result<()> {
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output();
    let listed = listed.context("cannot start git")?;
    if !listed.status.success() {
        bail!("`git ls-files` failed: {}", String::from_utf8_lossy(&listed.stderr));
    }
    for name in String::from_utf8(listed.stdout)?.split_terminator('\0') {
        let (from, to) = (root().join(name), copy.join(name));
        let bytes = fs::read(&from).with_context(|| format!("cannot read {}", from.display()))?;
        // An unchanged file keeps its date, so that a second run builds little.
        if fs::read(&to).is_ok_and(|old| old == bytes) {
            continue;
        }
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(&to, bytes).with_context(|| format!("cannot write {}", to.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_is_there_once() {
        for trap in TRAPS {
            let text = fs::read_to_string(root().join(trap.file)).unwrap();
            assert_eq!(text.matches(trap.right).count(), 1, "{}: {}", trap.name, trap.file);
            assert_ne!(trap.right, trap.wrong, "{}", trap.name);
        }
    }
}
