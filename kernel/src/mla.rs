//! Latent attention of one token over a cache of latents, in the absorbed form: per position one normed
//! latent vector and one rope vector, shared by all heads.
//!
//! Heads are taken in groups of 16, positions in blocks of 96, so that a block of the cache is read from
//! memory once and serves all heads from the second-level cache. Scores and softmax have one head per lane,
//! sums over the latents one column per lane: nothing is summed across lanes.

use crate::dispatch::{Kernels, dispatch};
use crate::lanes::{LANES, Lanes};
use crate::math::exp_lanes;

/// Heads of a group: two vectors.
const HEADS: usize = 2 * LANES;
/// Positions of a block. Blocks start at position 0, so a position's block does not depend on the context.
const BLOCK: usize = 96;
/// Columns after which a score's running sum is added to its total: C256, as in the matrix products.
const CHUNK: usize = 256;
/// Positions that are scored together.
const SCORED: usize = 6;
/// Heads whose sums over the latents are kept in registers together, and vectors of columns.
const SUMMED: usize = 4;
const VECTORS: usize = 3;

/// The latent cache of one layer and sequence: `[positions, rank + rope]`.
#[derive(Clone, Copy, Debug)]
pub struct Latent<'a> {
    /// Position after position: `rank` values of the normed latent, then `rope` values of the shared key.
    pub data: &'a [f32],
    /// Width of the latent.
    pub rank: usize,
    /// Width of the shared key.
    pub rope: usize,
}

impl Latent<'_> {
    const fn width(&self) -> usize {
        self.rank + self.rope
    }
}

/// Length, in values, of the scratch space of [`mla_attend`](Kernels::mla_attend).
#[must_use]
pub const fn mla_scratch(heads: usize, rank: usize, rope: usize) -> usize {
    heads.div_ceil(HEADS) * HEADS * (rank + rope + 3) + heads * rank
}

impl Kernels {
    /// Attention of one token: for each head h and the positions s of the cache, ctx_h = sum over s of
    /// softmax_s(scale * (q_h . latent_s)) latent_s, the dot product over rank + rope columns, the sum over
    /// the first rank.
    ///
    /// `q`: `[heads, rank + rope]`, queries with the key projection absorbed; `latent`: the positions that
    /// the token may see, at least one; `ctx`: `[heads, rank]`, overwritten; `scratch`: [`mla_scratch`]
    /// values, contents irrelevant. Any number of heads; each gets the bits it gets alone. Multiples of 16
    /// are fastest.
    ///
    /// Order. A score is C256: total = +0; per chunk of 256 columns a = +0, a = [fma](Lanes::fma)(q, latent,
    /// a) ascending, total += a; then times scale. Positions go in blocks of 96 from position 0: m' = max(m,
    /// the block's scores); what was summed so far is multiplied by e^(m - m'), p_s = e^(score_s - m'); the
    /// block's sums of p_s and of p_s latent_s (an fma chain) run from +0, positions ascending, and are added
    /// to the totals. Totals are two `f32` each, kept by exact two-sums and exact products, so that rounding
    /// does not grow with the context; at the end ctx = (high + low) / (high + low of the sum of p).
    ///
    /// # Panics
    /// When the lengths do not match.
    pub fn mla_attend(self, q: &[f32], latent: Latent<'_>, scale: f32, ctx: &mut [f32], scratch: &mut [f32]) {
        let width = latent.width();
        assert!(latent.rank > 0 && q.len().is_multiple_of(width), "mla_attend: q [heads, rank + rope]");
        let heads = q.len() / width;
        assert!(
            !latent.data.is_empty() && latent.data.len().is_multiple_of(width),
            "mla_attend: the cache holds whole positions, at least one"
        );
        assert!(ctx.len() == heads * latent.rank, "mla_attend: ctx [heads, rank]");
        assert!(
            scratch.len() >= mla_scratch(heads, latent.rank, latent.rope),
            "mla_attend: scratch too short"
        );
        dispatch!(
            self,
            attend,
            (q: &[f32], latent: Latent<'_>, scale: f32, ctx: &mut [f32], scratch: &mut [f32])
        );
    }
}

/// Running totals of the heads of one group.
struct Totals<'a> {
    /// What a larger maximum makes of each head's totals so far.
    rescale: [f32; HEADS],
    /// High and low part of the sum of p times latent: `[heads, rank]`.
    high: &'a mut [f32],
    low: &'a mut [f32],
}

