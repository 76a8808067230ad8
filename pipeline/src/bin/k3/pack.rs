//! `k3 pack`: the trunk of a checkpoint as one file, coded and in order of execution.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::Instant;

use k3_kernel::Kernels;
use k3_pipeline::store::pack::PackError;
use k3_pipeline::store::{PackOptions, PackSummary, pack_trunk, verify_pack};

use crate::engine_args::EngineArgs;
use crate::failure::{Failure, Outcome};
use crate::output;

/// Arguments of `k3 pack`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// The block size is that of the preset: pack with the preset that will use the pack.
    #[command(flatten)]
    engine: EngineArgs,
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
    let planned = args.engine.plan_unpacked()?;
    let options =
        PackOptions { block_bytes: planned.plan.trunk.block_bytes, reader: planned.plan.reader.clone() };
    let model = (&planned.config, &planned.tensors);
    let what = if args.verify { "verifying" } else { "packing" };
    let mut line = Line { what, watched: io::stderr().is_terminal(), started: Instant::now(), first: None };
    if args.verify {
        let verified = verify_pack(model, &options, &args.out, &mut |done, total| line.show(done, total));
        line.clear();
        verified.map_err(Failure::verification)?;
        writeln!(output::stdout(), "{}: every block is as it was packed", args.out.display())?;
        return Ok(());
    }
    let kernels = Kernels::detect();
    let packed = pack_trunk(model, &options, kernels, &args.out, &mut |done, total| line.show(done, total));
    line.clear();
    let summary = packed.map_err(|e| match e {
        PackError::WouldReplace { .. } => Failure::refused(e),
        e => e.into(),
    })?;
    if args.json {
        return output::print_json(&summary);
    }
    let mut out = output::stdout();
    print(&mut out, args, &summary)?;
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

/// One line on stderr, for those who watch.
struct Line {
    what: &'static str,
    watched: bool,
    started: Instant,
    /// Bytes that were done before this run.
    first: Option<u64>,
}

impl Line {
    fn show(&mut self, done: u64, total: u64) {
        let first = *self.first.get_or_insert(done);
        if !self.watched || done == first {
            return;
        }
        let left = self.started.elapsed().as_secs_f64() / (done - first) as f64 * (total - done) as f64;
        let (done, total) = (output::size(done), output::size(total));
        // A closed stderr leaves nobody to tell.
        let _ = write!(io::stderr(), "\r{} {done} of {total}, {left:.0} s left\x1b[K", self.what);
    }

    fn clear(&self) {
        if self.watched {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// A full disk is refused before anything is written.
impl From<PackError> for Failure {
    fn from(error: PackError) -> Self {
        match error {
            PackError::NoSpace { .. } => Self::refused(error),
            _ => Self::run(error),
        }
    }
}
