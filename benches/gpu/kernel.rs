//! A kernel's ladder: every kernel that can do an operation, from the plain one that serves any GPU to the fastest.
//! Each runs as the only one of its operation, is compared with float64 by the tests' own bounds, and timed between two
//! events, as a part of a step of a random model. A line a kernel: its time, its rates, its share of what the device
//! can do at most, and how many times as fast as the plain one it is.
//!
//! With `--why` nothing runs: of each kernel is said whether the library may choose it, what it would cost, and which
//! is taken (`why.rs`).
//!
//! In a step of decoding sequences, or of prompts for `attention_prefill`. A kernel that does more than the others is
//! compared with these and what they leave to kernels beside them.

mod forced;
mod ladder;
mod launched;
mod look;
mod why;

use super::ops::{FIGURES, limits, share};
use forced::Forced;
use getp::backend::gpu::catalogue::{self, Kernel, Op, Source};
use getp::backend::gpu::family::Family;
use getp::backend::gpu::memory::SharedDriver;
use getp::backend::gpu::open::context_as;
use getp::batch::Want;
use getp::options::{Options, Precision};
use getp::profile::{Operation, OperationTotal, Roofline};
use ladder::{Ladder, Setup, is_plain};
use look::{Measured, Subject};
use std::time::Duration;

#[derive(clap::Args)]
pub struct Args {
    /// Kernels and operations; without any all are listed.
    names: Vec<String>,
    /// Say of each kernel whether the library may choose it, what it would cost, and which is taken. Nothing runs.
    #[arg(long)]
    why: bool,
    /// Rows of a step: a table for each.
    #[arg(long, value_delimiter = ',', default_value = "1,32,890")]
    rows: Vec<usize>,
    /// Positions before attention's rows.
    #[arg(long, default_value_t = 528)]
    context: usize,
    /// Attention over the sliding window instead of all positions.
    #[arg(long)]
    windowed: bool,
    /// Steps timed, after one that is checked.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
}

pub fn run(args: &super::Args, part: &Args) -> anyhow::Result<()> {
    anyhow::ensure!(part.rows.iter().all(|&rows| rows > 0), "a step has at least one row");
    let options = args.options()?;
    if part.why {
        return why::run(args, part, &options);
    }
    let exact = options.precision == Some(Precision::Exact);
    for driver in super::usable(&options)? {
        let family = args.family_of(&driver)?;
        if part.names.is_empty() {
            list(family.table());
            continue;
        }
        let climbs = part.names.iter().map(|name| Climb::named(name, family.table(), exact));
        let climbs = climbs.collect::<Result<Vec<_>, _>>()?;
        for climb in climbs.into_iter().flatten() {
            climb.run(&driver, family, args, part, &options)?;
        }
    }
    Ok(())
}

/// Prints a family's kernels by operation, and those that no ladder has.
fn list(family: &'static catalogue::Table) {
    println!(
        "kernels of {}; threads, and bytes of dynamic shared memory, of a block",
        family.name
    );
    let line = |kernel: &Kernel| {
        let (name, threads, shared) = (kernel.name(), kernel.threads, kernel.shared_bytes);
        let tile = match kernel.tokens {
            0 => String::new(),
            tokens => format!("{tokens} tokens"),
        };
        let most = kernel
            .most_rows
            .map_or(String::new(), |rows| format!("up to {rows} rows"));
        let made = match kernel.source {
            Source::Written => String::new(),
            Source::Made { maker, parameters } => {
                let list = parameters.list().map(|(name, value)| format!(" {name}={value}"));
                maker.to_owned() + &list.collect::<String>()
            }
        };
        let line = format!(
            "  {name:<36}{tile:>11}{threads:>6}{shared:>8}  {:<32}{most:<17}{made}",
            kernel.file
        );
        println!("{}", line.trim_end());
    };
    for ladder in Ladder::ALL {
        println!("{}: {}", ladder.name(), ladder.says());
        ladder.kernels(family).into_iter().for_each(line);
    }
    println!("on no ladder:");
    let on_one = |op: Op| Ladder::ALL.iter().any(|ladder| ladder.ops().contains(&op));
    family.kernels.iter().filter(|kernel| !on_one(kernel.op)).for_each(line);
}

/// Kernels of a ladder to run, the plain one first.
struct Climb {
    ladder: Ladder,
    setup: Setup,
    rungs: Vec<&'static Kernel>,
    /// The one that was asked for, if not all.
    asked: Option<&'static Kernel>,
}

