//! `k3 pack`: the trunk of a checkpoint as one file, coded and in order of execution.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use k3_kernel::Kernels;
use k3_pipeline::store::pack::PackError;
use k3_pipeline::store::{PackOptions, PackSummary, pack_trunk, verify_pack};
use serde::Serialize;

use crate::engine_args::PlanArgs;
use crate::failure::{Failure, Outcome};
use crate::progress::Bar;
use crate::{interrupt, output};

/// Arguments of `k3 pack`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  k3 pack --preset laptop --model ~/Kimi-K3 --out ~/trunk.k3pack
  k3 pack --preset laptop --model ~/Kimi-K3 --out ~/trunk.k3pack --verify
  k3 generate --preset laptop --model ~/Kimi-K3 --set trunk.pack=trunk.k3pack 'Hello'

The pack is lossless: the output has the same bits. Until it is whole it is OUT.partial, beside
OUT.journal: the same command goes on where an interrupted one was. --verify ends with exit code
3 where the pack is damaged or belongs to other weights.")]
pub(crate) struct Args {
    /// The block size is that of the preset: pack with the preset that will use the pack.
    #[command(flatten)]
    what: PlanArgs,
    /// The pack to write. A run that was interrupted goes on where it was.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Write nothing: read the whole pack and compare every checksum.
    #[arg(long)]
    verify: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub(crate) fn run(args: &Args) -> Outcome {
    if !args.verify {
        drop(output::place("--out", &args.out)?);
    }
    let planned = args.what.plan_unpacked()?;
    let options =
        PackOptions { block_bytes: planned.plan.trunk.block_bytes, reader: planned.plan.reader.clone() };
    let model = (&planned.config, &planned.tensors);
    let what = if args.verify { "verifying" } else { "packing" };
    interrupt::end_at_once()?;
    let bar = Bar::bytes(what);
    let mut progress = |done: u64, total: u64| bar.show(done, total);
    if args.verify {
        let verdict = verify_pack(model, &options, &args.out, &mut progress);
        drop(bar);
        verdict.map_err(not_verified)?;
        return verified(args);
    }
    let packed = pack_trunk(model, &options, Kernels::detect(), &args.out, &mut progress);
    drop(bar);
    let summary = packed?;
    if args.json {
        return output::print_json(&summary);
    }
    let mut out = output::stdout();
    print(&mut out, args, &summary)?;
    out.flush()?;
    Ok(())
}

#[derive(Serialize)]
struct Verified<'a> {
    pack: &'a Path,
    intact: bool,
}

fn verified(args: &Args) -> Outcome {
    if args.json {
        return output::print_json(&Verified { pack: &args.out, intact: true });
    }
    let mut out = output::stdout();
    writeln!(out, "{}: every block is as it was packed", args.out.display())?;
    out.flush()?;
    Ok(())
}

fn print(out: &mut impl Write, args: &Args, s: &PackSummary) -> io::Result<()> {
    let share = 100.0 * s.packed_bytes as f64 / (s.stored_bytes as f64).max(1.0);
    writeln!(
        out,
        "{}: {} blocks, {} coded, {} of {} ({share:.1} %)",
        args.out.display(),
        s.blocks,
        s.coded,
        output::size(s.packed_bytes),
        output::size(s.stored_bytes)
    )?;
    if s.resumed > 0 {
        writeln!(out, "{} blocks were there from an earlier run", s.resumed)?;
    }
    Ok(())
}

/// A pack that is not there or no file is a slip in its name; anything else is a verdict.
fn not_verified(error: PackError) -> Failure {
    match error {
        PackError::Open { .. } | PackError::NotARegularFile { .. } => {
            Failure::refused(error).hint("--out names the pack to verify")
        }
        error => Failure::verification(error),
    }
}

/// A full disk, a place where something else lies, and one that another run writes, are refused before
/// anything is written.
impl From<PackError> for Failure {
    fn from(error: PackError) -> Self {
        match error {
            PackError::NoSpace { .. } | PackError::WouldReplace { .. } | PackError::Busy { .. } => {
                Self::refused(error)
            }
            _ => Self::run(error),
        }
    }
}
