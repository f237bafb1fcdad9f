//! Experts' tiles and their order, as `kernels/expert_cuts.h` makes them: `tests/gpu/cuts.rs` compares the two.

use getp::backend::gpu::shapes::ExpertCuts;

/// An expert with rows, and the tiles that these are cut into.
#[derive(Clone, Copy)]
pub struct Cut {
    pub group: usize,
    pub tiles: usize,
}

/// Rows of a step of a tile.
const STEP: usize = 16;

/// Of experts with so many rows, in tiles of which each is `spans` blocks.
pub fn cut(counts: &[usize], how: &ExpertCuts, spans: usize) -> Vec<Cut> {
    let steps = |group: usize| counts[group].div_ceil(STEP);
    let fewest = |group: usize| steps(group).div_ceil(how.tile_steps);
    let more = |group: usize| steps(group).min(fewest(group) + 1);
    let mut order: Vec<usize> = (0..counts.len()).filter(|&group| counts[group] > 0).collect();
    order.sort_by_key(|&group| std::cmp::Reverse(steps(group) * 256 / fewest(group)));
    let with_more = |count: usize| {
        let fine = order.len() - count;
        let cut = move |(place, &group)| Cut {
            group,
            tiles: if place < fine { fewest(group) } else { more(group) },
        };
        order.iter().enumerate().map(cut)
    };
    let cost = |count: usize| {
        let (mut cost, mut blocks, mut round) = (0, 0, 0);
        for Cut { group, tiles } in with_more(count) {
            blocks += tiles * spans;
            while round < blocks {
                cost += 4 * steps(group).div_ceil(tiles) + 5;
                round += how.places;
            }
        }
        cost
    };
    // A wave's lanes try so many numbers.
    let stride = order.len() / 2 / 64 + 1;
    let best = (0..=order.len() / 2).step_by(stride).min_by_key(|&count| cost(count));
    with_more(best.unwrap_or(0)).collect()
}
