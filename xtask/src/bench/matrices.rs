//! The matrix products.

use std::hint::black_box;
use std::sync::Arc;

use k3_kernel::hn::{hn_encode, hn_encoded_max};
use k3_kernel::weights::tiled_bytes;
use k3_kernel::{Bf16Rows, Bf16Tiled, Columns, HnTiled, Kernels, Matrix, Mxfp4, Out, Q23, q23_bytes};

use super::measure::{Pages, Work, part};
use super::{Case, Maker};

/// All matrix kernels.
pub const CASES: &[Maker] = &[
    ("mxfp4", mxfp4_cases),
    ("q23_quantize", quantize_cases),
    ("bf16_tiled", tiled_cases),
    ("bf16_hn", hn_cases),
    ("bf16_rows", rows_cases),
    ("matmul_t", transposed_cases),
    ("tile_rows", tile_cases),
];

/// Bytes that no cache holds.
const COLD_BYTES: usize = 160 << 20;

/// Normally distributed f32.
fn normal(seed: u32) -> impl Iterator<Item = f32> {
    let mut state = u64::from(seed);
    std::iter::from_fn(move || {
        let mut sum = 0.0;
        for _ in 0..6 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            sum += (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
        }
        Some(sum * 0.7)
    })
}

fn inputs(cols: usize, count: usize) -> Vec<f32> {
    normal(7).take(cols * count).collect()
}

fn bf16_bytes(rows: usize, cols: usize) -> Pages {
    let mut pages = Pages::new(rows * cols * 2);
    for (to, value) in pages.get_mut().as_chunks_mut::<2>().0.iter_mut().zip(normal(3)) {
        *to = ((0.02 * value).to_bits() >> 16).to_le_bytes()[..2].try_into().unwrap_or_default();
    }
    pages
}

// ---- MXFP4

struct Experts {
    rows: usize,
    cols: usize,
    packed: Vec<Pages>,
    scales: Vec<Pages>,
}

impl Experts {
    fn new(rows: usize, cols: usize, copies: usize) -> Self {
        let fill = |len: usize, copy: usize, byte: fn(u32) -> u8| {
            let mut pages = Pages::new(len);
            for (i, to) in (copy as u32..).zip(pages.get_mut()) {
                *to = byte(i.wrapping_mul(2_654_435_761) >> 13);
            }
            pages
        };
        Self {
            rows,
            cols,
            packed: (0..copies).map(|c| fill(rows * cols / 2, c, |i| i as u8)).collect(),
            scales: (0..copies).map(|c| fill(rows * cols / 32, c, |i| 118 + (i % 8) as u8)).collect(),
        }
    }

    fn matrix(&self, call: usize) -> Option<Mxfp4<'_>> {
        let copy = call % self.packed.len();
        Mxfp4::new(self.packed[copy].get(), self.scales[copy].get(), self.rows, self.cols).ok()
    }
}

struct Mxfp4Product {
    kernels: Kernels,
    experts: Arc<Experts>,
    vectors: Vec<Pages>,
}

impl Work for Mxfp4Product {
    fn worker(&self, thread: usize, threads: usize) -> Box<dyn FnMut(usize) + '_> {
        let rows = part(self.experts.rows, 8, thread, threads);
        let count = self.vectors.len();
        let mut y = vec![0.0; rows.len() * count];
        let xs: Vec<Q23<'_>> =
            self.vectors.iter().filter_map(|bytes| Q23::new(bytes.get(), self.experts.cols).ok()).collect();
        Box::new(move |call| {
            if let Some(w) = self.experts.matrix(call) {
                let out = Out::new(&mut y, rows.len(), rows.len(), count);
                self.kernels.mxfp4_matmul(w, rows.clone(), &xs, out);
            }
            black_box(&mut y);
        })
    }
}

struct Mxfp4Reference {
    kernels: Kernels,
    experts: Arc<Experts>,
    x: Vec<f32>,
}

impl Work for Mxfp4Reference {
    fn worker(&self, thread: usize, threads: usize) -> Box<dyn FnMut(usize) + '_> {
        let rows = part(self.experts.rows, 8, thread, threads);
        let mut y = vec![0.0; rows.len()];
        Box::new(move |call| {
            if let Some(w) = self.experts.matrix(call) {
                self.kernels.mxfp4_f64_lanes(w, rows.clone(), &self.x, &mut y);
            }
            black_box(&mut y);
        })
    }
}

