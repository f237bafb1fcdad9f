//! Where a model is cut into stages: a pure function of what its layers cost.

use std::ops::Range;

/// Cuts `layers` layers into `stages` contiguous ranges, none of them empty, so that the costliest is as cheap as can
/// be; of cuts alike the one whose first stages are shorter. `cost` is that of a range; `fits` says whether the device
/// of a stage has room for a range. `None` if no cut fits.
pub fn cut(
    layers: usize,
    stages: usize,
    cost: impl Fn(&Range<usize>) -> f64,
    fits: impl Fn(usize, &Range<usize>) -> bool,
) -> Option<Vec<Range<usize>>> {
    // best[end] is the cheapest way to have the layers before `end` in the stages so far: its cost, and where the last
    // of them begins, for each stage.
    let mut best = vec![None; layers + 1];
    best[0] = Some(0.0);
    let mut begins = Vec::with_capacity(stages);
    for stage in 0..stages {
        let mut next = vec![None; layers + 1];
        let mut begin = vec![0; layers + 1];
        for (end, (next, begin)) in next.iter_mut().zip(&mut begin).enumerate() {
            for (start, before) in best[..end].iter().enumerate() {
                let Some(before) = *before else { continue };
                let range = start..end;
                let costliest = f64::max(before, cost(&range));
                if next.is_none_or(|least| costliest < least) && fits(stage, &range) {
                    (*next, *begin) = (Some(costliest), start);
                }
            }
        }
        best = next;
        begins.push(begin);
    }
    best[layers]?;
    let mut end = layers;
    let mut ranges: Vec<_> = begins
        .iter()
        .rev()
        .map(|begin| {
            let range = begin[end]..end;
            end = range.start;
            range
        })
        .collect();
    ranges.reverse();
    Some(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layers of cost 1, and one of 3 behind the last.
    fn cost(range: &Range<usize>) -> f64 {
        range.len() as f64 + if range.end == 24 { 3.0 } else { 0.0 }
    }

    fn ends(stages: usize, fits: impl Fn(usize, &Range<usize>) -> bool) -> Option<Vec<usize>> {
        cut(24, stages, cost, fits).map(|ranges| {
            let begins: Vec<_> = ranges.iter().map(|range| range.start).collect();
            assert_eq!(begins[0], 0);
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(ranges.iter().all(|range| !range.is_empty()));
            ranges.iter().map(|range| range.end).collect()
        })
    }

    #[test]
    fn the_costliest_stage_is_as_cheap_as_can_be() {
        let anywhere = |_: usize, _: &Range<usize>| true;
        assert_eq!(ends(1, anywhere), Some(vec![24]));
        assert_eq!(ends(2, anywhere), Some(vec![13, 24]));
        assert_eq!(ends(3, anywhere), Some(vec![9, 18, 24]));
        let ends_of = |stages| ends(stages, anywhere).unwrap();
        let costliest = |ends: &[usize]| {
            let starts = [0].into_iter().chain(ends.iter().copied());
            let costs = starts.zip(ends).map(|(start, &end)| cost(&(start..end)));
            costs.fold(0.0, f64::max)
        };
        for stages in 1..=24 {
            // No stage is below the mean, nor cheaper than the last layer with what stands behind it.
            let least = f64::max((27.0 / stages as f64).ceil(), 4.0);
            assert_eq!(costliest(&ends_of(stages)), least, "{stages} stages");
        }
        assert_eq!(ends(25, anywhere), None);
    }

    #[test]
    fn a_small_device_gets_fewer_layers() {
        let small_first = |stage: usize, range: &Range<usize>| stage > 0 || range.len() <= 5;
        assert_eq!(ends(2, small_first), Some(vec![5, 24]));
        let small_last = |stage: usize, range: &Range<usize>| stage < 1 || range.len() <= 2;
        assert_eq!(ends(2, small_last), Some(vec![22, 24]));
        assert_eq!(ends(2, |_, range| range.len() < 12), None);
    }
}
