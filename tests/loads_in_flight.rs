//! No MFMA loop in the AMD code objects waits for loads that are meant to be in flight. The loops issue loads many
//! MFMAs before they need the data. A single instruction that the compiler places badly can make a loop wait for all
//! its loads, which costs a memory latency in each iteration and does not show in llvm-mca.
//!
//! Each loop states for how many MFMAs its loads are in flight (`loads_in_flight_for` in `kernels/cdna/mfma.h`,
//! computed from the constants of its pipeline). From that follows the least `vmcnt` that each of its waits may have.
//!
//! Without code objects for AMD only the sample at the end is checked; `make test-gpu` builds them.

#[path = "common/amd_loops.rs"]
mod amd_loops;
#[path = "common/code_objects.rs"]
mod code_objects;

use amd_loops::{Function, Loop, Mark, functions, loops, marks, parse, waits};
use code_objects::code_objects;
use getp::backend::gpu::catalogue;
use getp::backend::gpu::code_objects::CodeObject;
use std::collections::BTreeMap;

#[test]
#[cfg_attr(
    not(getp_emulated_code_objects),
    ignore = "this build has no code objects for AMD; make test-gpu makes one that has"
)]
fn no_loop_waits_for_loads_meant_to_be_in_flight() {
    println!(
        "{:<34} {:<8} {:>5} {:>5} {:>9} {:>6} {:>6}",
        "loop of kernel", "target", "MFMA", "loads", "in flight", "vmcnt", "least"
    );
    let mut faults = Vec::new();
    let mut checked = BTreeMap::<&str, usize>::new();
    let emulated = catalogue::table_of("simt").unwrap().name;
    for object in code_objects().iter().filter(|object| object.family == emulated) {
        let marks = marks(object);
        let checked = checked.entry(object.arch).or_default();
        for function in functions(object) {
            faults.extend(faults_of(&function, object, &marks, checked));
        }
    }
    assert!(!checked.is_empty(), "there are no code objects for AMD");
    // A disassembly that nobody can read has no loops.
    assert!(checked.values().all(|&loops| loops > 0), "{checked:?}");
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

/// Prints a line for each of the function's loops that load, and counts it. Returns what is wrong with them.
fn faults_of(function: &Function, object: &CodeObject, marks: &[Mark], checked: &mut usize) -> Vec<String> {
    let place = |address: u64| format!("{} on {} at {address:#x}", function.name, object.arch);
    let (mut faults, mut seen) = (Vec::new(), Vec::<Mark>::new());
    for found in loops(function).iter().filter(|found| found.loads() > 0) {
        let mut mine = marks.iter().filter(|mark| found.contains(mark.address));
        let Some(mark) = mine.next() else {
            faults.push(format!("{}: a loop says nothing of its loads", place(found.span.0)));
            continue;
        };
        // An outer loop, whose inner loop was checked already.
        if seen.iter().any(|other| found.contains(other.address)) {
            continue;
        }
        seen.push(*mark);
        *checked += 1;
        println!("{}", row(&function.name, object.arch, found, mark));
        faults.extend(drained(found, mark).map(|(at, words)| format!("{}: {words}", place(at))));
    }
    faults
}

fn drained(found: &Loop, mark: &Mark) -> impl Iterator<Item = (u64, String)> {
    let mfmas = mark.mfmas;
    let waits = waits(&found.way, mfmas).into_iter();
    waits.filter(|wait| wait.vmcnt < wait.least).map(move |wait| {
        let words = format!(
            "waits for vmcnt({}), but loads are to be in flight for {mfmas} MFMAs: at least vmcnt({})",
            wait.vmcnt, wait.least
        );
        (wait.address, words)
    })
}

/// The wait with the least slack.
fn row(name: &str, arch: &str, found: &Loop, mark: &Mark) -> String {
    let tightest = waits(&found.way, mark.mfmas).into_iter();
    let tightest = tightest.min_by_key(|wait| wait.vmcnt as isize - wait.least as isize);
    let (vmcnt, least) = tightest.map_or(("-".into(), "-".into()), |wait| {
        (wait.vmcnt.to_string(), wait.least.to_string())
    });
    let (mfmas, loads, ahead) = (found.mfmas(), found.loads(), mark.mfmas);
    format!("{name:<34} {arch:<8} {mfmas:>5} {loads:>5} {ahead:>9} {vmcnt:>6} {least:>6}")
}

/// A loop of two loads and two MFMAs, each load meant to be in flight for one, with a branch round the second MFMA.
fn sample(first_wait: usize, second_wait: usize) -> Loop {
    let lines = [
        "global_load_dwordx4 v[0:3], v8, s[0:1]",
        &format!("s_waitcnt vmcnt({first_wait})"),
        "v_mfma_f32_16x16x16f16 a[0:3], v[4:5], v[6:7], a[0:3]",
        "global_load_dwordx4 v[4:7], v8, s[0:1]",
        &format!("s_waitcnt vmcnt({second_wait}) lgkmcnt(0)"),
        "s_cbranch_scc1 1 // 000000000114: BF850001 <k+0x1c>",
        "v_mfma_f32_16x16x16f16 a[0:3], v[0:1], v[2:3], a[0:3]",
        "s_cbranch_scc0 65528 // 00000000011C: BF84FFF8 <k>",
        "s_endpgm",
    ];
    let mut text = String::from("0000000000000100 <k>:\n");
    for (i, line) in lines.iter().enumerate() {
        let comment = format!("// {:012X}: 00000000", 0x100 + 4 * i);
        text += &format!("\t{line}{}\n", if line.contains("//") { "" } else { &comment });
    }
    let function = parse(&text).pop().expect("one function");
    loops(&function).pop().expect("one loop")
}

#[test]
fn a_drained_loop_is_found() {
    let mark = Mark {
        address: 0x100,
        mfmas: 1,
    };
    let faults = |first, second| {
        drained(&sample(first, second), &mark)
            .map(|(at, _)| at)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        sample(1, 1).mfmas(),
        2,
        "the way past the second MFMA is not the loop's usual one"
    );
    assert!(faults(1, 1).is_empty());
    assert_eq!(faults(0, 1), [0x104]);
    assert_eq!(faults(1, 0), [0x110]);
    assert_eq!(faults(0, 0), [0x104, 0x110]);
}
