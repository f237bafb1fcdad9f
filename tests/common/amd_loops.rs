//! The machine code of AMD code objects, disassembled by llvm-objdump: its loops, and their waits for memory.
//!
//! `LLVM_OBJDUMP` names the program; by default it is the newest in PATH.

#![allow(dead_code, reason = "each program that includes this uses a part")]

use getp::backend::gpu::code_objects::CodeObject;
use object::read::elf::ElfFile64;
use object::{LittleEndian, Object, ObjectSection};
use std::collections::VecDeque;
use std::process::Command;

/// One instruction.
#[derive(Clone, Debug)]
pub struct Instruction {
    pub address: u64,
    /// The instruction in assembler syntax, except that a branch's target is not a label.
    pub text: String,
    /// The target address of a branch.
    pub target: Option<u64>,
}

impl Instruction {
    pub fn is_mfma(&self) -> bool {
        self.text.starts_with("v_mfma")
    }

    /// How many runs of 16 along K an MFMA of 16 rows and 16 columns multiplies; 0 for another instruction.
    pub fn k_runs(&self) -> usize {
        let shape = self.text.strip_prefix("v_mfma_f32_16x16x");
        let k = shape.map(|rest| rest.bytes().take_while(u8::is_ascii_digit));
        // Of `16x16x16f16` the digits are 16.
        k.map_or(0, |digits| {
            digits.fold(0, |k, digit| 10 * k + usize::from(digit - b'0')) / 16
        })
    }

    /// Whether `vmcnt` counts the instruction: loads and, on these targets, stores.
    pub fn is_vector_memory(&self) -> bool {
        ["global_", "buffer_", "flat_", "scratch_"]
            .iter()
            .any(|kind| self.text.starts_with(kind))
    }

    /// The operand of `vmcnt`, if the instruction has one: it waits until at most so many loads are in flight.
    pub fn vmcnt(&self) -> Option<usize> {
        let count = self.text.strip_prefix("s_waitcnt")?.split("vmcnt(").nth(1)?;
        count.split(')').next()?.parse().ok()
    }
}

/// A kernel.
#[derive(Debug)]
pub struct Function {
    pub name: String,
    pub code: Vec<Instruction>,
}

/// A loop with MFMAs.
#[derive(Debug)]
pub struct Loop {
    /// Addresses of the first and the last instruction.
    pub span: (u64, u64),
    /// The instructions of one iteration: of the paths through the loop with the most MFMAs the shortest, which is the
    /// path of its steady state.
    pub way: Vec<Instruction>,
}

impl Loop {
    pub fn mfmas(&self) -> usize {
        self.way.iter().filter(|i| i.is_mfma()).count()
    }

    pub fn loads(&self) -> usize {
        self.way.iter().filter(|i| i.is_vector_memory()).count()
    }

    pub fn contains(&self, address: u64) -> bool {
        self.span.0 <= address && address <= self.span.1
    }
}

/// A mark in a loop that states for how many MFMAs its loads are meant to be in flight: see `loads_in_flight_for` in
/// `kernels/cdna/mfma.h`.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    pub address: u64,
    pub mfmas: usize,
}

/// The marks of a code object.
pub fn marks(object: &CodeObject) -> Vec<Mark> {
    let elf = ElfFile64::<LittleEndian>::parse(object.image).expect("a code object is an ELF file");
    let Some(section) = elf.section_by_name(".getp.loops") else {
        return Vec::new();
    };
    let words = section.data().expect("a section has data").as_chunks::<8>().0;
    let pairs = words.as_chunks::<2>().0;
    pairs
        .iter()
        .map(|pair| Mark {
            address: u64::from_le_bytes(pair[0]),
            mfmas: usize::try_from(u64::from_le_bytes(pair[1])).expect("a count"),
        })
        .collect()
}

/// The kernels of a code object.
pub fn functions(object: &CodeObject) -> Vec<Function> {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), object.image).expect("a temporary file can be written");
    let output = Command::new(objdump()).arg("-d").arg(file.path()).output();
    let output = output.expect("llvm-objdump has run before");
    assert!(
        output.status.success(),
        "llvm-objdump -d: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    parse(&String::from_utf8_lossy(&output.stdout))
}

fn objdump() -> String {
    let named = std::env::var("LLVM_OBJDUMP").ok();
    let newest_first = (17..=22).rev().map(|version| format!("llvm-objdump-{version}"));
    let candidates = named.into_iter().chain(newest_first).chain(["llvm-objdump".into()]);
    let runs = |program: &String| Command::new(program).arg("--version").output().is_ok();
    candidates.into_iter().find(runs).expect(
        "llvm-objdump is missing; install it with: apt-get install llvm-22, \
         or name one that knows AMD's targets in LLVM_OBJDUMP",
    )
}

