//! The ladders of `cargo bench --bench gpu -- kernel`: every kernel of every family can be made the one that the
//! library launches, and what is on no ladder is known.

#[path = "../benches/gpu/kernel/forced.rs"]
mod forced;
#[path = "../benches/gpu/kernel/ladder.rs"]
mod ladder;
#[path = "../benches/gpu/kernel/launched.rs"]
mod launched;

use forced::Forced;
use getp::backend::gpu::catalogue::{Op, TABLES};
use getp::backend::gpu::family;
use getp::backend::gpu::target::Target;
use getp::config::ModelConfig;
use ladder::{Ladder, Setup};
use launched::Case;

const ROWS: [usize; 9] = [1, 2, 8, 32, 64, 128, 256, 890, 1536];

#[test]
fn every_kernel_can_be_forced() {
    let (multiprocessors, config) = (132, ModelConfig::preset_20b());
    let mut forced = 0;
    for &family in family::FAMILIES {
        for ladder in Ladder::ALL {
            for kernel in ladder.kernels(family.table()) {
                let target = Target {
                    family: Forced::new(family, ladder, kernel),
                    multiprocessors,
                };
                let fits = |&&rows: &&usize| kernel.holds(rows);
                // Beyond a row a multiprocessor norm and router are apart, or a block has several.
                let alone = kernel.op == Op::NormRoute && kernel.cluster == 0;
                let several = kernel.per_block > 0;
                let rows = ROWS.iter().filter(fits);
                for &rows in rows.filter(|&&rows| !alone || several == (rows > multiprocessors)) {
                    let case = Case {
                        target: &target,
                        config: &config,
                        ladder,
                        setup: Setup::of(kernel, ladder, false),
                        windowed: false,
                        rows,
                    };
                    let names: Vec<_> = case
                        .launched(kernel.op)
                        .unwrap()
                        .iter()
                        .map(|launch| launch.kernel.name())
                        .collect();
                    assert_eq!(names, [kernel.name()], "{} of {rows} rows", ladder.name());
                    forced += 1;
                }
            }
        }
    }
    assert!(forced > 1000, "{forced}");
}

/// A new operation's kernels get a ladder, or a name here.
#[test]
fn what_is_on_no_ladder_is_known() {
    let none = [
        Op::Upload,
        Op::Embed,
        Op::Settle,
        Op::Sort,
        Op::Gather,
        Op::SortGather,
        Op::RopeStore,
        Op::Argmax,
        Op::ArgmaxLogits,
        Op::Draw,
        Op::DrawWide,
        Op::Score,
        Op::Range,
        Op::Pack,
        Op::MatrixPeak,
        Op::AttentionPeak,
    ];
    for kernel in TABLES.iter().flat_map(|family| family.kernels) {
        let on_one = Ladder::ALL.iter().any(|ladder| ladder.ops().contains(&kernel.op));
        assert!(on_one != none.contains(&kernel.op), "{}", kernel.name());
    }
}