#[inline(always)]
fn attend<L: Lanes>(l: L, q: &[f32], latent: Latent<'_>, scale: f32, ctx: &mut [f32], scratch: &mut [f32]) {
    let (rank, width) = (latent.rank, latent.width());
    let groups = (q.len() / width).div_ceil(HEADS);
    let (panels, scratch) = scratch.split_at_mut(groups * HEADS * width);
    let (softmax, low) = scratch.split_at_mut(groups * HEADS * 3);
    let low = &mut low[..ctx.len()];
    for (q, panel) in q.chunks(HEADS * width).zip(panels.chunks_exact_mut(HEADS * width)) {
        pack(q, width, panel);
    }
    for softmax in softmax.chunks_exact_mut(3 * HEADS) {
        softmax[..HEADS].fill(f32::NEG_INFINITY);
        softmax[HEADS..].fill(0.0);
    }
    ctx.fill(0.0);
    low.fill(0.0);
    for block in latent.data.chunks(BLOCK * width) {
        let parts = ctx.chunks_mut(HEADS * rank).zip(low.chunks_mut(HEADS * rank));
        let parts = parts.zip(softmax.chunks_exact_mut(3 * HEADS)).zip(panels.chunks_exact(HEADS * width));
        for (((high, low), softmax), panel) in parts {
            let mut p = [0.0; BLOCK * HEADS];
            let p = &mut p[..block.len() / width * HEADS];
            score_block(l, panel, block, width, p);
            let rescale = softmax_block(l, scale, p, softmax);
            sum_block(l, p, Latent { data: block, ..latent }, &mut Totals { rescale, high, low });
        }
    }
    let parts =
        ctx.chunks_mut(HEADS * rank).zip(low.chunks(HEADS * rank)).zip(softmax.chunks_exact(3 * HEADS));
    for ((high, low), softmax) in parts {
        for (h, (high, low)) in high.chunks_exact_mut(rank).zip(low.chunks_exact(rank)).enumerate() {
            let sum = l.splat(softmax[HEADS + h] + softmax[2 * HEADS + h]);
            for (high, low) in high.chunks_mut(LANES).zip(low.chunks(LANES)) {
                l.store_some(l.div(l.add(l.load_some(high), l.load_some(low)), sum), high);
            }
        }
    }
}

/// Transposes the queries of up to [`HEADS`] heads: `panel` `[width, HEADS]`, +0 where there is no head.
fn pack(q: &[f32], width: usize, panel: &mut [f32]) {
    panel.fill(0.0);
    for (h, q) in q.chunks_exact(width).enumerate() {
        for (panel, q) in panel.chunks_exact_mut(HEADS).zip(q) {
            panel[h] = *q;
        }
    }
}

/// `p` `[positions, HEADS]` = the unscaled scores of the block's positions.
#[inline(always)]
fn score_block<L: Lanes>(l: L, panel: &[f32], block: &[f32], width: usize, p: &mut [f32]) {
    let whole = p.len() / (SCORED * HEADS);
    let (blocks, rest) = block.split_at(whole * SCORED * width);
    let (ps, p_rest) = p.split_at_mut(whole * SCORED * HEADS);
    for (rows, p) in blocks.chunks_exact(SCORED * width).zip(ps.chunks_exact_mut(SCORED * HEADS)) {
        score_tile::<L, SCORED>(l, panel, rows, width, p);
    }
    for (row, p) in rest.chunks_exact(width).zip(p_rest.chunks_exact_mut(HEADS)) {
        score_tile::<L, 1>(l, panel, row, width, p);
    }
}

/// The scores of `N` positions: one head per lane, columns ascending.
#[inline(always)]
fn score_tile<L: Lanes, const N: usize>(l: L, panel: &[f32], rows: &[f32], width: usize, p: &mut [f32]) {
    let mut totals = [[l.splat(0.0); 2]; N];
    for (chunk, panel) in panel.chunks(CHUNK * HEADS).enumerate() {
        let columns = panel.len() / HEADS;
        let mut parts: [&[f32]; N] = [&[]; N];
        for (n, part) in parts.iter_mut().enumerate() {
            *part = &rows[n * width + chunk * CHUNK..][..columns];
        }
        let mut sums = [[l.splat(0.0); 2]; N];
        for (c, q) in panel.as_chunks::<HEADS>().0.iter().enumerate() {
            let q = [l.load(&q[..LANES]), l.load(&q[LANES..])];
            for (sums, part) in sums.iter_mut().zip(&parts) {
                let x = l.splat(part[c]);
                sums[0] = l.fma(q[0], x, sums[0]);
                sums[1] = l.fma(q[1], x, sums[1]);
            }
        }
        for (totals, sums) in totals.iter_mut().zip(&sums) {
            *totals = [l.add(totals[0], sums[0]), l.add(totals[1], sums[1])];
        }
    }
    for (p, totals) in p.chunks_exact_mut(HEADS).zip(&totals) {
        l.store(totals[0], &mut p[..LANES]);
        l.store(totals[1], &mut p[LANES..]);
    }
}