/// llvm-objdump's output: `0000000000001a00 <name>:`, then `instruction // address: code <name+0xoffset>` for each.
pub fn parse(disassembly: &str) -> Vec<Function> {
    let mut functions = Vec::<Function>::new();
    let mut start = 0;
    for line in disassembly.lines() {
        if let Some((address, name)) = line.strip_suffix(">:").and_then(|line| line.split_once(" <")) {
            start = hex(address);
            let (name, code) = (name.to_owned(), Vec::new());
            functions.push(Function { name, code });
        } else if let (Some(function), Some((text, comment))) = (functions.last_mut(), line.split_once("//")) {
            let address = hex(comment.split(':').next().unwrap_or_default().trim());
            let branch = text.trim_start().starts_with("s_branch") || text.trim_start().starts_with("s_cbranch");
            let symbol = comment.split('<').nth(1).and_then(|rest| rest.split('>').next());
            let offset = |symbol: &str| symbol.split_once("+0x").map_or(0, |(_, offset)| hex(offset));
            function.code.push(Instruction {
                address,
                text: text.trim().to_owned(),
                target: symbol.filter(|_| branch).map(|symbol| start + offset(symbol)),
            });
        }
    }
    functions
}

fn hex(text: &str) -> u64 {
    u64::from_str_radix(text, 16).unwrap_or_else(|_| panic!("{text} is not an address"))
}

/// A function's loops with MFMAs, inner loops before the loops around them.
pub fn loops(function: &Function) -> Vec<Loop> {
    let mut spans = Vec::<(u64, u64)>::new();
    for branch in &function.code {
        let Some(head) = branch.target.filter(|&target| target <= branch.address) else {
            continue;
        };
        match spans.iter_mut().find(|span| span.0 == head) {
            Some(span) => span.1 = span.1.max(branch.address),
            None => spans.push((head, branch.address)),
        }
    }
    spans.sort_by_key(|span| span.1 - span.0);
    let loops = spans.into_iter().map(|span| Loop {
        span,
        way: way_round(&function.code, span),
    });
    loops.filter(|found| found.mfmas() > 0).collect()
}

/// The best path from the loop's start to an instruction: its MFMAs, its length, and the instruction before. Paths only
/// go forward, so one pass finds the best path to each instruction; an inner loop is passed through once.
#[derive(Clone, Copy)]
struct Step {
    mfmas: usize,
    length: usize,
    before: Option<usize>,
}

fn way_round(code: &[Instruction], (head, end): (u64, u64)) -> Vec<Instruction> {
    let first = code.partition_point(|i| i.address < head);
    let last = code.partition_point(|i| i.address <= end);
    let code = &code[first..last];
    let mut best = vec![None::<Step>; code.len()];
    let offer = |best: &mut Vec<Option<Step>>, to: usize, step: Step| {
        let rank = |step: &Step| (step.mfmas, usize::MAX - step.length);
        if best[to].as_ref().is_none_or(|found| rank(found) < rank(&step)) {
            best[to] = Some(step);
        }
    };
    let start = Step {
        mfmas: 0,
        length: 0,
        before: None,
    };
    offer(&mut best, 0, start);
    let mut back = None::<(Step, usize)>;
    for (at, instruction) in code.iter().enumerate() {
        let Some(here) = best[at] else { continue };
        let next = Step {
            mfmas: here.mfmas + usize::from(instruction.is_mfma()),
            length: here.length + 1,
            before: Some(at),
        };
        match instruction.target {
            Some(target) if target == head => {
                let better = |(found, _): &(Step, usize)| {
                    (found.mfmas, usize::MAX - found.length) < (next.mfmas, usize::MAX - next.length)
                };
                if back.as_ref().is_none_or(better) {
                    back = Some((next, at));
                }
            }
            Some(target) if target > instruction.address && target <= end => {
                offer(&mut best, code.partition_point(|i| i.address < target), next);
            }
            _ => {}
        }
        let leaves = ["s_branch", "s_endpgm", "s_setpc"]
            .iter()
            .any(|kind| instruction.text.starts_with(kind));
        if !leaves && at + 1 < code.len() {
            offer(&mut best, at + 1, next);
        }
    }
    let mut way = Vec::new();
    let mut at = back.map(|(_, at)| at);
    while let Some(index) = at {
        way.push(code[index].clone());
        at = best[index].and_then(|step| step.before);
    }
    way.reverse();
    way
}

/// A wait for memory in a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    pub address: u64,
    pub vmcnt: usize,
    /// The number of loads that are meant to be in flight here. A smaller `vmcnt` waits for some of them.
    pub least: usize,
}

/// The waits in the iteration `way` of a loop whose loads are meant to be in flight for `mfmas` MFMAs. Loads complete
/// in the order in which they were issued, so a wait for one is a wait for all before it.
pub fn waits(way: &[Instruction], mfmas: usize) -> Vec<Wait> {
    // Enough iterations to reach the loop's steady state.
    const ROUNDS: usize = 4;
    let (mut done, mut under_way, mut waits) = (0, VecDeque::new(), Vec::new());
    for _ in 0..ROUNDS {
        waits.clear();
        for instruction in way {
            done += usize::from(instruction.is_mfma());
            if instruction.is_vector_memory() {
                under_way.push_back(done);
            }
            if let Some(vmcnt) = instruction.vmcnt() {
                let least = under_way.iter().filter(|&&asked| done - asked < mfmas).count();
                let arrived = under_way.len().saturating_sub(vmcnt);
                under_way.drain(..arrived);
                waits.push(Wait {
                    address: instruction.address,
                    vmcnt,
                    least,
                });
            }
        }
    }
    waits
}
