//! Why a kernel is chosen: every kernel that could do an operation, whether it may, what it would cost, and which one
//! is taken. It needs no device: without one it is said for the cards that the families' tables name.

use super::ladder::{Ladder, Setup, is_plain};
use super::launched::Case;
use getp::backend::gpu::attention_runs::taken;
use getp::backend::gpu::catalogue::{Card, Kernel, Op};
use getp::backend::gpu::discover;
use getp::backend::gpu::family::{self, verdict::HOLDS_FEWER, verdict::Verdict};
use getp::backend::gpu::shapes::Product;
use getp::backend::gpu::stage::bucket;
use getp::backend::gpu::target::Target;
use getp::options::{Options, Precision};

const PACKED: &str = "the weights are packed for the matrix cores";
const NOT_PACKED: &str = "the weights are not packed for it";
const TOGETHER: &str = "one that norms and routes is taken";
const APART: &str = "none that norms and routes may be";
const ANOTHER_TILE: &str = "another tile is taken for the product";

/// Prints it for each operation or kernel that is named, on each target, for each number of rows.
pub fn run(args: &super::super::Args, part: &super::Args, options: &Options) -> anyhow::Result<()> {
    anyhow::ensure!(!part.names.is_empty(), "say of which operations or kernels");
    let exact = options.precision == Some(Precision::Exact);
    let mut known = false;
    for (device, target) in targets(args, options)? {
        let family = target.family.table();
        for name in &part.names {
            let found = Ladder::ALL.iter().filter_map(|&ladder| {
                let named = |kernel: &&&Kernel| kernel.name() == *name;
                let kernels = ladder.kernels(family);
                match (ladder.name() == name, kernels.iter().find(named)) {
                    (true, _) => Some((ladder, Setup::new(exact))),
                    (_, Some(kernel)) => Some((ladder, Setup::of(kernel, ladder, exact))),
                    _ => None,
                }
            });
            for (ladder, setup) in found {
                known = true;
                for &rows in &part.rows {
                    // A step has a graph for the least of some numbers of rows that it does not exceed.
                    let bucket = bucket(rows, usize::MAX);
                    let case = Case {
                        target: &target,
                        config: &args.config(),
                        ladder,
                        setup,
                        windowed: part.windowed,
                        rows: bucket,
                        context: part.context,
                    };
                    println!(
                        "{} of {rows} rows, as of {bucket}; {}; {}, {device} ({} multiprocessors)",
                        ladder.name(),
                        args.shape,
                        family.name,
                        target.multiprocessors
                    );
                    print(&case)?;
                }
            }
        }
    }
    anyhow::ensure!(known, "no operation and no kernel on a ladder is called so");
    Ok(())
}

/// The devices that can be used, each with its name, or, where there are none or `--family` asks for another's kernels,
/// cards.
fn targets(args: &super::super::Args, options: &Options) -> anyhow::Result<Vec<(String, Target)>> {
    if args.family.is_none()
        && let Ok(usable) = discover::usable(options, None)
        && !usable.drivers.is_empty()
    {
        let devices = usable.drivers.iter().map(|driver| driver.device());
        let of_device = devices.map(|device| Ok((device.name.clone(), Target::of(device)?)));
        return of_device.collect();
    }
    let named = |name: &str| args.family.as_ref().is_none_or(|wanted| wanted == name);
    let families = family::FAMILIES.iter().filter(|family| named(family.table().name));
    let mut found = Vec::new();
    for &family in families {
        // Of so many multiprocessors the choice is the same.
        let alike = |a: &Card, b: &Card| a.multiprocessors == b.multiprocessors;
        for cards in family.table().cards.chunk_by(alike) {
            let names: Vec<_> = cards.iter().map(|card| card.name).collect();
            let target = Target {
                family,
                multiprocessors: cards[0].multiprocessors,
            };
            found.push((names.join(", "), target));
        }
    }
    anyhow::ensure!(
        !found.is_empty(),
        "there is no device, and no family's table names a card"
    );
    Ok(found)
}

fn print(case: &Case<'_>) -> anyhow::Result<()> {
    let &Case { ladder, setup, .. } = case;
    let mut kernels = ladder.kernels(case.target.family.table());
    kernels.retain(|kernel| setup.has(ladder, kernel));
    let verdicts = case.said()?;
    if ladder == Ladder::AttentionDecode {
        let runs = case.runs();
        for (units, verdict) in runs {
            let mark = if units == taken(&runs) { "*" } else { "" };
            println!(
                "  {:<38}{mark:<14}{verdict}",
                format!("split into runs of {units} units")
            );
        }
    }
    let norms = case.target.norm_qkv(case.config, &case.shape(Product::Qkv));
    if let (Ladder::Norm, Some(both)) = (ladder, norms) {
        println!(
            "  attention's norm is a part of {}, but in a stage's first layer",
            both.kernel.name()
        );
    }
    for kernel in kernels {
        let launches = case.launched(kernel.op)?;
        let chosen = launches.iter().find(|launch| launch.kernel.index == kernel.index);
        let verdict = verdicts.iter().find(|(of, _)| of.index == kernel.index);
        let said = match (verdict, kernel.takes(case.config)) {
            (_, Err(beyond)) => format!("refused: {beyond}"),
            (Some((_, verdict)), _) => verdict.to_string(),
            _ if kernel.op == Op::Route && chosen.is_some() => format!("taken: {APART}"),
            _ if kernel.op == Op::Route => Verdict::Passed(TOGETHER).to_string(),
            _ if chosen.is_some() => "taken".to_owned(),
            _ if !kernel.holds(case.rows) => Verdict::Refused(HOLDS_FEWER).to_string(),
            _ if is_plain(kernel) => Verdict::Passed(PACKED).to_string(),
            _ if kernel.op == Op::SortMlp1 => Verdict::Passed(ANOTHER_TILE).to_string(),
            _ => Verdict::Refused(NOT_PACKED).to_string(),
        };
        let mark = chosen.map_or(String::new(), |launch| format!("* {} blocks", launch.blocks));
        println!("  {:<38}{mark:<14}{said}", kernel.name());
    }
    Ok(())
}