/// What became of a rung in steps of so many rows.
type Outcome = Result<(Measured, Option<Roofline>), String>;

impl Climb {
    /// That of an operation, or of one kernel: for each operation that it can do, beside the plain one.
    fn named(name: &str, family: &'static catalogue::Table, exact: bool) -> anyhow::Result<Vec<Self>> {
        if let Some(&ladder) = Ladder::ALL.iter().find(|ladder| ladder.name() == name) {
            let setup = Setup::new(exact);
            let mut rungs = ladder.kernels(family);
            rungs.retain(|kernel| setup.has(ladder, kernel));
            return Ok(vec![Self {
                ladder,
                setup,
                rungs,
                asked: None,
            }]);
        }
        let of = |ladder: Ladder| {
            let kernels = ladder.kernels(family);
            let kernel = *kernels.iter().find(|kernel| kernel.name() == name)?;
            let setup = Setup::of(kernel, ladder, exact);
            let mut rungs = kernels;
            rungs.retain(|other| other.index == kernel.index || is_plain(other) && setup.has(ladder, other));
            Some(Self {
                ladder,
                setup,
                rungs,
                asked: Some(kernel),
            })
        };
        let climbs: Vec<_> = Ladder::ALL.into_iter().filter_map(of).collect();
        anyhow::ensure!(
            !climbs.is_empty(),
            "{name} is neither an operation nor a kernel of {} on a ladder; without a name all are listed",
            family.name
        );
        Ok(climbs)
    }

    /// Runs it. Fails if a kernel's result is wrong, or none of those that were asked for has run.
    fn run(
        &self,
        driver: &SharedDriver,
        family: &'static dyn Family,
        args: &super::Args,
        part: &Args,
        options: &Options,
    ) -> anyhow::Result<()> {
        let most = part.rows.iter().copied().max().unwrap_or(1);
        let subject = Subject::new(self.ladder, self.setup, args.config(), most, part)?;
        let mut described = None;
        let mut run_as = |kernel: Option<&'static Kernel>| -> Vec<Outcome> {
            let family: &'static dyn Family = match kernel {
                Some(kernel) => Forced::new(family, self.ladder, kernel),
                None => family,
            };
            let want = match kernel.map(|kernel| kernel.op) {
                Some(Op::Logits | Op::PlainLogits) => Want::Logits,
                _ => Want::Tokens,
            };
            let opened = context_as(driver.clone(), family).map_err(anyhow::Error::from);
            let opened = opened.and_then(|context| subject.run(context, want, options));
            match opened {
                Ok(mut run) => {
                    described.get_or_insert_with(|| run.describe());
                    let roofline = run.roofline();
                    let mut outcome = |&rows: &usize| -> Outcome {
                        refusal(kernel, rows, &subject)?;
                        let measured = run.measure(rows).map_err(|error| format!("failed: {error:#}"))?;
                        Ok((measured, roofline))
                    };
                    part.rows.iter().map(&mut outcome).collect()
                }
                Err(error) => part.rows.iter().map(|_| Err(format!("failed: {error:#}"))).collect(),
            }
        };
        let chosen = run_as(None);
        // The plain ones last: behind one that takes milliseconds the clock stays low for a while.
        let (plain, fast): (Vec<_>, Vec<_>) = self.rungs.iter().partition(|&&kernel| is_plain(kernel));
        let of_fast: Vec<_> = fast.into_iter().map(|&kernel| run_as(Some(kernel))).collect();
        let of_plain: Vec<_> = plain.into_iter().map(|&kernel| run_as(Some(kernel))).collect();
        // Of each rung by rows; the plain ones come first.
        let outcomes: Vec<_> = of_plain.into_iter().chain(of_fast).collect();
        println!("{}: {}", self.ladder.name(), self.ladder.says());
        println!("{}; {}", described.unwrap_or_default(), args.shape);
        if driver.device().runtime == "simt" {
            println!("an emulated device: its times mean nothing");
        }
        let (mut ran, mut wrong) = (0, 0);
        for (i, (&rows, chosen)) in part.rows.iter().zip(chosen).enumerate() {
            let of_rungs: Vec<_> = outcomes.iter().map(|outcomes| &outcomes[i]).collect();
            let [right, false_ones] = self.print(rows, &subject, &of_rungs, &chosen);
            (ran, wrong) = (ran + right, wrong + false_ones);
        }
        let mut rooflines = outcomes.iter().flatten().filter_map(|outcome| outcome.as_ref().ok()?.1);
        if let Some(roofline) = rooflines.next_back() {
            println!("{}", limits(roofline));
        }
        println!("* what the library chooses");
        anyhow::ensure!(wrong == 0, "{wrong} of {}'s results are wrong", self.ladder.name());
        let asked = self.asked.map_or(self.ladder.name().to_owned(), Kernel::name);
        anyhow::ensure!(ran > 0, "{asked} has not run");
        Ok(())
    }

    /// Prints the table of a number of rows. Returns how many of the kernels asked for were right, and how many wrong.
    fn print(&self, rows: usize, subject: &Subject, of_rungs: &[&Outcome], chosen: &Outcome) -> [usize; 2] {
        println!(
            "{:<38}{:>8}{:>10}{:>9}{:>9}{:>9}{:>11}{:>8}",
            format!("{rows} rows"),
            "of bound",
            "us",
            "GB/s",
            "TFLOP/s",
            "% limit",
            "us beside",
            "x plain"
        );
        let chosen = match chosen {
            Ok((measured, _)) => ran(measured, self.ladder),
            Err(_) => Vec::new(),
        };
        let (mut right, mut wrong, mut plain) = (0, 0, None);
        for (kernel, outcome) in self.rungs.iter().zip(of_rungs) {
            let mark = if chosen.contains(&kernel.name()) { "*" } else { "" };
            let name = format!("{}{mark}", kernel.name());
            let said = match outcome {
                Err(why) => Err(why.clone()),
                Ok((measured, _)) if !ran(measured, self.ladder).contains(&kernel.name()) => Err(format!(
                    "the library never runs it there; it ran {}",
                    ran(measured, self.ladder).join(", ")
                )),
                Ok((measured, roofline)) => match &measured.check {
                    Err(why) => {
                        wrong += 1;
                        Err(format!("WRONG: {why}"))
                    }
                    Ok(part) => {
                        right += usize::from(self.asked.is_none_or(|asked| asked.index == kernel.index));
                        Ok((measured, *roofline, *part))
                    }
                },
            };
            match said {
                Err(why) => println!("{name:<38}{why}"),
                Ok((measured, roofline, part)) => {
                    let own = measured.profile.total(self.ladder.timed());
                    let beside = beside(measured, self.ladder);
                    let seconds = (own.time + beside).as_secs_f64();
                    let beside = beside / subject.repeats as u32;
                    if is_plain(kernel) {
                        plain = Some(seconds);
                    }
                    let times = plain.map(|plain| plain / seconds);
                    println!(
                        "{name:<38}{part:>8.2}{}",
                        figures(self.ladder.timed(), &own, roofline, beside, times)
                    );
                }
            }
        }
        [right, wrong]
    }
}

