//! Opening a model directory: configuration, index, every header, every binding. No weight is read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use xxhash_rust::xxh3::Xxh3;

use super::binding::{Binder, Verdict};
use super::checkpoint_error::{CheckpointProblem, FileFault};
use super::config::ModelConfig;
use super::config_json::{self, CONFIG_FILE};
use super::error::{ModelError, PROBLEMS_MAX};
use super::shard::{Entry, RawHeader};
use super::shard_index::{self, INDEX_FILE, IndexedFiles, SINGLE_FILE};
use super::tensors::{FileId, Fingerprint, ModelTensors, WeightFile};

/// Weight files of a model.
pub const FILES_MAX: usize = 8192;

/// Threads that read headers.
const READERS_MAX: usize = 8;

impl ModelTensors {
    /// Opens the model in `dir`. Weight files that are not in it are looked for in `extra_dirs`, in
    /// order, so that a checkpoint can be spread over disks.
    ///
    /// # Errors
    /// A refused configuration, or the list of everything that is wrong with the weight files:
    /// unreadable or lying headers, and tensors that are missing, misshapen, of another type, held
    /// twice, or no part of the model.
    pub fn open(dir: &Path, extra_dirs: &[PathBuf]) -> Result<(ModelConfig, Self), ModelError> {
        let config_path = dir.join(CONFIG_FILE);
        let text = config_json::read_text(&config_path)?;
        let config = config_json::parse_config(&config_path, &text)?;
        let mut problems = Problems::default();
        let opened = open_checkpoint(&config, &text, dir, extra_dirs, &mut problems);
        match opened {
            Some(tensors) if problems.count == 0 => Ok((config, tensors)),
            _ => Err(problems.into_error(dir)),
        }
    }
}

/// Problems in order, of which only the first are kept.
#[derive(Default)]
struct Problems {
    first: Vec<CheckpointProblem>,
    count: usize,
}

impl Problems {
    fn note(&mut self, problem: CheckpointProblem) {
        self.count += 1;
        if self.first.len() < PROBLEMS_MAX {
            self.first.push(problem);
        }
    }

    fn append(&mut self, other: Self) {
        self.count += other.count - other.first.len();
        other.first.into_iter().for_each(|p| self.note(p));
    }

    fn into_error(self, dir: &Path) -> ModelError {
        let more = self.count - self.first.len();
        ModelError::Checkpoint { dir: dir.to_owned(), problems: self.first, more }
    }
}

/// A weight file to read: its name, where it lies, and the hashes the index gives it.
struct Shard {
    name: String,
    path: PathBuf,
    indexed: Option<Vec<u64>>,
}

fn open_checkpoint(
    config: &ModelConfig,
    config_text: &str,
    dir: &Path,
    extra_dirs: &[PathBuf],
    problems: &mut Problems,
) -> Option<ModelTensors> {
    let shards = find_shards(dir, extra_dirs, problems)?;
    let binder = Mutex::new(Binder::new(config));
    let results = read_shards(&shards, &binder, &dir.join(INDEX_FILE));
    let mut hasher = Xxh3::new();
    hasher.update(&(config_text.len() as u64).to_le_bytes());
    hasher.update(config_text.as_bytes());
    let mut files = Vec::with_capacity(shards.len());
    let mut complete = problems.count == 0;
    for (shard, result) in shards.into_iter().zip(results) {
        complete &= result.read;
        problems.append(result.problems);
        hasher.update(shard.name.as_bytes());
        hasher.update(&result.digest.to_le_bytes());
        files.push(WeightFile { path: shard.path, bytes: result.file_bytes });
    }
    let binder = binder.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    if complete {
        // With a file missing or unreadable, its tensors need not be named one by one.
        binder.missing(&mut |p| problems.note(p));
    }
    binder.finish(files, Fingerprint(hasher.digest128()))
}

/// The weight files in order of their names.
fn find_shards(dir: &Path, extra_dirs: &[PathBuf], problems: &mut Problems) -> Option<Vec<Shard>> {
    let index_path = dir.join(INDEX_FILE);
    let indexed: BTreeMap<String, Option<Vec<u64>>> = if exists(&index_path) {
        let index: Result<IndexedFiles, _> = shard_index::read(&index_path);
        match index {
            Ok(files) => files.into_iter().map(|(name, hashes)| (name, Some(hashes))).collect(),
            Err(fault) => {
                problems.note(CheckpointProblem::Index { path: index_path, fault });
                return None;
            }
        }
    } else if exists(&dir.join(SINGLE_FILE)) {
        BTreeMap::from([(SINGLE_FILE.to_owned(), None)])
    } else {
        problems.note(CheckpointProblem::NoWeights { dir: dir.to_owned() });
        return None;
    };
    if indexed.len() > FILES_MAX {
        problems.note(CheckpointProblem::TooManyFiles { files: indexed.len(), max: FILES_MAX });
        return None;
    }
    let mut shards = Vec::with_capacity(indexed.len());
    for (name, indexed) in indexed {
        let places = std::iter::once(dir).chain(extra_dirs.iter().map(PathBuf::as_path));
        let found = places.map(|d| d.join(&name)).find(|p| exists(p));
        match found {
            Some(path) => shards.push(Shard { name, path, indexed }),
            None => {
                let searched = std::iter::once(dir.to_owned()).chain(extra_dirs.iter().cloned()).collect();
                problems.note(CheckpointProblem::ShardMissing { file: name, searched });
            }
        }
    }
    Some(shards)
}

