use k3_kernel::Kernels;
use k3_kernel::mla::{Latent, mla_scratch};
use k3_kernel::testing::{self, Random, assert_same_bits, same_on_each_isa, worst_error};

fn attend(k: Kernels, q: &[f32], latent: Latent<'_>, scale: f32) -> Vec<f32> {
    let heads = q.len() / (latent.rank + latent.rope);
    let mut ctx = vec![f32::NAN; heads * latent.rank];
    let mut scratch = vec![f32::NAN; mla_scratch(heads, latent.rank, latent.rope)];
    k.mla_attend(q, latent, scale, &mut ctx, &mut scratch);
    ctx
}

/// The largest error of any head, as a share of the head's largest value.
fn error(found: &[f32], q: &[f32], latent: Latent<'_>, scale: f32) -> f64 {
    let width = latent.rank + latent.rope;
    let expected = testing::mla_attend(q, latent.data, width, latent.rank, scale);
    let heads = found.chunks(latent.rank).zip(expected.chunks(latent.rank));
    heads.map(|(found, expected)| worst_error(found, expected)).fold(0.0, f64::max)
}

#[test]
fn same_bits_and_right_values() {
    for (rank, rope) in [(1, 0), (8, 3), (24, 8), (32, 8), (36, 8), (300, 20), (512, 64)] {
        for heads in [1, 3, 4, 16, 21] {
            for positions in [1, 2, 5, 6, 7, 95, 96, 97, 211] {
                if rank > 100 && (positions > 100 || heads == 3) {
                    continue;
                }
                // Enough for an interpreter: a group of heads, and a second block of positions.
                if cfg!(miri) && (rank != 8 || ![3, 21].contains(&heads) || ![2, 97].contains(&positions)) {
                    continue;
                }
                let mut random = Random::new((rank * heads * positions) as u64);
                let width = rank + rope;
                let (q, data) = (random.vec(heads * width, 1.0), random.vec(positions * width, 2.0));
                let latent = Latent { data: &data, rank, rope };
                let scale = 1.0 / (width as f32).sqrt();
                let what = format!("{heads} heads, {rank} + {rope}, {positions} positions");
                let ctx = same_on_each_isa(&what, |k| attend(k, &q, latent, scale));
                let error = error(&ctx, &q, latent, scale);
                // A head of one column may cancel to nearly nothing.
                assert!(error < 3e-6 || rank == 1, "{what}: {error:e}");
                for (h, (q, ctx)) in q.chunks(width).zip(ctx.chunks(rank)).enumerate() {
                    let alone = attend(Kernels::detect(), q, latent, scale);
                    assert_same_bits(&format!("{what}: head {h} alone"), &alone, ctx);
                }
            }
        }
    }
}

/// Scores that rise all along rescale the totals at every block; sharp ones leave one position.
#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter; `same_bits_and_right_values` runs the same code")]
fn rising_and_sharp_scores() {
    let (rank, rope, positions) = (8, 4, 1000);
    let mut random = Random::new(9);
    let mut data = random.vec(positions * 12, 1.0);
    for (s, row) in data.chunks_mut(12).enumerate() {
        row[11] = s as f32 * 0.02;
    }
    let latent = Latent { data: &data, rank, rope };
    for steepness in [0.1, 1.0, 50.0] {
        let mut q = random.vec(3 * 12, 1.0);
        q[11] = steepness;
        q[23] = -steepness;
        let ctx = same_on_each_isa("rising scores", |k| attend(k, &q, latent, 1.0));
        let error = error(&ctx, &q, latent, 1.0);
        assert!(error < 1e-5 * f64::from(steepness.max(1.0)), "steepness {steepness}: {error:e}");
    }
}

/// Rounding does not grow with the context: 300,000 positions are as exact as 300.
#[test]
#[cfg_attr(miri, ignore = "too much for an interpreter; `same_bits_and_right_values` runs the same code")]
fn long_context_stays_accurate() {
    let (rank, rope) = (5, 2);
    let mut random = Random::new(10);
    for positions in [300, 300_000] {
        let data: Vec<f32> = random.vec(positions * 7, 0.5).iter().map(|x| x + 1.0).collect();
        let q = random.vec(2 * 7, 1.0);
        let latent = Latent { data: &data, rank, rope };
        let error = error(&attend(Kernels::detect(), &q, latent, 0.4), &q, latent, 0.4);
        assert!(error < 4e-7, "{positions} positions: {error:e}");
    }
}
