use k3_kernel::kda::{KdaTokens, kda_state_index, kda_state_len};
use k3_kernel::testing::{self, KdaInputs, Random, assert_same_bits, same_on_each_isa, worst_error};
use k3_kernel::{Columns, Kernels, Out};

const SHAPES: &[(usize, usize)] = if cfg!(miri) {
    &[(3, 5), (20, 20)]
} else {
    &[(1, 1), (3, 5), (16, 16), (20, 20), (8, 24), (16, 33), (7, 40), (128, 128), (100, 70), (64, 61)]
};
const TOKENS: usize = 5;

struct Case {
    dk: usize,
    dv: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    alpha: Vec<f32>,
    beta: Vec<f32>,
    /// [key width, value width].
    state: Vec<f32>,
}

impl Case {
    fn new(dk: usize, dv: usize) -> Self {
        let mut random = Random::new((dk * 1000 + dv) as u64);
        let unit = 1.0 / (dk as f32).sqrt();
        let (q, k) = (random.vec(TOKENS * dk, unit), random.vec(TOKENS * dk, unit));
        let alpha = random.vec(TOKENS * dk, 0.5).iter().map(|a| a + 0.5).collect();
        let beta = random.vec(TOKENS, 0.5).iter().map(|b| b + 0.5).collect();
        Self { dk, dv, q, k, v: random.vec(TOKENS * dv, 2.0), alpha, beta, state: random.vec(dk * dv, 1.0) }
    }

    /// The state in the kernel's layout.
    fn packed(&self) -> Vec<f32> {
        let mut packed = vec![0.0; kda_state_len(self.dk, self.dv)];
        for i in 0..self.dk {
            for j in 0..self.dv {
                packed[kda_state_index(self.dk, self.dv, i, j)] = self.state[i * self.dv + j];
            }
        }
        packed
    }

    /// Runs tokens `from..to`.
    fn run(&self, kernels: Kernels, state: &mut [f32], from: usize, to: usize, out: &mut [f32]) {
        let columns = |data, len| {
            let all = Columns::packed(data, len, TOKENS);
            Columns { data: &all.data[from * len..], count: to - from, ..all }
        };
        let tokens = KdaTokens {
            q: columns(&self.q, self.dk),
            k: columns(&self.k, self.dk),
            v: columns(&self.v, self.dv),
            alpha: columns(&self.alpha, self.dk),
            beta: columns(&self.beta, 1),
        };
        let out = Out::new(&mut out[from * self.dv..to * self.dv], self.dv, self.dv, to - from);
        kernels.kda_run(state, self.dk, self.dv, &tokens, out);
    }

    /// All tokens at once: outputs, then the state.
    fn whole(&self, kernels: Kernels) -> Vec<f32> {
        let (mut state, mut out) = (self.packed(), vec![0.0; TOKENS * self.dv]);
        self.run(kernels, &mut state, 0, TOKENS, &mut out);
        out.extend(state);
        out
    }
}

#[test]
fn layout_holds_every_element_once() {
    for &(dk, dv) in SHAPES {
        let mut seen = vec![0; kda_state_len(dk, dv)];
        for i in 0..dk {
            for j in 0..dv {
                seen[kda_state_index(dk, dv, i, j)] += 1;
            }
        }
        assert!(seen.iter().all(|n| *n <= 1) && seen.iter().sum::<i32>() == (dk * dv) as i32, "{dk} x {dv}");
    }
}

#[test]
fn same_bits_and_right_values() {
    for &(dk, dv) in SHAPES {
        let case = Case::new(dk, dv);
        let found = same_on_each_isa(&format!("kda_run {dk} x {dv}"), |kernels| case.whole(kernels));
        let mut state: Vec<f64> = case.state.iter().map(|s| f64::from(*s)).collect();
        let Case { q, k, v, alpha, beta, .. } = &case;
        let out = testing::kda(&mut state, KdaInputs { q, k, v, alpha, beta });
        let (found_out, found_state) = found.split_at(TOKENS * dv);
        assert!(worst_error(found_out, &out) < 2e-6, "outputs of {dk} x {dv}");
        let at = |i, j| found_state[kda_state_index(dk, dv, i, j)];
        let unpacked: Vec<f32> = (0..dk * dv).map(|n| at(n / dv, n % dv)).collect();
        assert!(worst_error(&unpacked, &state) < 2e-6, "state of {dk} x {dv}");
    }
}

#[test]
fn many_tokens_are_one_at_a_time() {
    for &(dk, dv) in SHAPES {
        let case = Case::new(dk, dv);
        let whole = case.whole(Kernels::detect());
        for cut in 0..=TOKENS {
            let (mut state, mut out) = (case.packed(), vec![0.0; TOKENS * dv]);
            case.run(Kernels::detect(), &mut state, 0, cut, &mut out);
            for t in cut..TOKENS {
                case.run(Kernels::detect(), &mut state, t, t + 1, &mut out);
            }
            out.extend(state);
            assert_same_bits(&format!("{dk} x {dv} cut at {cut}"), &out, &whole);
        }
    }
}

/// Heads lie interleaved in the projections: strides wider than a head must give the same bits.
#[test]
fn strides() {
    let case = Case::new(20, 20);
    let spread = |x: &[f32], width: usize| -> Vec<f32> {
        x.chunks(width).flat_map(|row| row.iter().copied().chain([f32::NAN; 3])).collect()
    };
    let (q, k, v) = (spread(&case.q, 20), spread(&case.k, 20), spread(&case.v, 20));
    let (alpha, beta) = (spread(&case.alpha, 20), spread(&case.beta, 1));
    let columns = |data, len| Columns { data, stride: len + 3, count: TOKENS, len };
    let tokens = KdaTokens {
        q: columns(&q, 20),
        k: columns(&k, 20),
        v: columns(&v, 20),
        alpha: columns(&alpha, 20),
        beta: columns(&beta, 1),
    };
    let (mut state, mut out) = (case.packed(), vec![0.0; TOKENS * 25]);
    Kernels::detect().kda_run(&mut state, 20, 20, &tokens, Out::new(&mut out, 25, 20, TOKENS));
    let mut found: Vec<f32> = out.chunks(25).flat_map(|row| &row[..20]).copied().collect();
    found.extend(state);
    assert_same_bits("strided", &found, &case.whole(Kernels::detect()));
}

#[test]
fn decay() {
    for n in [1, 7, 8, 16, 20, 128] {
        let mut random = Random::new(n as u64);
        let (z, bias) = (random.vec(n, 8.0), random.vec(n, 2.0));
        for bound in [Some(-5.0), None] {
            let alpha = same_on_each_isa("kda_decay", |k| {
                let mut alpha = vec![0.0; n];
                k.kda_decay(&z, &bias, 0.7, bound, &mut alpha);
                alpha
            });
            let expected = testing::kda_decay(&z, &bias, 0.7, bound);
            assert!(worst_error(&alpha, &expected) < 1e-6, "{n} factors, bound {bound:?}");
        }
    }
}
