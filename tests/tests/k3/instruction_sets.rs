//! The environment's say over the instruction set, through the real binary.

use std::process::{Command, Output};

use k3_tests::binary::k3;

fn generate(isa: &str) -> Output {
    let args = ["generate", "--preset", "demo", "--ids", "1,2,3", "--max-tokens", "3", "--json"];
    let mut k3 = Command::new(k3());
    k3.current_dir(k3_golden::repository_root()).args(args).args(["--set", "compute.isa=auto"]);
    k3.env("K3_ISA", isa).output().unwrap()
}

#[test]
fn k3_isa_chooses_the_instruction_set_and_changes_no_token() {
    let tokens = |isa: &str| {
        let output = generate(isa);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["stats"]["isa"], isa);
        report["generated_ids"].clone()
    };
    let fastest = k3_kernel::Kernels::detect().isa().to_string();
    assert_eq!(tokens("scalar"), tokens(&fastest));
}

#[test]
fn k3_isa_naming_what_is_not_there_is_refused() {
    let absent = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
    for (isa, says) in [("sse9", "expected scalar, avx2 or neon"), (absent, "this processor has no")] {
        let output = generate(isa);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("K3_ISA") && said.contains(says), "{said}");
        assert!(output.stdout.is_empty());
    }
}