/// True where there is anything at all, a broken link included: reading it says what is wrong.
fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// What came of one file.
#[derive(Default)]
struct ShardResult {
    read: bool,
    file_bytes: u64,
    digest: u128,
    problems: Problems,
}

/// Reads and binds all headers, several at a time; results are in order of the files.
fn read_shards(shards: &[Shard], binder: &Mutex<Binder<'_>>, index_path: &Path) -> Vec<ShardResult> {
    let results: Vec<Mutex<ShardResult>> = shards.iter().map(|_| Mutex::default()).collect();
    let next = AtomicUsize::new(0);
    let readers = std::thread::available_parallelism().map_or(1, usize::from).min(READERS_MAX);
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(slot) = results.get(i) else { break };
            let result = read_shard(shards, i, binder, index_path);
            *slot.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = result;
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..readers.min(shards.len()) {
            // Where no more threads can be had, the others do all of it.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    let unlock = |m: Mutex<ShardResult>| m.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    results.into_iter().map(unlock).collect()
}

fn read_shard(shards: &[Shard], i: usize, binder: &Mutex<Binder<'_>>, index_path: &Path) -> ShardResult {
    let mut result = ShardResult::default();
    let shard = &shards[i];
    if let Err(fault) = bind_shard(shards, i, binder, index_path, &mut result) {
        result.problems.note(CheckpointProblem::File { path: shard.path.clone(), fault });
    }
    result
}

fn bind_shard(
    shards: &[Shard],
    i: usize,
    binder: &Mutex<Binder<'_>>,
    index_path: &Path,
    result: &mut ShardResult,
) -> Result<(), FileFault> {
    let shard = &shards[i];
    let header = RawHeader::read(&shard.path)?;
    let entries = header.entries()?;
    result.read = true;
    result.file_bytes = header.file_bytes;
    let mut hasher = Xxh3::new();
    header.fingerprint(&mut hasher);
    result.digest = hasher.digest128();
    // There are at most FILES_MAX files.
    let file = FileId(i as u16);
    {
        let mut binder = binder.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for entry in &entries {
            match binder.bind(entry, file, &shard.name) {
                Verdict::Fine => {}
                Verdict::Problem(problem) => result.problems.note(problem),
                Verdict::Twice(other) => {
                    let names =
                        [file.min(other), file.max(other)].map(|f| shards[usize::from(f.0)].name.clone());
                    let [file, other] = names;
                    let tensor = entry.name.to_string();
                    result.problems.note(CheckpointProblem::TwoFiles { tensor, file, other });
                }
            }
        }
    }
    if let Some(indexed) = &shard.indexed {
        compare_with_index(&entries, indexed, shard, index_path, &mut result.problems);
    }
    Ok(())
}

/// Both ways: what the file holds and the index does not place there, and the reverse.
fn compare_with_index(
    entries: &[Entry<'_>],
    indexed: &[u64],
    shard: &Shard,
    index_path: &Path,
    problems: &mut Problems,
) {
    for e in entries.iter().filter(|e| indexed.binary_search(&e.hash).is_err()) {
        let (tensor, file) = (e.name.to_string(), shard.name.clone());
        problems.note(CheckpointProblem::NotIndexed { tensor, file });
    }
    let mut held: Vec<u64> = entries.iter().map(|e| e.hash).collect();
    held.sort_unstable();
    let absent: Vec<u64> = indexed.iter().copied().filter(|h| held.binary_search(h).is_err()).collect();
    if absent.is_empty() {
        return;
    }
    match shard_index::names_of(index_path, &absent) {
        Ok(names) => {
            for (tensor, file) in names {
                problems.note(CheckpointProblem::IndexedButAbsent { tensor, file });
            }
        }
        Err(fault) => problems.note(CheckpointProblem::Index { path: index_path.to_owned(), fault }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tensors::MatrixKind;
    use crate::units::ExpertId;

    fn golden(name: &str) -> PathBuf {
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../golden/models")).join(name)
    }

    #[test]
    fn binds_every_tensor_of_the_golden_models() {
        for (name, layers, experts) in [("k3-tiny-a", 13, 16), ("k3-tiny-b", 26, 32), ("k3-tiny-nan", 5, 8)] {
            let (config, tensors) = ModelTensors::open(&golden(name), &[]).unwrap();
            assert_eq!((tensors.layers.len(), config.moe.experts), (layers, experts));
            assert!(tensors.vision.count > 0, "the image tower is counted and left");
            assert_eq!(tensors.layers[0].matrices[0].kind, MatrixKind::KdaQ);
            let table = tensors.layers[1].experts.as_ref().unwrap();
            for e in 0..experts {
                let run = table.extents(ExpertId(e as u16)).unwrap().contiguous();
                assert_eq!(run.map(|r| r.bytes), Some(crate::model::layout::expert_bytes(&config)));
            }
        }
    }

    #[test]
    fn the_fingerprint_does_not_depend_on_where_the_model_lies_but_on_what_it_is() {
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(golden("k3-tiny-nan")).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
            }
        }
        let of = |d: &Path| ModelTensors::open(d, &[]).unwrap().1.fingerprint;
        assert_eq!(of(dir.path()), of(&golden("k3-tiny-nan")));
        let config = dir.path().join("config.json");
        let text = std::fs::read_to_string(&config).unwrap();
        std::fs::write(&config, text.replace("1e-05", "2e-05")).unwrap();
        assert_ne!(of(dir.path()), of(&golden("k3-tiny-nan")));
    }
}
