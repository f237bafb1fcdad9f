//! Resources of kernels, read from their code objects.

use getp::backend::gpu::catalogue::{self, Toolchain};
use getp::backend::gpu::code_objects::{CodeObject, is_ptx};
use object::read::elf::{ElfFile64, NoteIterator};
use object::{LittleEndian, Object, ObjectSection, ObjectSymbol};
use rmpv::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};

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

/// The architectures whose code of a code object is to be looked at: of PTX the oldest, and of what uses matrix cores
/// sm_120, which has limits of its own; with `GETP_TEST_EVERY_ARCH` each of sm_80, sm_89 and sm_120.
pub fn archs(object: &CodeObject) -> Vec<String> {
    let Some(oldest) = object.arch.strip_prefix("compute_") else {
        return vec![object.arch.to_owned()];
    };
    let is_every = std::env::var_os("GETP_TEST_EVERY_ARCH").is_some();
    let later: &[&str] = match oldest {
        _ if is_every => &["80", "89", "120"],
        "80" => &["120"],
        _ => &[],
    };
    let mut numbers = vec![oldest];
    numbers.extend(later);
    numbers.dedup();
    numbers.iter().map(|number| format!("sm_{number}")).collect()
}

/// The kernels of a code object, of a text those that ptxas makes of it for this architecture.
pub fn of(object: &CodeObject, arch: &str) -> Vec<Resources> {
    let assembled = is_ptx(object.arch).then(|| assembled(object, arch));
    let image = assembled.as_ref().map_or(object.image, |cubin| &cubin[..]);
    let elf = ElfFile64::<LittleEndian>::parse(image).expect("a code object is an ELF file");
    let (_, platform) = catalogue::platform_of(object.arch).expect("a family's code");
    match platform.toolchain {
        Toolchain::Hip => amd(&elf),
        Toolchain::Cuda => nvidia(&elf, arch),
    }
}

/// What ptxas makes of a text, once for all tests.
fn assembled(object: &CodeObject, arch: &str) -> Arc<[u8]> {
    type Once = Arc<OnceLock<Arc<[u8]>>>;
    static KEPT: Mutex<BTreeMap<[String; 3], Once>> = Mutex::new(BTreeMap::new());
    let key = [object.arch, object.file, arch].map(String::from);
    let once = Arc::clone(KEPT.lock().unwrap().entry(key).or_default());
    Arc::clone(once.get_or_init(|| assemble(object, arch).into()))
}

/// By ptxas, which lies beside nvcc.
fn assemble(object: &CodeObject, arch: &str) -> Vec<u8> {
    let nvcc = std::env::var_os("NVCC").map_or_else(|| "nvcc".into(), PathBuf::from);
    let folder = tempfile::tempdir().unwrap();
    let [text, cubin] = ["ptx", "cubin"].map(|name| folder.path().join(name));
    std::fs::write(&text, object.image.strip_suffix(b"\0").expect("a text ends with NUL")).unwrap();
    let mut ptxas = Command::new(nvcc.with_file_name("ptxas"));
    let output = ptxas.arg("-arch").arg(arch).arg(&text).arg("-o").arg(&cubin).output();
    let output = output.unwrap_or_else(|error| panic!("{ptxas:?}: {error}; NVCC names the nvcc that it lies beside"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} for {arch}: {said}", object.file);
    std::fs::read(&cubin).unwrap()
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
    // A SIMD of gfx9 has 512 registers per lane, allocated in units of 8, for at most 8 waves; with narrow waves it has
    // at least 1024, in units of 16 at most, for 16.
    let registers = number(".vgpr_count");
    let (all, unit, most) = match number(".wavefront_size") {
        64 => (512, 8, 8),
        _ => (1024, 16, 16),
    };
    Resources {
        name: field(map, ".name").and_then(Value::as_str).unwrap().to_owned(),
        registers,
        accumulators: number(".agpr_count"),
        scalars: number(".sgpr_count"),
        shared_bytes: number(".group_segment_fixed_size"),
        scratch_bytes: number(".private_segment_fixed_size"),
        spills: number(".vgpr_spill_count") + number(".sgpr_spill_count"),
        waves: (all / registers.max(1).next_multiple_of(unit)).min(most),
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

fn nvidia(elf: &ElfFile64<'_, LittleEndian>, arch: &str) -> Vec<Resources> {
    const REGISTERS: u8 = 0x2f;
    const FRAME_BYTES: u8 = 0x11;
    // What is reserved at the start of the section of a kernel with shared memory, static or dynamic, and what a block
    // can have of it; warps of a multiprocessor's quarter.
    let (reserved, limit, warps) = match arch.trim_start_matches("sm_") {
        "75" => (0, 64, 8),
        "80" => (0, 163, 16),
        "89" => (0, 99, 12),
        "90a" => (1024, 227, 16),
        _ => (1024, 99, 12),
    };
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
        kernel.shared_bytes = shared.map_or(0, |section| section.size() - reserved);
        // A quarter has 16384 registers, allocated in units of 8 per lane.
        kernel.waves = (512 / kernel.registers.max(1).next_multiple_of(8)).min(warps);
        kernel.threads = nvidia_threads(elf, &kernel.name);
        kernel.shared_limit = limit << 10;
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
