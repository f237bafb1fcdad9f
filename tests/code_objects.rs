//! The kernels' resources, read from the code objects embedded in the library: a table of registers, shared memory,
//! scratch and spills. Any scratch or spill fails, since it is memory traffic that the kernel's author did not intend.
//!
//! Without code objects (no feature `hip` or `cuda`, no `GETP_HIP_ARCHS` or `GETP_CUDA_ARCHS`) nothing is checked;
//! `make test-gpu` builds them.

use getp::backend::gpu::code_objects::{CODE_OBJECTS, CodeObject};
use object::read::elf::{ElfFile64, NoteIterator};
use object::{LittleEndian, Object, ObjectSection, ObjectSymbol};
use rmpv::Value;
use std::collections::BTreeMap;

/// What a kernel takes.
#[derive(Debug, Default)]
struct Kernel {
    name: String,
    /// Vector registers a lane; on AMD accumulation registers among them.
    registers: u64,
    accumulators: u64,
    scalars: u64,
    /// Bytes of shared memory, without what is asked for at launch; on NVIDIA with the 1024 that CUDA keeps for itself.
    shared_bytes: u64,
    scratch_bytes: u64,
    spills: u64,
    /// Waves that a SIMD's registers hold, or warps a multiprocessor's quarter.
    waves: u64,
}

#[test]
fn no_kernel_spills() {
    println!(
        "{:<32} {:<8} {:>5} {:>5} {:>5} {:>7} {:>8} {:>7} {:>6}",
        "kernel", "target", "VGPR", "AGPR", "SGPR", "LDS", "scratch", "spills", "waves"
    );
    let mut faults = Vec::new();
    for object in CODE_OBJECTS {
        let kernels = kernels(object);
        assert!(!kernels.is_empty(), "{} for {} has no kernel", object.file, object.arch);
        for kernel in kernels {
            println!("{}", row(&kernel, object.arch));
            if kernel.scratch_bytes > 0 || kernel.spills > 0 {
                faults.push(format!("{} on {}", kernel.name, object.arch));
            }
        }
    }
    assert!(faults.is_empty(), "scratch or spills: {}", faults.join(", "));
}

fn row(kernel: &Kernel, arch: &str) -> String {
    let Kernel {
        name,
        registers,
        accumulators,
        scalars,
        shared_bytes,
        scratch_bytes,
        spills,
        waves,
    } = kernel;
    format!(
        "{name:<32} {arch:<8} {registers:>5} {accumulators:>5} {scalars:>5} {shared_bytes:>7} \
         {scratch_bytes:>8} {spills:>7} {waves:>6}"
    )
}

fn kernels(object: &CodeObject) -> Vec<Kernel> {
    let elf = ElfFile64::<LittleEndian>::parse(object.image).expect("a code object is an ELF file");
    match object.arch.starts_with("gfx") {
        true => amd(&elf),
        false => nvidia(&elf),
    }
}

/// Out of the note that the HSA runtime reads, a MessagePack map.
fn amd(elf: &ElfFile64<'_, LittleEndian>) -> Vec<Kernel> {
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

fn amd_kernel(map: &Value) -> Kernel {
    let number = |name| field(map, name).and_then(Value::as_u64).unwrap_or(0);
    // gfx90a on: 512 registers a lane and SIMD, given out by eights, for at most 8 waves.
    let registers = number(".vgpr_count");
    Kernel {
        name: field(map, ".name").and_then(Value::as_str).unwrap().to_owned(),
        registers,
        accumulators: number(".agpr_count"),
        scalars: number(".sgpr_count"),
        shared_bytes: number(".group_segment_fixed_size"),
        scratch_bytes: number(".private_segment_fixed_size"),
        spills: number(".vgpr_spill_count") + number(".sgpr_spill_count"),
        waves: (512 / registers.max(1).next_multiple_of(8)).min(8),
    }
}

fn field<'a>(map: &'a Value, name: &str) -> Option<&'a Value> {
    let found = map.as_map()?.iter().find(|(key, _)| key.as_str() == Some(name))?;
    Some(&found.1)
}

/// Out of the section that the CUDA driver reads: attributes of two bytes (form, kind), then two bytes of length, or of
/// value in all forms but one.
fn nvidia(elf: &ElfFile64<'_, LittleEndian>) -> Vec<Kernel> {
    const SIZED: u8 = 4;
    const REGISTERS: u8 = 0x2f;
    const FRAME_BYTES: u8 = 0x11;
    let section = elf.section_by_name(".nv.info").expect("a cubin has .nv.info");
    let mut data = section.data().unwrap();
    let mut kernels = BTreeMap::<u32, Kernel>::new();
    while let [form, kind, low, high, rest @ ..] = data {
        let length = usize::from(u16::from_le_bytes([*low, *high]));
        let (payload, next) = rest.split_at(if *form == SIZED { length } else { 0 });
        data = next;
        if let (REGISTERS | FRAME_BYTES, Some((symbol, value))) = (*kind, pair(payload)) {
            let kernel = kernels.entry(symbol).or_default();
            match *kind {
                REGISTERS => kernel.registers = u64::from(value),
                // Spills lie in the frame.
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
        kernel.shared_bytes = shared.map_or(0, |section| section.size());
        // 16384 registers a quarter, given to a warp by eights a lane, for at most 16 warps.
        kernel.waves = (512 / kernel.registers.max(1).next_multiple_of(8)).min(16);
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
