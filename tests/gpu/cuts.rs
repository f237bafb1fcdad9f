//! How `benches/cdna` cuts experts' rows into tiles for its model of a step: as sort does on the device.

#[path = "../../benches/cdna/cuts.rs"]
mod model;

use super::{context, drivers};
use bytemuck::Zeroable;
use getp::backend::gpu::args::{ExpertCut, GROUP_ALIGN, SortArgs, Step, StepHeader};
use getp::backend::gpu::context::Context;
use getp::backend::gpu::memory::{DeviceBuffer, to_host};
use getp::backend::gpu::shapes::ExpertCuts;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const EXPERTS_PER_TOKEN: usize = 4;

/// The experts of random rows: those with low numbers are chosen more often, the more the larger `skew` is.
fn picks(rng: &mut ChaCha8Rng, rows: usize, experts: usize, skew: f64) -> Vec<i32> {
    let mut all = Vec::new();
    for _ in 0..rows {
        let mut row = Vec::new();
        while row.len() < EXPERTS_PER_TOKEN {
            let expert = (rng.random_range(0.0_f64..1.0).powf(skew) * experts as f64) as i32;
            if !row.contains(&expert) {
                row.push(expert);
            }
        }
        row.sort_unstable();
        all.extend(row);
    }
    all
}

/// What sort makes of rows' experts: the cuts for mlp1 and mlp2.
fn sorted(
    context: &Context,
    picks: &[i32],
    experts: usize,
    how: &ExpertCuts,
    spans: [usize; 2],
) -> [Vec<ExpertCut>; 2] {
    let (stream, rows) = (&context.stream, picks.len() / EXPERTS_PER_TOKEN);
    let header = StepHeader {
        rows: rows as i32,
        ..StepHeader::zeroed()
    };
    let header = DeviceBuffer::of(stream, &[header]).unwrap();
    let picked = DeviceBuffer::of(stream, picks).unwrap();
    let words = |n| DeviceBuffer::<i32>::zeroed(stream, n).unwrap();
    let (offsets, counts, slots) = (words(experts + 1), words(experts), words(picks.len()));
    let slot_rows = words(picks.len() + experts * (GROUP_ALIGN - 1));
    let cuts = [(); 2].map(|()| DeviceBuffer::<ExpertCut>::zeroed(stream, experts).unwrap());
    let args = SortArgs {
        step: Step {
            header: header.values(),
            ..Step::zeroed()
        },
        experts: picked.values(),
        offsets: offsets.values(),
        counts: counts.values(),
        slots: slots.values(),
        n_experts: experts as i32,
        k: EXPERTS_PER_TOKEN as i32,
        slot_rows: slot_rows.values(),
        mlp1_cuts: cuts[0].values(),
        mlp2_cuts: cuts[1].values(),
        mlp1_spans: spans[0] as i32,
        mlp2_spans: spans[1] as i32,
        tile_steps: how.tile_steps as i32,
        places: how.places as i32,
    };
    // SAFETY: it is sort's struct, and what it points to is live until the stream has been waited for.
    unsafe { context.launch(context.target.sort(rows), &args) }.unwrap();
    // SAFETY: each has so many cuts.
    cuts.map(|cuts| unsafe { to_host(stream, cuts.at(), experts) }.unwrap())
}

#[test]
fn the_model_cuts_experts_rows_as_sort_does() {
    let context = context(drivers().remove(0));
    if !context.target.family.table().cuts_experts {
        return;
    }
    let mut rng = ChaCha8Rng::seed_from_u64(35);
    let mut with_more = 0;
    for experts in [32, 128, 250] {
        for (rows, skew) in [(1, 1.0), (64, 2.0), (256, 1.0), (256, 3.0), (890, 1.5), (2_048, 1.0)] {
            for (tile_steps, places) in [(4, 608), (8, 608), (8, 208)] {
                let how = ExpertCuts { tile_steps, places };
                let spans = [45, 23];
                let picks = picks(&mut rng, rows, experts, skew);
                let mut counts = vec![0; experts];
                picks.iter().for_each(|&expert| counts[expert as usize] += 1);
                let cuts = sorted(&context, &picks, experts, &how, spans);
                for (cuts, spans) in cuts.iter().zip(spans) {
                    let expected = model::cut(&counts, &how, spans);
                    let cut = |cut: &ExpertCut| (cut.expert as usize, cut.tiles as usize);
                    let found: Vec<_> = cuts.iter().map(cut).filter(|&(_, tiles)| tiles > 0).collect();
                    let expected: Vec<_> = expected.iter().map(|cut| (cut.group, cut.tiles)).collect();
                    assert_eq!(found, expected, "{rows} rows, {experts} experts, {how:?}");
                    let fewest = |&(expert, _): &(usize, usize)| counts[expert].div_ceil(16 * tile_steps);
                    with_more += usize::from(found.iter().any(|cut| cut.1 > fewest(cut)));
                }
            }
        }
    }
    assert!(with_more > 10, "{with_more}");
}