fn mxfp4_cases(kernels: Kernels) -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, cols) in [(3072, 3584), (3584, 3072)] {
        let bytes = rows * cols / 2 + rows * cols / 32;
        let cold = Arc::new(Experts::new(rows, cols, COLD_BYTES / bytes));
        let hot = Arc::new(Experts::new(rows / 12, cols, 1));
        for (batch, is_cold) in [(1, true), (1, false), (4, true), (8, true), (16, true)] {
            let experts = if is_cold { &cold } else { &hot };
            let x = inputs(cols, batch);
            let vectors = x
                .chunks(cols)
                .map(|x| {
                    let mut pages = Pages::new(q23_bytes(cols));
                    kernels.q23_quantize(x, pages.get_mut());
                    pages
                })
                .collect();
            let flops = (2 * experts.rows * cols) as f64;
            let reference = Mxfp4Reference { kernels, experts: experts.clone(), x: x[..cols].to_vec() };
            cases.push(Case {
                kernel: "mxfp4",
                shape: format!("{}x{cols}", experts.rows),
                batch,
                cold: is_cold,
                flops: flops * batch as f64,
                bytes: flops / 2.0 * (0.5 + 1.0 / 32.0),
                work: Box::new(Mxfp4Product { kernels, experts: experts.clone(), vectors }),
                reference: Some((Box::new(reference), flops)),
            });
        }
    }
    cases
}

struct Quantize {
    kernels: Kernels,
    x: Vec<f32>,
}

impl Work for Quantize {
    fn worker(&self, _: usize, _: usize) -> Box<dyn FnMut(usize) + '_> {
        let mut bytes = Pages::new(q23_bytes(self.x.len()));
        Box::new(move |_| {
            self.kernels.q23_quantize(&self.x, bytes.get_mut());
            black_box(bytes.get_mut());
        })
    }
}

fn quantize_cases(kernels: Kernels) -> Vec<Case> {
    let cols = 3584;
    vec![Case {
        kernel: "q23_quantize",
        shape: format!("{cols}"),
        batch: 1,
        cold: false,
        flops: cols as f64,
        bytes: (cols * 4) as f64,
        work: Box::new(Quantize { kernels, x: inputs(cols, 1) }),
        reference: None,
    }]
}

// ---- bf16

/// Which stored form a product takes.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Rows,
    Tiled,
    Hn,
}

struct Dense {
    kernels: Kernels,
    form: Form,
    bytes: Arc<Pages>,
    rows: usize,
    cols: usize,
    x: Vec<f32>,
    /// Every call takes the next part of the rows, of this many.
    parts: usize,
}

impl Dense {
    fn matrix(&self) -> Option<Matrix<'_>> {
        let (bytes, rows, cols) = (self.bytes.get(), self.rows, self.cols);
        match self.form {
            Form::Rows => Bf16Rows::new(bytes, rows, cols).ok().map(Matrix::Bf16Rows),
            Form::Tiled => Bf16Tiled::new(bytes, rows, cols).ok().map(Matrix::Bf16Tiled),
            Form::Hn => HnTiled::new(bytes, rows, cols).ok().map(Matrix::Hn),
        }
    }
}

impl Work for Dense {
    fn worker(&self, thread: usize, threads: usize) -> Box<dyn FnMut(usize) + '_> {
        let rows_of_call = self.rows / self.parts;
        let rows = part(rows_of_call, 16, thread, threads);
        let count = self.x.len() / self.cols;
        let mut y = vec![0.0; rows.len() * count];
        let matrix = self.matrix();
        Box::new(move |call| {
            if let Some(w) = matrix {
                let first = call % self.parts * rows_of_call;
                let out = Out::new(&mut y, rows.len(), rows.len(), count);
                let x = Columns::packed(&self.x, self.cols, count);
                self.kernels.matmul(w, first + rows.start..first + rows.end, x, out);
            }
            black_box(&mut y);
        })
    }
}

struct DenseReference {
    kernels: Kernels,
    bytes: Arc<Pages>,
    rows: usize,
    cols: usize,
    x: Vec<f32>,
    parts: usize,
}

impl Work for DenseReference {
    fn worker(&self, thread: usize, threads: usize) -> Box<dyn FnMut(usize) + '_> {
        let rows_of_call = self.rows / self.parts;
        let rows = part(rows_of_call, 16, thread, threads);
        let mut y = vec![0.0; rows.len()];
        let matrix = Bf16Rows::new(self.bytes.get(), self.rows, self.cols).ok();
        Box::new(move |call| {
            if let Some(w) = matrix {
                let first = call % self.parts * rows_of_call;
                self.kernels.bf16_f64_lanes(w, first + rows.start..first + rows.end, &self.x, &mut y);
            }
            black_box(&mut y);
        })
    }
}

