//! Synthetic checkpoints on disk: made once and used again while they are the same.

pub mod content;
mod weights;

use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};
use k3_pipeline::model::config_json::parse_config;
use k3_pipeline::model::synth::{SynthError, SynthSummary, released_layout, write_checkpoint};
use k3_pipeline::units::Bytes;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::progress::Progress;
use content::{CONTENT_VERSION, Content, Rows, SEED};

const MANIFEST_FILE: &str = "synthetic.json";
/// Header and index text of one tensor.
const TEXT_BYTES_PER_TENSOR: u64 = 300;
/// Left free on the disk beside the checkpoint.
const DISK_HEAD_ROOM: u64 = 1 << 30;

/// Says what a directory was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Manifest {
    content_version: u32,
    seed: u64,
    config_xxh3: u64,
    files: usize,
    tensors: usize,
    tensor_bytes: u64,
    value_bytes: u64,
}

impl Manifest {
    fn new(config_text: &str, summary: &SynthSummary, value_bytes: u64) -> Self {
        Self {
            content_version: CONTENT_VERSION,
            seed: SEED,
            config_xxh3: xxh3_64(config_text.as_bytes()),
            files: summary.files,
            tensors: summary.tensors,
            tensor_bytes: summary.tensor_bytes,
            value_bytes,
        }
    }
}

/// Makes a checkpoint of this configuration with values in `rows` in `dir`, or finds it there.
///
/// # Errors
/// No room on the disk, a directory with other things in it, a failed write, `stop`.
pub fn prepare(dir: &Path, config_text: &str, rows: Rows, stop: &AtomicBool) -> anyhow::Result<()> {
    let config = parse_config(Path::new("config.json"), config_text)?;
    let layout = released_layout(&config);
    let tensors = || layout.iter().flat_map(|f| &f.tensors);
    let summary = SynthSummary {
        files: layout.len(),
        tensors: tensors().count(),
        tensor_bytes: tensors().map(|t| t.bytes()).sum(),
    };
    let values: u64 = tensors().map(|t| content::value_bytes(t, rows)).sum();
    let manifest = Manifest::new(config_text, &summary, values);
    let manifest_path = dir.join(MANIFEST_FILE);
    let at = || format!("cannot write {}", dir.display());
    match fs::read_to_string(&manifest_path) {
        Ok(text) if serde_json::from_str::<Manifest>(&text).is_ok_and(|m| m == manifest) => {
            eprintln!("checkpoint {}: used again", dir.display());
            return Ok(());
        }
        Ok(_) => eprintln!("checkpoint {}: made by another version, made anew", dir.display()),
        Err(_) => refuse_foreign(dir)?,
    }
    fs::create_dir_all(dir).with_context(at)?;
    let needed = tensors().map(|t| content::disk_bytes(t, rows)).sum::<u64>()
        + TEXT_BYTES_PER_TENSOR * summary.tensors as u64;
    check_disk(dir, needed)?;
    eprintln!(
        "checkpoint {}: {} of tensors in {} files; takes up to {} of disk",
        dir.display(),
        Bytes(summary.tensor_bytes).human(),
        summary.files,
        Bytes(needed).human()
    );
    // A half-made checkpoint must not pass for one.
    match fs::remove_file(&manifest_path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e).with_context(at),
        _ => {}
    }
    let mut progress = Progress::new("writing", values);
    let mut show = |done| {
        progress.show(done);
        if stop.load(Ordering::SeqCst) { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    };
    let made = write_checkpoint(dir, config_text, &mut Content::new(rows, &mut show));
    progress.finish();
    match made {
        Err(SynthError::Write { source, .. }) if source.kind() == io::ErrorKind::Interrupted => {
            bail!(
                "interrupted; the half-made checkpoint stays in {} and is made anew next time",
                dir.display()
            );
        }
        made => drop(made?),
    }
    fs::write(&manifest_path, serde_json::to_string_pretty(&manifest)?).with_context(at)
}

/// Keeps from writing into a directory that is somebody's.
fn refuse_foreign(dir: &Path) -> anyhow::Result<()> {
    let ours = |name: &std::ffi::OsStr| {
        let name = name.to_string_lossy();
        name.ends_with(".safetensors") || name.ends_with(".json")
    };
    let Ok(mut entries) = fs::read_dir(dir) else { return Ok(()) };
    let half_made = dir.join("config.json").is_file() && !dir.join("tokenizer_config.json").exists();
    let foreign = entries.find_map(|e| e.ok().filter(|e| !half_made || !ours(&e.file_name())));
    match foreign {
        None => Ok(()),
        Some(entry) => bail!(
            "{} holds {} and no {MANIFEST_FILE}: it is no synthetic checkpoint; give --dir another place",
            dir.display(),
            entry.file_name().display()
        ),
    }
}

fn check_disk(dir: &Path, needed: u64) -> anyhow::Result<()> {
    let stat =
        rustix::fs::statvfs(dir).with_context(|| format!("cannot ask for the space at {}", dir.display()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free < needed.saturating_add(DISK_HEAD_ROOM) {
        bail!(
            "{} has {} free; the checkpoint takes up to {} and {} stay free; give --dir on another disk",
            dir.display(),
            Bytes(free).human(),
            Bytes(needed).human(),
            Bytes(DISK_HEAD_ROOM).human()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(dir: &Path) -> String {
        refuse_foreign(dir).unwrap_err().to_string()
    }

    #[test]
    fn a_directory_of_somebody_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        refuse_foreign(dir.path()).unwrap();
        refuse_foreign(&dir.path().join("absent")).unwrap();
        fs::write(dir.path().join("letter.txt"), "dear").unwrap();
        assert!(refusal(dir.path()).contains("letter.txt"));
        fs::remove_file(dir.path().join("letter.txt")).unwrap();
        // What an interrupted run leaves.
        fs::write(dir.path().join("config.json"), "{}").unwrap();
        fs::write(dir.path().join("model-00001-of-000094.safetensors"), "").unwrap();
        refuse_foreign(dir.path()).unwrap();
        // A checkpoint with a tokenizer is a real one.
        fs::write(dir.path().join("tokenizer_config.json"), "{}").unwrap();
        assert!(refuse_foreign(dir.path()).is_err());
    }

    #[test]
    fn a_disk_without_room_is_refused_before_a_byte_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let error = check_disk(dir.path(), 1 << 60).unwrap_err().to_string();
        assert!(error.contains("free") && error.contains("--dir"), "{error}");
    }
}
