//! Standard output, buffered and locked once; sizes as people read them.

use std::fs::File;
use std::io::{self, BufWriter, StdoutLock, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use k3_pipeline::temporary;
use k3_pipeline::units::Bytes;
use serde::Serialize;
use tempfile::TempPath;

use crate::failure::{Failure, Outcome};

/// Locked, buffered stdout. Flush it before the end: a full disk must not pass unseen.
pub(crate) fn stdout() -> BufWriter<StdoutLock<'static>> {
    BufWriter::with_capacity(1 << 16, io::stdout().lock())
}

/// Prints one JSON object and a line end.
pub(crate) fn print_json(value: &impl Serialize) -> Outcome {
    let mut out = stdout();
    serde_json::to_writer_pretty(&mut out, value).map_err(io::Error::from)?;
    writeln!(out)?;
    out.flush()?;
    Ok(())
}

/// "1.19 GB", "17.55 MB", "512 B".
pub(crate) fn size(bytes: u64) -> String {
    Bytes(bytes).human()
}

/// "5,491,154,944".
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Refuses to write over what is no plain file (a device, a FIFO, a directory) and over a file of a model.
/// `option` is the argument that named it.
pub(crate) fn replaceable(option: &str, path: &Path) -> Outcome {
    let refused = |why: &str| {
        Err(Failure::refused(anyhow::anyhow!("{option}: cannot write {}: {why}", path.display())))
    };
    let Some(name) = path.file_name() else { return refused("not a regular file") };
    // "x/" and "x/.", which have the same name as "x".
    if !path.as_os_str().as_bytes().ends_with(name.as_bytes()) {
        return refused("it is the name of a directory");
    }
    // Through a link as well: a trace is written to what the link leads to.
    let there = [path.symlink_metadata(), path.metadata()];
    if there.iter().flatten().any(|meta| !meta.is_file() && !meta.is_symlink()) {
        return refused("not a regular file");
    }
    let name = name.to_string_lossy();
    let index = "model.safetensors.index.json";
    let other = [index, "config.json", "tiktoken.model", "tokenizer_config.json"].contains(&&*name);
    let of_model = name.starts_with("model-") && name.ends_with(".safetensors")
        || other && path.with_file_name(index).exists();
    if of_model && there.iter().any(Result::is_ok) {
        return refused("it is a file of a model; choose another place");
    }
    Ok(())
}

/// Refuses two arguments that lead to one file: what the one writes would be lost to the other.
pub(crate) fn distinct(files: &[(&str, Option<&Path>)]) -> Outcome {
    let given: Vec<(&str, &Path, PathBuf)> =
        files.iter().filter_map(|(option, path)| Some((*option, (*path)?, resolved((*path)?)))).collect();
    for (at, (option, path, place)) in given.iter().enumerate() {
        if let Some((other, ..)) = given[..at].iter().find(|(.., taken)| taken == place) {
            return Err(Failure::refused(anyhow::anyhow!(
                "{other} and {option} both name {}; give each a file of its own",
                path.display()
            )));
        }
    }
    Ok(())
}

/// One spelling for one place, whether a file is there or not.
fn resolved(path: &Path) -> PathBuf {
    let in_its_directory =
        || Some(temporary::directory_of(path).canonicalize().ok()?.join(path.file_name()?));
    path.canonicalize().ok().or_else(in_its_directory).unwrap_or_else(|| path.to_owned())
}

/// A file beside the one at `path`, which will replace it once it is whole; refuses a place that cannot
/// be written, before anything is done. `option` is the argument that named it.
pub(crate) fn place(option: &str, path: &Path) -> Result<(File, TempPath), Failure> {
    replaceable(option, path)?;
    temporary::beside(path, 0o600).map_err(|error| {
        Failure::refused(
            anyhow::Error::new(error).context(format!("{option}: cannot write {}", path.display())),
        )
    })
}

/// What to do with a file that is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Existing {
    /// Refuse.
    Keep,
    /// Replace it.
    Replace,
}

/// Writes a whole file atomically: it is there complete, or not at all.
pub(crate) fn write_file(path: &Path, bytes: &[u8], existing: Existing) -> Outcome {
    let cannot =
        |error: io::Error| anyhow::Error::new(error).context(format!("cannot write {}", path.display()));
    let failed = |error| Failure::run(cannot(error));
    // The mode that a plain creation asks for.
    let (mut file, temporary) =
        temporary::beside(path, 0o666).map_err(|error| Failure::refused(cannot(error)))?;
    file.write_all(bytes).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    let placed = match existing {
        Existing::Keep => temporary.persist_noclobber(path),
        Existing::Replace => temporary.persist(path),
    };
    match placed {
        Ok(()) => Ok(()),
        Err(e) if e.error.kind() == io::ErrorKind::AlreadyExists => {
            Err(Failure::refused(anyhow::anyhow!("{} exists already", path.display()))
                .hint("choose another name, or replace it with --force"))
        }
        Err(e) => Err(failed(e.error)),
    }
}
