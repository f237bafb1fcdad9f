//! Resources of kernels, read from their code objects.

use getp::backend::gpu::code_objects::CodeObject;
use object::read::elf::{ElfFile64, NoteIterator};
use object::{LittleEndian, Object, ObjectSection, ObjectSymbol};
use rmpv::Value;
use std::collections::BTreeMap;

/// A kernel's resources.
#[derive(Debug, Default)]
pub struct Resources {
    pub name: String,
    /// Vector registers a lane; on AMD accumulation registers among them.
    pub registers: u64,
    pub accumulators: u64,
    pub scalars: u64,
    /// Bytes of static shared memory, without what CUDA reserves for itself.
    pub shared_bytes: u64,
    pub scratch_bytes: u64,
    pub spills: u64,
    /// Occupancy that registers allow: waves per SIMD, or warps per multiprocessor's quarter.
    pub waves: u64,
    /// The only number of threads that a block may have.
    pub threads: u64,
    /// The most bytes of shared memory that a block can have, static and dynamic.
    pub shared_limit: u64,
}

/// The kernels of a code object.
pub fn of(object: &CodeObject) -> Vec<Resources> {
    let elf = ElfFile64::<LittleEndian>::parse(object.image).expect("a code object is an ELF file");
    match object.arch.starts_with("gfx") {
        true => amd(&elf),
        false => nvidia(&elf),
    }
}

/// From the note that the HSA runtime reads, a MessagePack map.
fn amd(elf: &ElfFile64<'_, LittleEndian>) -> Vec<Resources> {
    const NT_AMDGPU_METADATA: u32 = 32;
    let section = elf.section_by_name(".note").expect("AMD code objects have notes");
    let data = section.data().unwrap();
    let mut notes = NoteIterator::<object::elf::FileHeader64<LittleEndian>>::new(LittleEndian, 4, data).unwrap();
    let mut kernels = Vec::new();
    while let Some(note) = notes.next().unwrap() {
        if note.n_type(LittleEndian) == NT_AMDGPU_METADATA {
            let metadata = rmpv::decode::read_value(&mut note.desc()).unwrap();
            let list = field(&metadata, "amdhsa.kernels").and_then(Value::as_array).unwrap();
            kernels.extend(list.iter().map(amd_kernel));
        }
    }
    kernels
}

fn amd_kernel(map: &Value) -> Resources {
    let number = |name| field(map, name).and_then(Value::as_u64).unwrap_or(0);
    // From gfx90a on a SIMD has 512 registers per lane, allocated in units of 8, for at most 8 waves.
    let registers = number(".vgpr_count");
    Resources {
        name: field(map, ".name").and_then(Value::as_str).unwrap().to_owned(),
        registers,
        accumulators: number(".agpr_count"),
        scalars: number(".sgpr_count"),
        shared_bytes: number(".group_segment_fixed_size"),
        scratch_bytes: number(".private_segment_fixed_size"),
        spills: number(".vgpr_spill_count") + number(".sgpr_spill_count"),
        waves: (512 / registers.max(1).next_multiple_of(8)).min(8),
        threads: number(".max_flat_workgroup_size"),
        shared_limit: 64 << 10,
    }
}

fn field<'a>(map: &'a Value, name: &str) -> Option<&'a Value> {
    let found = map.as_map()?.iter().find(|(key, _)| key.as_str() == Some(name))?;
    Some(&found.1)
}

/// From a section that the CUDA driver reads: attributes of two bytes (form, kind), then two bytes that are the
/// payload's length in one form and the value in all others.
fn attributes<'a>(elf: &ElfFile64<'a, LittleEndian>, section: &str) -> Vec<(u8, &'a [u8])> {
    const SIZED: u8 = 4;
    let section = elf.section_by_name(section);
    let mut data = section.expect("a cubin has its sections").data().unwrap();
    let mut attributes = Vec::new();
    while let [form, kind, low, high, rest @ ..] = data {
        let length = usize::from(u16::from_le_bytes([*low, *high]));
        let (payload, next) = rest.split_at(if *form == SIZED { length } else { 0 });
        data = next;
        attributes.push((*kind, payload));
    }
    attributes
}

/// The launch bound that a kernel was compiled with, in one dimension.
fn nvidia_threads(elf: &ElfFile64<'_, LittleEndian>, name: &str) -> u64 {
    const MAX_THREADS: u8 = 0x05;
    let mut attributes = attributes(elf, &format!(".nv.info.{name}")).into_iter();
    let bound = attributes.find(|(kind, _)| *kind == MAX_THREADS);
    let (_, payload) = bound.expect("kernels say their threads");
    u64::from(u32::from_le_bytes(payload[..4].try_into().unwrap()))
}

fn nvidia(elf: &ElfFile64<'_, LittleEndian>) -> Vec<Resources> {
    const REGISTERS: u8 = 0x2f;
    const FRAME_BYTES: u8 = 0x11;
    // At the start of the section of a kernel with shared memory, static or dynamic.
    const RESERVED_BYTES: u64 = 1024;
    let mut kernels = BTreeMap::<u32, Resources>::new();
    for (kind, payload) in attributes(elf, ".nv.info") {
        if let (REGISTERS | FRAME_BYTES, Some((symbol, value))) = (kind, pair(payload)) {
            let kernel = kernels.entry(symbol).or_default();
            match kind {
                REGISTERS => kernel.registers = u64::from(value),
                // Spilled registers are in the frame.
                _ => kernel.scratch_bytes = u64::from(value),
            }
        }
    }
    // The compiler's own functions (division, square root) have a frame, their caller's, and no registers of their own.
    kernels.retain(|_, kernel| kernel.registers > 0);
    for (symbol, kernel) in &mut kernels {
        let symbol = elf.symbol_by_index(object::SymbolIndex(*symbol as usize)).unwrap();
        kernel.name = symbol.name().unwrap().to_owned();
        let shared = elf.section_by_name(&format!(".nv.shared.{}", kernel.name));
        kernel.shared_bytes = shared.map_or(0, |section| section.size() - RESERVED_BYTES);
        // A quarter has 16384 registers, allocated in units of 8 per lane, for at most 16 warps.
        kernel.waves = (512 / kernel.registers.max(1).next_multiple_of(8)).min(16);
        kernel.threads = nvidia_threads(elf, &kernel.name);
        kernel.shared_limit = 227 << 10;
    }
    kernels.into_values().collect()
}

/// A symbol's number and a value.
fn pair(payload: &[u8]) -> Option<(u32, u32)> {
    let [symbol, value] = payload.as_chunks::<4>().0 else {
        return None;
    };
    Some((u32::from_le_bytes(*symbol), u32::from_le_bytes(*value)))
}
