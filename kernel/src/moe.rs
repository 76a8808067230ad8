//! The router's choice of experts and the weighted sum of their outputs.

use crate::dispatch::{Kernels, dispatch};
use crate::lanes::{LANES, Lanes};

/// How [`router_choose`] chooses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterParams {
    /// Experts chosen for a token.
    pub top_k: usize,
    /// Groups of equal size that the experts are divided into; 1 for no groups.
    pub groups: usize,
    /// Groups whose experts may be chosen.
    pub groups_kept: usize,
    /// Whether the chosen weights are made to sum to one (only where `top_k` > 1).
    pub renormalize: bool,
    /// Factor on the weights, applied last.
    pub scaling: f32,
}

/// Chooses experts for one token.
///
/// choice = scores + bias decides which; the weights are the scores themselves, without bias:
/// w = s / (sum of the chosen s + 1e-20) where renormalised, then w * scaling. With `groups_kept` below
/// `groups`, the score of a group is the sum of its two best choices and only the best groups take
/// part. Of equal choices and equal groups the lower number wins.
///
/// `scores` (after the sigmoid), `bias`: `[experts]`; `ids`, `weights`: `[top_k]`, best choice first;
/// `group_scores`: `[groups]`, scratch. The sum runs best choice first. Scores and bias are finite.
///
/// # Panics
/// When the lengths do not match, the groups do not divide the experts, or the kept groups hold fewer
/// than `top_k` experts.
pub fn router_choose(
    scores: &[f32],
    bias: &[f32],
    params: &RouterParams,
    ids: &mut [u16],
    weights: &mut [f32],
    group_scores: &mut [f32],
) {
    let &RouterParams { top_k, groups, groups_kept, renormalize, scaling } = params;
    assert!(scores.len() == bias.len(), "router_choose: scores and bias must have one length");
    assert!(
        ids.len() == top_k && weights.len() == top_k && top_k > 0,
        "router_choose: ids and weights [top_k]"
    );
    assert!(
        groups > 0 && scores.len().is_multiple_of(groups) && group_scores.len() == groups,
        "router_choose: groups divide the experts, group_scores [groups]"
    );
    let size = scores.len() / groups;
    let limited = groups_kept < groups;
    let open = if limited { groups_kept * size } else { scores.len() };
    assert!(open >= top_k, "router_choose: top_k experts among those of the kept groups");
    assert!(scores.len() <= 1 << 16, "router_choose: expert numbers fit 16 bits");
    if limited {
        score_groups(scores, bias, size, group_scores);
    }
    let mut chosen = 0;
    for group in 0..groups {
        if limited && rank(group_scores, group) >= groups_kept {
            continue;
        }
        for expert in group * size..(group + 1) * size {
            chosen = insert(scores[expert] + bias[expert], expert, ids, weights, chosen);
        }
    }
    let mut sum = 0.0;
    for (id, weight) in ids.iter().zip(weights.iter_mut()) {
        *weight = scores[usize::from(*id)];
        sum += *weight;
    }
    for weight in weights {
        let share = if top_k > 1 && renormalize { *weight / (sum + 1e-20) } else { *weight };
        *weight = share * scaling;
    }
}

/// The sum of the two best choices of each group.
fn score_groups(scores: &[f32], bias: &[f32], size: usize, group_scores: &mut [f32]) {
    for (group, score) in group_scores.iter_mut().enumerate() {
        let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for expert in group * size..(group + 1) * size {
            let choice = scores[expert] + bias[expert];
            if choice > best {
                (best, second) = (choice, best);
            } else if choice > second {
                second = choice;
            }
        }
        *score = if size > 1 { best + second } else { best };
    }
}

/// How many groups come before this one: better, or as good with a lower number.
fn rank(group_scores: &[f32], group: usize) -> usize {
    let own = group_scores[group];
    let before = |(other, score): (usize, &f32)| *score > own || (*score == own && other < group);
    group_scores.iter().enumerate().filter(|&pair| before(pair)).count()
}

/// Inserts an expert into the list of the best `chosen` so far, whose choices stand in `choices`; an equal
/// choice goes behind those that came earlier. Returns the new length.
fn insert(choice: f32, expert: usize, ids: &mut [u16], choices: &mut [f32], chosen: usize) -> usize {
    if chosen == ids.len() && choice <= choices[chosen - 1] {
        return chosen;
    }
    let mut at = if chosen == ids.len() { chosen - 1 } else { chosen };
    while at > 0 && choice > choices[at - 1] {
        (ids[at], choices[at]) = (ids[at - 1], choices[at - 1]);
        at -= 1;
    }
    (ids[at], choices[at]) = (expert as u16, choice);
    ids.len().min(chosen + 1)
}

impl Kernels {
    /// y = sum over i of weights_i ys_i, in rank order. `ys`: `[k, n]`, best expert first; `weights`: `[k]`;
    /// `y`: `[n]`, overwritten. One [`fma`](Lanes::fma) chain from +0 per element.
    ///
    /// # Panics
    /// When the lengths do not match.
    pub fn moe_combine(self, ys: &[f32], weights: &[f32], y: &mut [f32]) {
        assert_eq!(ys.len(), weights.len() * y.len(), "moe_combine: ys [k, n], weights [k], y [n]");
        dispatch!(self, moe_combine, (ys: &[f32], weights: &[f32], y: &mut [f32]));
    }
}

#[inline(always)]
fn moe_combine<L: Lanes>(l: L, ys: &[f32], weights: &[f32], y: &mut [f32]) {
    let n = y.len();
    for (c, y) in y.chunks_mut(LANES).enumerate() {
        let start = c * LANES;
        let mut sum = l.splat(0.0);
        for (i, weight) in weights.iter().enumerate() {
            let at = i * n + start;
            sum = l.fma(l.splat(*weight), l.load_some(&ys[at..at + y.len()]), sum);
        }
        l.store_some(sum, y);
    }
}
