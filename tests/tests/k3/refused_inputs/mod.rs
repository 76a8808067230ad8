//! Bad arguments, presets, weight files and places for output, through the real binary: each is refused
//! with one paragraph that names the culprit and exit code 1 or 2, soon, without a token and without a
//! panic. What happens to configurations and headers is in `refused_configs` and `refused_checkpoints`.

mod arguments;
mod endings;
mod files;
mod presets;

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use k3_tests::binary::assert_refused;
use k3_tests::corrupt::Model;
use k3_tests::resident::golden_model;

/// Least number of cases in the table.
const CASES_MIN: usize = 100;
/// Cases run at once.
const WORKERS: usize = 4;

/// One bad input.
struct Case {
    /// What is wrong.
    name: String,
    args: Vec<String>,
    /// Exit code.
    code: i32,
    /// What the refusal must say.
    says: Vec<String>,
    /// The damaged model that `args` name.
    model: Option<Model>,
}

impl Case {
    fn new(name: &str, args: &[&str], code: i32, says: &[&str]) -> Self {
        let owned = |texts: &[&str]| texts.iter().map(|&t| t.to_owned()).collect();
        Self { name: name.to_owned(), args: owned(args), code, says: owned(says), model: None }
    }
}

/// `k3 generate` on a sound tiny model (256 ids, no tokenizer) in a context of 1,024, with `more`.
fn generate(more: &[&str]) -> Vec<String> {
    let model = golden_model("k3-tiny-a").to_string_lossy().into_owned();
    let args = ["generate", "--preset", "demo", "--model", &model];
    args.iter().chain(more).map(|&a| a.to_owned()).collect()
}

/// A case of `k3 generate` with `more`.
fn generating(name: &str, more: &[&str], code: i32, says: &[&str]) -> Case {
    Case { args: generate(more), ..Case::new(name, &[], code, says) }
}

fn table(dir: &Path) -> Vec<Case> {
    [arguments::cases(), presets::cases(dir), files::cases(dir)].into_iter().flatten().collect()
}

fn check(case: &Case) {
    let args: Vec<&str> = case.args.iter().map(String::as_str).collect();
    let says: Vec<&str> = case.says.iter().map(String::as_str).collect();
    assert!(!says.is_empty(), "{}: a refusal names the culprit", case.name);
    assert_refused(&case.name, &args, case.code, &says);
}

#[test]
fn bad_inputs_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let cases = table(dir.path());
    let names: std::collections::BTreeSet<&str> = cases.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names.len(), cases.len(), "two cases have one name");
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            check(case);
        }
    };
    // A case that fails panics in its worker, and with it the scope.
    std::thread::scope(|scope| (0..WORKERS).for_each(|_| drop(scope.spawn(work))));
    assert!(cases.len() >= CASES_MIN, "{} cases", cases.len());
    println!("{} bad inputs refused", cases.len());
}