/// Turns the block's scores into p = e^(scale * score - m'), and brings the running maximum and sum of p up
/// to date. Returns the factor e^(m - m') of each head.
#[inline(always)]
fn softmax_block<L: Lanes>(l: L, scale: f32, p: &mut [f32], softmax: &mut [f32]) -> [f32; HEADS] {
    let scale = l.splat(scale);
    let mut rescale = [0.0; HEADS];
    for half in [0, LANES] {
        let old = l.load(&softmax[half..]);
        let mut most = old;
        for p in p.chunks_exact_mut(HEADS) {
            let score = l.mul(l.load(&p[half..]), scale);
            l.store(score, &mut p[half..]);
            most = l.max(score, most);
        }
        let mut sum = l.splat(0.0);
        for p in p.chunks_exact_mut(HEADS) {
            let value = exp_lanes(l, l.sub(l.load(&p[half..]), most));
            l.store(value, &mut p[half..]);
            sum = l.add(sum, value);
        }
        let factor = exp_lanes(l, l.sub(old, most));
        l.store(factor, &mut rescale[half..]);
        let (high, low) = (l.load(&softmax[HEADS + half..]), l.load(&softmax[2 * HEADS + half..]));
        let (high, low) = scaled(l, high, low, factor);
        let (high, low) = gained(l, high, low, sum);
        l.store(most, &mut softmax[half..]);
        l.store(high, &mut softmax[HEADS + half..]);
        l.store(low, &mut softmax[2 * HEADS + half..]);
    }
    rescale
}

/// (high + low) * factor; the error of the large product is exact and goes to the low part.
#[inline(always)]
fn scaled<L: Lanes>(l: L, high: L::F, low: L::F, factor: L::F) -> (L::F, L::F) {
    let product = l.mul(high, factor);
    (product, l.fma(low, factor, l.fma(high, factor, l.neg(product))))
}

/// (high + low) + gain; the error of the large sum is exact (two-sum) and goes to the low part.
#[inline(always)]
fn gained<L: Lanes>(l: L, high: L::F, low: L::F, gain: L::F) -> (L::F, L::F) {
    let sum = l.add(high, gain);
    let back = l.sub(sum, high);
    let lost = l.add(l.sub(high, l.sub(sum, back)), l.sub(gain, back));
    (sum, l.add(low, lost))
}

/// Adds the block's sums of p times latent to the totals of the group's heads.
#[inline(always)]
fn sum_block<L: Lanes>(l: L, p: &[f32], block: Latent<'_>, totals: &mut Totals<'_>) {
    let heads = totals.high.len() / block.rank;
    let whole = heads - heads % SUMMED;
    for h in (0..whole).step_by(SUMMED) {
        sum_heads::<L, SUMMED>(l, p, block, totals, h);
    }
    for h in whole..heads {
        sum_heads::<L, 1>(l, p, block, totals, h);
    }
}

/// All columns of `H` heads from head `h` of the group on.
#[inline(always)]
fn sum_heads<L: Lanes, const H: usize>(
    l: L,
    p: &[f32],
    block: Latent<'_>,
    totals: &mut Totals<'_>,
    h: usize,
) {
    let (rank, width) = (block.rank, block.width());
    let mut c = 0;
    while c + VECTORS * LANES <= rank {
        let sums = sum_tile::<L, H, VECTORS>(l, p, block.data, width, h, c);
        settle(l, &sums, rank, totals, h, c);
        c += VECTORS * LANES;
    }
    while c < rank {
        let sums = sum_tile::<L, H, 1>(l, p, block.data, width, h, c);
        settle(l, &sums, rank, totals, h, c);
        c += LANES;
    }
}

/// Sums over the block's positions of p times latent: `H` heads, `V` vectors of columns from `c` on.
#[inline(always)]
fn sum_tile<L: Lanes, const H: usize, const V: usize>(
    l: L,
    p: &[f32],
    block: &[f32],
    width: usize,
    h: usize,
    c: usize,
) -> [[L::F; V]; H] {
    let mut sums = [[l.splat(0.0); V]; H];
    for (row, p) in block.chunks_exact(width).zip(p.chunks_exact(HEADS)) {
        let (row, p) = (&row[c..], &p[h..h + H]);
        let mut x = [l.splat(0.0); V];
        for (v, x) in x.iter_mut().enumerate() {
            // Lanes past the rank hold rope columns; they are never stored.
            *x = if V == 1 { l.load_some(row) } else { l.load(&row[v * LANES..]) };
        }
        for (sums, p) in sums.iter_mut().zip(p) {
            let p = l.splat(*p);
            for (sum, x) in sums.iter_mut().zip(&x) {
                *sum = l.fma(p, *x, *sum);
            }
        }
    }
    sums
}

/// Brings the totals of a tile up to date.
#[inline(always)]
fn settle<L: Lanes, const H: usize, const V: usize>(
    l: L,
    sums: &[[L::F; V]; H],
    rank: usize,
    totals: &mut Totals<'_>,
    h: usize,
    c: usize,
) {
    for (i, sums) in sums.iter().enumerate() {
        let factor = totals.rescale[h + i];
        let columns = (h + i) * rank + c..((h + i) * rank + (c + V * LANES).min(rank));
        let (highs, lows) = (&mut totals.high[columns.clone()], &mut totals.low[columns]);
        for ((high_place, low_place), sum) in highs.chunks_mut(LANES).zip(lows.chunks_mut(LANES)).zip(sums) {
            let (mut high, mut low) = (l.load_some(high_place), l.load_some(low_place));
            if factor != 1.0 {
                (high, low) = scaled(l, high, low, l.splat(factor));
            }
            (high, low) = gained(l, high, low, *sum);
            l.store_some(high, high_place);
            l.store_some(low, low_place);
        }
    }
}
