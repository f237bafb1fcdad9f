//! The ladders of `cargo bench --bench gpu -- kernel`: every kernel of every family can be made the one that the
//! library launches, and what is on no ladder is known.

#[path = "../benches/gpu/kernel/forced.rs"]
mod forced;
#[path = "../benches/gpu/kernel/ladder.rs"]
mod ladder;
#[path = "../benches/gpu/kernel/launched.rs"]
mod launched;

use forced::Forced;
use getp::backend::gpu::attention_runs::RunVerdict;
use getp::backend::gpu::catalogue::{Op, TABLES};
use getp::backend::gpu::family::{self, verdict::Verdict};
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
                        context: 528,
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

/// Of the kernels for norm, router and attention one is said to be taken, in as many blocks as are launched, and each
/// has a reason. Rows that decode are split into longer and shorter runs, for each reason that there is.
#[test]
fn choices_have_reasons() {
    let config = ModelConfig::preset_20b();
    let ladders = [
        Ladder::Norm,
        Ladder::Router,
        Ladder::AttentionDecode,
        Ladder::AttentionPrefill,
    ];
    let mut of_runs = Vec::new();
    for &family in family::FAMILIES {
        let target = &Target {
            family,
            multiprocessors: 132,
        };
        for ladder in ladders {
            for (exact, windowed) in [(false, false), (false, true), (true, false)] {
                for rows in ROWS {
                    let case = Case {
                        target,
                        config: &config,
                        ladder,
                        setup: Setup::new(exact),
                        windowed,
                        rows,
                        context: 528,
                    };
                    of_runs.extend(case.runs().map(|(_, verdict)| verdict));
                    let said = case.said().unwrap();
                    let taken = said.iter().filter_map(|(kernel, verdict)| match verdict {
                        Verdict::Taken(blocks, _) => Some((kernel.name(), *blocks)),
                        _ => None,
                    });
                    let launched = case.launched(Op::Norm).unwrap();
                    let launched = launched.iter().filter(|launch| launch.kernel.op != Op::Route);
                    let launched: Vec<_> = launched.map(|launch| (launch.kernel.name(), launch.blocks)).collect();
                    assert_eq!(taken.collect::<Vec<_>>(), launched, "{} of {rows} rows", ladder.name());
                    let of_ladder = ladder.kernels(family.table()).into_iter();
                    let of_ladder = of_ladder.filter(|kernel| case.setup.has(ladder, kernel) && kernel.op != Op::Route);
                    for kernel in of_ladder.filter(|kernel| kernel.takes(&config).is_ok()) {
                        assert!(said.iter().any(|(of, _)| of.index == kernel.index), "{}", kernel.name());
                    }
                }
            }
        }
    }
    use RunVerdict::{Balances, Least, TooLong, TooShort};
    let all = [Balances, TooLong, Least, TooShort];
    assert!(all.iter().all(|verdict| of_runs.contains(verdict)), "{of_runs:?}");
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
        // It calls the functions of kernels that are on ladders.
        Op::OneLaunch,
        // It gives sums of a part of a row's keys, which attention_decode folds.
        Op::AttentionShared,
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
