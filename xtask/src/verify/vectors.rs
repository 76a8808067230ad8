//! Single operations, on every instruction set of this machine.

use k3_golden::vectors::{TOLERANCE, check_released_vectors, check_vectors};
use k3_kernel::{Isa, Kernels};

use super::report::Report;
use crate::root;

/// Checks every case; those of one kernel family become one line.
pub(super) fn check(report: &mut Report) -> anyhow::Result<()> {
    for kernels in [Isa::Scalar, Isa::Avx2, Isa::Neon].into_iter().filter_map(Kernels::new) {
        let mut outcomes = check_vectors(kernels)?;
        let released = root().join("../shared/golden/released/kernels-released.safetensors");
        if released.is_file() {
            outcomes.extend(check_released_vectors(kernels, &released)?);
        }
        let families: Vec<String> =
            outcomes.iter().map(|o| o.name.split('.').next().unwrap_or_default().to_owned()).collect();
        let mut seen: Vec<&String> = Vec::new();
        for family in &families {
            if seen.contains(&family) {
                continue;
            }
            seen.push(family);
            let of_family = outcomes.iter().zip(&families).filter(|(_, f)| *f == family).map(|(o, _)| o);
            let Some(worst) = of_family.max_by(|a, b| a.worst.total_cmp(&b.worst)) else { continue };
            let place = format!("{} row {}", worst.name, worst.row);
            report.measured(format!("{family} ({})", kernels.isa()), (worst.worst, TOLERANCE), place);
        }
    }
    Ok(())
}
