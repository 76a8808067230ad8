//! One run of the release `k3` binary in a cgroup, watched from outside.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use k3_pipeline::stats::CpuTime;
use rustix::process::{Pid, Signal, kill_process};

use super::cgroup::Cgroup;

/// How often the child is looked at.
const PERIOD: Duration = Duration::from_millis(50);
/// How long it may take to stop when asked.
const GRACE: Duration = Duration::from_secs(20);
/// Between two lines that say that it still runs.
const NOTE_PERIOD: Duration = Duration::from_secs(30);
/// Enters the group, then becomes the program: nothing of it runs outside.
const ENTER: &str = r#"echo $$ > "$1" && shift && exec "$@""#;

/// What a run left.
pub struct Ended {
    /// What `k3` printed.
    pub json: serde_json::Value,
    /// Its largest resident memory as the system saw it from outside.
    pub peak_rss_bytes: u64,
    /// From start to end, opening included.
    pub seconds: f64,
    /// Processor time of all its threads.
    pub cpu: CpuTime,
}

/// Builds the release binary and says where it lies.
///
/// # Errors
/// When it does not build.
pub fn build() -> anyhow::Result<PathBuf> {
    let mut cargo = crate::cargo();
    cargo.args(["build", "--quiet", "--release", "-p", "k3-pipeline", "--bin", "k3"]);
    let status = cargo.status().context("cannot start cargo")?;
    if !status.success() {
        bail!("k3 does not build");
    }
    // This program lies in target/PROFILE.
    let here = std::env::current_exe().context("cannot tell where this program lies")?;
    let target =
        here.ancestors().nth(2).ok_or_else(|| anyhow!("{} lies in no target directory", here.display()))?;
    Ok(target.join("release/k3"))
}

/// Where what `k3` says on stderr goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Voice {
    /// To our own.
    Heard,
    /// Into the error, when it fails.
    Kept,
}

/// Runs `binary` with `args` inside `group` and waits for it; `stop` asks it to end.
///
/// # Errors
/// It cannot be started, fails, is killed for its memory, or prints what is no report.
pub fn run(
    binary: &Path,
    args: &[String],
    group: Option<&Cgroup>,
    voice: Voice,
    stop: &AtomicBool,
) -> anyhow::Result<Ended> {
    let mut command = match group {
        None => Command::new(binary),
        Some(group) => {
            let mut sh = Command::new("/bin/sh");
            sh.args(["-c", ENTER, "sh"]).arg(group.procs()).arg(binary);
            sh
        }
    };
    let started = Instant::now();
    let stderr = if voice == Voice::Kept { Stdio::piped() } else { Stdio::inherit() };
    let spawned = command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr).spawn();
    let mut child = Running(spawned.with_context(|| format!("cannot start {}", binary.display()))?);
    let output = collect(child.0.stdout.take());
    let words = collect(child.0.stderr.take());
    let (status, seen) = watch(&mut child.0, started, stop)?;
    let seconds = started.elapsed().as_secs_f64();
    let text = |reader: JoinHandle<io::Result<String>>| {
        reader.join().map_err(|_| anyhow!("the reader of k3's output failed"))?.context("k3's output")
    };
    let (text, words) = (text(output)?, text(words)?);
    if stop.load(Ordering::SeqCst) {
        bail!("interrupted");
    }
    if !status.success() {
        let why = match (status.code(), group) {
            (None, Some(group)) => format!(
                "it was killed: it went over the cap of {} (peak {} bytes)",
                group.describe(),
                group.peak_bytes().unwrap_or(0)
            ),
            _ => status.to_string(),
        };
        bail!("k3 {}\nfailed: {why}\n{}", args.join(" "), words.trim_end());
    }
    let json = serde_json::from_str(&text).context("k3 printed no JSON object")?;
    Ok(Ended { json, peak_rss_bytes: seen.peak_rss_bytes, seconds, cpu: seen.cpu })
}

/// Reads a pipe to its end beside everything else, so that it never fills up.
fn collect(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<io::Result<String>> {
    thread::spawn(move || {
        let mut text = String::new();
        pipe.map_or(Ok(0), |mut pipe| pipe.read_to_string(&mut text)).map(|_| text)
    })
}

/// What the system counts of a child. None of it ever falls, so what was seen last is nearly the end.
#[derive(Default)]
struct Seen {
    peak_rss_bytes: u64,
    cpu: CpuTime,
}

/// Waits for the child and follows what it uses.
fn watch(
    child: &mut Child,
    started: Instant,
    stop: &AtomicBool,
) -> anyhow::Result<(std::process::ExitStatus, Seen)> {
    let id = child.id();
    let status = || fs::read_to_string(format!("/proc/{id}/status")).ok();
    let (mut seen, mut noted, mut asked) = (Seen::default(), Instant::now(), None::<Instant>);
    loop {
        let peak = status().and_then(|s| high_water(&s)).unwrap_or(0);
        seen.peak_rss_bytes = peak.max(seen.peak_rss_bytes);
        seen.cpu = CpuTime::of(Some(id)).unwrap_or(seen.cpu);
        if let Some(status) = child.try_wait().context("cannot wait for k3")? {
            return Ok((status, seen));
        }
        if stop.load(Ordering::SeqCst) {
            match asked {
                None => {
                    asked = Some(Instant::now());
                    ask_to_end(child);
                }
                Some(asked) if asked.elapsed() > GRACE => child.kill().context("cannot kill k3")?,
                Some(_) => {}
            }
        }
        if noted.elapsed() > NOTE_PERIOD {
            noted = Instant::now();
            let (seconds, peak) = (started.elapsed().as_secs_f64(), seen.peak_rss_bytes / 1_000_000);
            eprintln!("running: {seconds:.0} s, peak {peak} MB");
        }
        thread::sleep(PERIOD);
    }
}

fn ask_to_end(child: &Child) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    // One that is gone already needs no signal.
    let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
}

fn high_water(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// A child that does not outlive its owner.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail for one that has ended, which is as it should be.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> anyhow::Result<Ended> {
        let stop = AtomicBool::new(false);
        run(Path::new("/bin/sh"), &["-c".into(), script.into()], None, Voice::Kept, &stop)
    }

    #[test]
    fn a_report_comes_back_and_failures_are_told() {
        let ended = sh("sleep 0.2; echo '{\"a\": 1}'").unwrap();
        assert_eq!(ended.json["a"], 1);
        assert!(ended.peak_rss_bytes > 0 && ended.seconds > 0.1);
        let failed = sh("echo the reason >&2; exit 3").err().map(|e| e.to_string()).unwrap();
        assert!(failed.contains("exit status: 3") && failed.ends_with("the reason"), "{failed}");
        assert!(sh("echo no json").is_err());
    }

    #[test]
    fn an_interrupted_run_ends_its_child() {
        let started = Instant::now();
        let stop = AtomicBool::new(true);
        let ended = run(Path::new("/bin/sleep"), &["60".into()], None, Voice::Heard, &stop);
        assert_eq!(ended.err().map(|e| e.to_string()), Some("interrupted".into()));
        assert!(started.elapsed() < Duration::from_secs(10));
    }
}