/// Why a kernel must not run in such a step.
fn refusal(kernel: Option<&'static Kernel>, rows: usize, subject: &Subject) -> Result<(), String> {
    let Some(kernel) = kernel else {
        return Ok(());
    };
    kernel.takes(&subject.config).map_err(|beyond| beyond.to_string())?;
    match kernel.most_rows {
        Some(most) if rows > most => Err(format!("for at most {most} rows")),
        _ => Ok(()),
    }
}

/// The kernels that did an operation.
fn ran(measured: &Measured, ladder: Ladder) -> Vec<String> {
    let kernels = measured.profile.kernels.iter();
    let mine = kernels.filter(|kernel| kernel.operation == ladder.timed());
    mine.map(|kernel| kernel.name.clone()).collect()
}

/// The time of what it leaves to others.
fn beside(measured: &Measured, ladder: Ladder) -> Duration {
    let others = ladder.beside().iter();
    others.map(|&other| measured.profile.total(other).time).sum()
}

/// The columns behind a kernel's check.
fn figures(
    operation: Operation,
    own: &OperationTotal,
    roofline: Option<Roofline>,
    beside: Duration,
    times: Option<f64>,
) -> String {
    let us = own.time.as_secs_f64() * 1e6;
    let [time, bytes, flops] = FIGURES.map(|(_, figure)| figure(own, us));
    let limit = roofline.map_or("-".into(), |roofline| share(operation, own, roofline));
    let beside = match beside.as_secs_f64() * 1e6 {
        0.0 => "-".into(),
        us => format!("{us:.1}"),
    };
    let times = times.map_or("-".into(), |times| format!("{times:.2}"));
    format!("{time:>10.1}{bytes:>9.1}{flops:>9.1}{limit:>9}{beside:>11}{times:>8}")
}