/// `batches` on the largest matrices of a layer from memory, and one vector on a part that stays in the cache.
fn dense_cases(kernels: Kernels, form: Form, kernel: &'static str, batches: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, cols, cold, parts) in [(12288, 7168, true, 4), (7168, 12288, true, 4), (64, 7168, false, 1)] {
        let row_major = Arc::new(bf16_bytes(rows, cols));
        let Some((stored, bytes)) = store(kernels, &row_major, (rows, cols), form) else { continue };
        for &batch in if cold { batches } else { &[1] } {
            let flops = (2 * rows / parts * cols) as f64;
            let x = inputs(cols, batch);
            let reference = DenseReference {
                kernels,
                bytes: row_major.clone(),
                rows,
                cols,
                x: x[..cols].to_vec(),
                parts,
            };
            cases.push(Case {
                kernel,
                shape: format!("{rows}x{cols}"),
                batch,
                cold,
                flops: flops * batch as f64,
                bytes: bytes as f64 / parts as f64,
                work: Box::new(Dense { kernels, form, bytes: stored.clone(), rows, cols, x, parts }),
                reference: Some((Box::new(reference), flops)),
            });
        }
    }
    cases
}

/// The matrix in the stored form, and its bytes.
fn store(
    kernels: Kernels,
    row_major: &Arc<Pages>,
    (rows, cols): (usize, usize),
    form: Form,
) -> Option<(Arc<Pages>, usize)> {
    let src = Bf16Rows::new(row_major.get(), rows, cols).ok()?;
    match form {
        Form::Rows => Some((row_major.clone(), row_major.get().len())),
        Form::Tiled => {
            let mut pages = Pages::new(tiled_bytes(rows, cols).ok()?);
            kernels.tile_rows(src, pages.get_mut());
            let bytes = pages.get().len();
            Some((Arc::new(pages), bytes))
        }
        Form::Hn => {
            let mut code = vec![0; hn_encoded_max(rows, cols).ok()?];
            let bytes = hn_encode(src, &mut code)?;
            let mut pages = Pages::new(bytes);
            pages.get_mut().copy_from_slice(&code[..bytes]);
            Some((Arc::new(pages), bytes))
        }
    }
}

fn tiled_cases(kernels: Kernels) -> Vec<Case> {
    dense_cases(kernels, Form::Tiled, "bf16_tiled", &[1, 4, 8, 12])
}

fn hn_cases(kernels: Kernels) -> Vec<Case> {
    dense_cases(kernels, Form::Hn, "bf16_hn", &[1, 8])
}

fn rows_cases(kernels: Kernels) -> Vec<Case> {
    dense_cases(kernels, Form::Rows, "bf16_rows", &[1, 8])
}

struct Transposed {
    kernels: Kernels,
    bytes: Pages,
    rows: usize,
    cols: usize,
    x: Vec<f32>,
}

impl Work for Transposed {
    fn worker(&self, thread: usize, threads: usize) -> Box<dyn FnMut(usize) + '_> {
        let mut y = vec![0.0; self.cols];
        let matrix = Bf16Rows::new(self.bytes.get(), self.rows, self.cols).ok();
        let heads = self.rows / self.x.len();
        Box::new(move |_| {
            if let Some(w) = matrix {
                for head in part(heads, 1, thread, threads) {
                    let first = head * self.x.len();
                    let rows = first..first + self.x.len();
                    self.kernels.matmul_t(Matrix::Bf16Rows(w), rows, &self.x, &mut y);
                }
            }
            black_box(&mut y);
        })
    }
}

fn transposed_cases(kernels: Kernels) -> Vec<Case> {
    let (heads, nope, rank) = (96, 128, 512);
    let rows = heads * nope;
    vec![Case {
        kernel: "matmul_t",
        shape: format!("{heads} x {nope}x{rank}"),
        batch: 1,
        cold: false,
        flops: (2 * rows * rank) as f64,
        bytes: (2 * rows * rank) as f64,
        work: Box::new(Transposed {
            kernels,
            bytes: bf16_bytes(rows, rank),
            rows,
            cols: rank,
            x: inputs(nope, 1),
        }),
        reference: None,
    }]
}

struct Tile {
    kernels: Kernels,
    bytes: Pages,
    rows: usize,
    cols: usize,
}

impl Work for Tile {
    fn worker(&self, thread: usize, threads: usize) -> Box<dyn FnMut(usize) + '_> {
        let rows = part(self.rows, 16, thread, threads);
        let row_bytes = self.cols * 2;
        let src = Bf16Rows::new(
            &self.bytes.get()[rows.start * row_bytes..rows.end * row_bytes],
            rows.len(),
            self.cols,
        );
        let mut tiled = Pages::new(rows.len() * row_bytes);
        Box::new(move |_| {
            if let Ok(src) = src {
                self.kernels.tile_rows(src, tiled.get_mut());
            }
            black_box(tiled.get_mut());
        })
    }
}

fn tile_cases(kernels: Kernels) -> Vec<Case> {
    let (rows, cols) = (4096, 7168);
    vec![Case {
        kernel: "tile_rows",
        shape: format!("{rows}x{cols}"),
        batch: 1,
        cold: true,
        flops: 0.0,
        bytes: (rows * cols * 4) as f64,
        work: Box::new(Tile { kernels, bytes: bf16_bytes(rows, cols), rows, cols }),
        reference: None,
    }]
}
