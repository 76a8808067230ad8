//! The golden vectors on every instruction set.

use k3_golden::vectors::check_vectors;
use k3_kernel::each_isa;

#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter; the other tests run the same code")]
fn golden_vectors() {
    each_isa!(|k| {
        let outcomes = check_vectors(k).unwrap();
        assert!(outcomes.len() >= 40, "{} comparisons", outcomes.len());
        for outcome in outcomes {
            assert!(outcome.passed(), "{}: {outcome:?}", k.isa());
        }
    });
}
