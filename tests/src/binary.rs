//! Running the real `k3` binary.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How one run of the binary ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit code; `None` when a signal ended it.
    pub code: Option<i32>,
    /// Everything it printed as its result.
    pub stdout: String,
    /// Everything it reported.
    pub stderr: String,
    /// How long it took.
    pub took: Duration,
}

/// How long a run may take before it counts as hanging.
pub const HANG_MIN: Duration = Duration::from_secs(240);

/// The longest a refusal may take.
pub const REFUSAL_MAX: Duration = Duration::from_secs(5);

/// The binary of the profile under test, built when it is first asked for.
///
/// # Panics
/// When it cannot be built.
#[allow(clippy::expect_used, clippy::missing_panics_doc)]
pub fn k3() -> &'static PathBuf {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "-p", "k3-pipeline", "--bin", "k3"]);
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        let built = build.current_dir(k3_golden::repository_root()).status().expect("cargo runs");
        assert!(built.success(), "k3 does not build");
        // This test lies in target/PROFILE/deps.
        let here = std::env::current_exe().expect("a test knows where it lies");
        here.ancestors().nth(2).expect("target/PROFILE").join("k3")
    })
}

/// Runs `k3` with `args` and kills it when it hangs.
///
/// # Panics
/// When it cannot be started or does not end.
#[allow(clippy::expect_used, clippy::panic)]
pub fn run(args: &[&str]) -> Ended {
    let started = Instant::now();
    let mut child = Command::new(k3())
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("k3 starts");
    let mut out = child.stdout.take().expect("piped");
    let mut err = child.stderr.take().expect("piped");
    let read = |pipe: &mut dyn Read| {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).expect("a pipe can be read");
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let out = std::thread::spawn(move || read(&mut out));
    let err = std::thread::spawn(move || read(&mut err));
    let status = loop {
        if let Some(status) = child.try_wait().expect("k3 can be waited for") {
            break status;
        }
        if started.elapsed() > HANG_MIN {
            let _ = child.kill();
            panic!("k3 {args:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let took = started.elapsed();
    let join = |t: std::thread::JoinHandle<String>| t.join().expect("a reader ends");
    Ended { code: status.code(), stdout: join(out), stderr: join(err), took }
}

/// Runs `k3` with `args` and checks that it refuses: the exit code, one paragraph on stderr that says
/// every one of `says`, nothing on stdout, no panic, and soon.
///
/// # Panics
/// When it does not.
pub fn assert_refused(case: &str, args: &[&str], code: i32, says: &[&str]) {
    let ended = run(args);
    let shown = format!("case {case}: {ended:#?}");
    assert_eq!(ended.code, Some(code), "{shown}");
    assert!(ended.stdout.is_empty(), "{shown}");
    assert!(!ended.stderr.contains("panicked"), "{shown}");
    assert!(!ended.stderr.trim_end().contains("\n\n"), "more than one paragraph; {shown}");
    assert!(is_soon(ended.took), "{shown}");
    for text in says {
        assert!(ended.stderr.contains(text), "does not say {text:?}; {shown}");
    }
}

/// Whether a refusal or an ending came soon. On a machine that is busy with other work only a hang can
/// be told from a wait for a core.
#[must_use]
pub fn is_soon(took: Duration) -> bool {
    took < if is_busy() { HANG_MIN } else { REFUSAL_MAX }
}

/// True when more threads want to run than there are cores.
///
/// # Panics
/// When the system does not say.
#[must_use]
#[allow(clippy::expect_used)]
pub fn is_busy() -> bool {
    let load = std::fs::read_to_string("/proc/loadavg").expect("a load average");
    let load = load.split_whitespace().next().and_then(|l| l.parse::<f64>().ok()).expect("a number");
    load > std::thread::available_parallelism().map_or(1.0, |n| usize::from(n) as f64)
}
