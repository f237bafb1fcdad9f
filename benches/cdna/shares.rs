//! How busy the kernels' inner loops keep the matrix cores, by llvm-mca.

#[path = "../../tests/common/amd_loops.rs"]
mod amd_loops;

use amd_loops::{Instruction, Loop, functions, loops};
use getp::backend::gpu::code_objects::CODE_OBJECTS;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

/// Runs of 16 columns, for 16 rows and 16 tokens each, in 64 columns of 32 rows and 16 tokens. An MFMA multiplies one
/// or two of them.
pub const SLAB_RUNS: usize = 8;

/// The share of the matrix cores' peak in the kernels' inner loops. llvm-mca is run when a share is first needed.
pub struct Shares {
    arch: &'static str,
    /// By kernel, inner loops first.
    loops: BTreeMap<String, Vec<Inner>>,
    /// Issue slots, of 4 clocks, that a run takes at least: the fastest MFMA's share for one.
    pub run_slots: f64,
    known: RefCell<BTreeMap<(String, usize), f64>>,
}

struct Inner {
    /// Of 16 tokens that the loop of a product computes.
    steps: usize,
    runs: usize,
    text: String,
}

impl Inner {
    fn new(kernel: &str, found: &Loop) -> Self {
        let runs = found.way.iter().map(|i| i.k_runs()).sum();
        let text: Vec<_> = found.way.iter().map(|i| slot(&i.text)).collect();
        // The loop of a tiled kernel has three slabs of 64 columns. Kernels named n16 compute 16 tokens.
        let stream = kernel.ends_with("_n16");
        Self {
            steps: if stream { 1 } else { runs / (3 * SLAB_RUNS) },
            runs,
            text: text.join("\n") + "\n",
        }
    }
}

impl Shares {
    /// `None` if there is no code for the architecture.
    pub fn new(arch: &'static str) -> Option<Self> {
        let objects = CODE_OBJECTS.iter().filter(|object| object.arch == arch);
        let mut all = BTreeMap::<String, Vec<Inner>>::new();
        // Of each kind of MFMA one.
        let mut kinds = BTreeMap::new();
        for function in objects.flat_map(functions) {
            let found = loops(&function);
            for mfma in found.iter().flat_map(|found| &found.way).filter(|i| i.k_runs() > 0) {
                let name = mfma.text.split_whitespace().next().map(String::from);
                kinds.entry(name).or_insert_with(|| mfma.clone());
            }
            let inner = found.iter().map(|found| Inner::new(&function.name, found));
            all.entry(function.name.clone()).or_default().extend(inner);
        }
        let slots = |mfma: &Instruction| of_mfma(&mca(arch, &mfma.text, 1)) / mfma.k_runs() as f64;
        Some(Self {
            run_slots: kinds.values().map(slots).min_by(f64::total_cmp)?,
            arch,
            loops: all,
            known: RefCell::default(),
        })
    }

    /// For a product's smallest loop that computes at least `steps` steps: the steps that it computes, and its share.
    pub fn of(&self, kernel: &str, steps: usize) -> (usize, f64) {
        let fits = self.loops[kernel]
            .iter()
            .enumerate()
            .filter(|(_, inner)| inner.steps >= steps);
        let (place, inner) = fits
            .min_by_key(|(_, inner)| inner.steps)
            .expect("a tile holds its tokens");
        (inner.steps, self.share(kernel, place))
    }

    /// For a kernel's innermost loop: its runs, and its share.
    pub fn of_innermost(&self, kernel: &str) -> (usize, f64) {
        (self.loops[kernel][0].runs, self.share(kernel, 0))
    }

    fn share(&self, kernel: &str, place: usize) -> f64 {
        let mut known = self.known.borrow_mut();
        *known.entry((kernel.to_owned(), place)).or_insert_with(|| {
            const ROUNDS: usize = 20;
            let inner = &self.loops[kernel][place];
            let cycles = cycles(&mca(self.arch, &inner.text, ROUNDS));
            (inner.runs * ROUNDS) as f64 * self.run_slots / cycles
        })
    }
}

/// Replaces waits and branches by an instruction that takes one issue slot: llvm-mca would make a wait for LDS also
/// wait for loads from memory.
fn slot(text: &str) -> String {
    let alone = text.starts_with("s_waitcnt") || text.starts_with("s_cbranch") || text.starts_with("s_branch");
    String::from(if alone { "s_nop 0" } else { text })
}

/// What llvm-mca says of so many rounds of these instructions.
fn mca(arch: &str, text: &str, rounds: usize) -> String {
    let program = std::env::var("LLVM_MCA").unwrap_or_else(|_| "llvm-mca-22".into());
    let mut child = Command::new(&program)
        .args([
            "-mtriple=amdgcn",
            &format!("-mcpu={arch}"),
            &format!("-iterations={rounds}"),
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}; apt-get install llvm-22, or name one in LLVM_MCA"));
    let mut input = child.stdin.take().expect("piped");
    input.write_all(text.as_bytes()).expect("llvm-mca reads all");
    drop(input);
    let output = child.wait_with_output().expect("llvm-mca ends");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn cycles(said: &str) -> f64 {
    let behind = said.split("Total Cycles:").nth(1);
    let cycles = behind.and_then(|rest| rest.split_whitespace().next());
    cycles.expect("llvm-mca takes the loop").parse().expect("a number")
}

/// The reciprocal throughput of the one MFMA that llvm-mca was asked about: the third column of its first table.
fn of_mfma(said: &str) -> f64 {
    let line = said.lines().find(|line| line.contains("v_mfma"));
    let slots = line.and_then(|line| line.split_whitespace().nth(2));
    slots.expect("llvm-mca takes an MFMA").parse().expect("a number")
}
