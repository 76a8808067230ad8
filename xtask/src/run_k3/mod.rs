//! Runs of the release `k3` binary, for the tasks that measure it: built once, every run a process of its
//! own, under a real memory limit where one is asked for, its report read.

mod cgroup;
mod child;
mod report;
mod series;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use k3_pipeline::units::Rate;

pub use cgroup::Cgroup;
pub use child::Ended;
use child::Voice;
pub use report::Report;
pub use series::{Series, Spread, Stream};

/// The release binary, ready to run.
pub struct K3 {
    binary: PathBuf,
    voice: Voice,
    stop: Arc<AtomicBool>,
}

/// One run of `k3 generate` on token ids.
#[derive(Clone, Debug)]
pub struct Generate<'a> {
    /// Name or file.
    pub preset: &'a str,
    /// Changes of the preset, as in "trunk.pinned=0".
    pub set: Vec<String>,
    /// Model directory.
    pub model: &'a Path,
    /// The prompt, as in "1,2,3".
    pub ids: &'a str,
    /// Tokens to generate; the last of them is decided, not fed.
    pub tokens: u32,
    /// Read no faster than this.
    pub disk: Option<Rate>,
    /// Hard limit on the memory of the process, page cache included.
    pub cap_bytes: Option<u64>,
}

/// Reads a prompt on the command line, before a task has made a checkpoint or built anything for it.
///
/// # Errors
/// Names what is no token id.
pub fn ids(text: &str) -> Result<String, String> {
    match text.split(',').find(|id| id.trim().parse::<u32>().is_err()) {
        Some(id) => Err(format!("{id:?} is not a token id; write for example 1,2,3")),
        None => Ok(text.to_owned()),
    }
}

impl K3 {
    /// Builds the binary. `stop` ends a run under way.
    ///
    /// # Errors
    /// When it does not build.
    pub fn build(stop: Arc<AtomicBool>) -> anyhow::Result<Self> {
        Ok(Self { binary: child::build()?, voice: Voice::Heard, stop })
    }

    /// The same with the words of `k3` on stderr kept for errors: for series of many runs.
    #[must_use]
    pub fn quiet(self) -> Self {
        Self { voice: Voice::Kept, ..self }
    }

    /// Runs `k3` with `args`, which must make it print one JSON object, inside `group`.
    ///
    /// # Errors
    /// It cannot be started, fails, is killed for its memory, or prints what is no report.
    pub fn run(&self, args: &[String], group: Option<&Cgroup>) -> anyhow::Result<Ended> {
        child::run(&self.binary, args, group, self.voice, &self.stop)
    }

    /// Runs `k3 generate` and reads its figures and the digest of its logits.
    ///
    /// # Errors
    /// As [`K3::run`]; a cap that cannot be set.
    pub fn generate(&self, run: &Generate<'_>) -> anyhow::Result<Report> {
        let logits = tempfile::tempdir().context("cannot make a temporary directory")?;
        let logits = logits.path().join("logits.safetensors");
        let group = run.cap_bytes.map(Cgroup::create).transpose()?;
        let ended = self.run(&run.args(&logits), group.as_ref())?;
        let mut report = Report::new(&ended, report::logits_digest(&logits)?)?;
        report.model = run.model.display().to_string();
        report.cap_bytes = run.cap_bytes;
        report.cap_enforced_by = group.as_ref().map(Cgroup::describe);
        report.cgroup_peak_bytes = group.as_ref().and_then(Cgroup::peak_bytes);
        Ok(report)
    }
}

impl Generate<'_> {
    fn args(&self, logits: &Path) -> Vec<String> {
        let mut args = vec!["generate".to_owned(), "--json".into()];
        let mut option = |name: &str, value: String| args.extend([format!("--{name}"), value]);
        option("preset", self.preset.to_owned());
        option("model", self.model.display().to_string());
        option("ids", self.ids.to_owned());
        option("max-tokens", self.tokens.to_string());
        option("dump-logits", logits.display().to_string());
        self.set.iter().for_each(|set| option("set", set.clone()));
        if let Some(rate) = self.disk {
            option("throttle", format!("{}B/s", rate.0.0));
        }
        args
    }
}

/// A flag that Ctrl-C sets; to be asked for once.
///
/// # Errors
/// When the system refuses the handler.
pub fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    ctrlc::set_handler(move || flag.store(true, Ordering::SeqCst)).context("cannot listen for Ctrl-C")?;
    Ok(stop)
}
