//! The HIP driver against a libamdhip64 of our own (`emulator/`), found as the real one is: what ROCm is refused, what
//! is read of a device, what a code object's loader says, and what goes wrong with captures.
#![cfg(feature = "hip")]

use bytemuck::NoUninit;
use getp::backend::gpu::catalogue::{Kernel, TABLES, Toolchain, platform_of};
use getp::backend::gpu::code_objects::{CODE_OBJECTS, CodeObject, Image};
use getp::backend::gpu::context::{Capture, Context};
use getp::backend::gpu::discover;
use getp::backend::gpu::driver::DevicePtr;
use getp::backend::gpu::driver::hip;
use getp::backend::gpu::launch::Launch;
use getp::backend::gpu::memory::{DeviceBuffer, to_host};
use getp::backend::gpu::target::Target;
use getp::options::Options;
use object::{File, Object, ObjectSection};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// Set for a process of its own, as a runtime is loaded once a process: it says what to do there.
const CHILD: &str = "GETP_TEST_HIP";

/// A code object whose loader is never asked for its kernels; the driver reads its first bytes.
static IMAGE: [u8; 64] = {
    let mut image = [0; 64];
    (image[0], image[1], image[2], image[3]) = (0x7f, b'E', b'L', b'F');
    image
};

/// Where the emulator is made.
fn made() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("hip")
}

/// Makes what `emulator/Makefile` has a rule for.
fn make(goal: &Path, variables: &[String]) {
    /// One test at a time: they share what all have in common.
    static MAKE: Mutex<()> = Mutex::new(());
    let _made = MAKE.lock().unwrap_or_else(PoisonError::into_inner);
    // tests/programs/amd.sh makes it in the same folder.
    std::fs::create_dir_all(made()).unwrap();
    let output = Command::new("flock")
        .arg(made().join("lock"))
        .args(["make", "--no-print-directory", "-j2", "-C"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hip/emulator"))
        .arg(format!("OBJECTS={}", made().join("objects").display()))
        .args(variables)
        .arg(goal)
        .env_remove("MAKEFLAGS")
        .output()
        .expect("make");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A folder whose `lib` has the runtime under `soname`; `defines`: what `emulator/properties.cpp` is compiled with.
fn runtime(soname: &str, defines: &[&str]) -> PathBuf {
    let folder = made().join(format!("{soname}{}", defines.concat()));
    let variables = [
        format!("BUILD={}", folder.display()),
        format!("SONAME={soname}"),
        format!("DEFINES={}", defines.join(" ")),
    ];
    make(&folder.join("lib").join(soname), &variables);
    folder
}

/// The program that assembles: the one that has compiled the kernels.
fn clang() -> OsString {
    std::env::var_os("GETP_HIPCC").unwrap_or_else(|| "clang-22".into())
}

/// Runs the driver in a process with this environment and returns its output; `scene` says what to do there.
fn play(scene: &str, environment: &[(&str, &str)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "the_child", "--nocapture"]).env(CHILD, scene);
    let output = command
        .env_remove("ROCM_PATH")
        .envs(environment.iter().copied())
        .output();
    let output = output.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let said = text
        .lines()
        .filter_map(|line| line.split_once("child: ").map(|(_, said)| said));
    said.collect::<Vec<_>>().join("\n")
}

/// [`play`] with ROCm 6 and this.
fn play_with(scene: &str, environment: &[(&str, &str)]) -> String {
    let rocm = runtime("libamdhip64.so.6", &["-DR0600"]);
    let mut all = vec![("ROCM_PATH", rocm.to_str().unwrap())];
    all.extend(environment);
    play(scene, &all)
}

/// Not a test by itself: what [`play`] runs.
#[test]
fn the_child() {
    match std::env::var(CHILD).as_deref() {
        Ok("list") => say(hip::list().map(|found| format!("{found:?}"))),
        Ok("open") => say(hip::open(0).map(|_| "open")),
        Ok("usable") => say(discover::usable(&Options::default(), None).map(|usable| usable.lines.join("; "))),
        Ok("link") => say(link()),
        Ok("load") => say(context(&IMAGE).map(|_| "loaded")),
        Ok("capture") => say(capture()),
        _ => {}
    }
}

fn say(what: getp::error::Result<impl std::fmt::Display>) {
    match what {
        Ok(what) => println!("child: {what}"),
        Err(error) => println!("child: {error}"),
    }
}

fn link() -> getp::error::Result<String> {
    let link = hip::open(0)?.link(&*hip::open(1)?)?;
    Ok(format!("{} {}", link.direct, link.distance))
}

fn context(image: &'static [u8]) -> getp::error::Result<Context> {
    let driver = hip::open(0)?;
    let target = Target::of(driver.device())?;
    Context::open(driver, target, &[Image::whole(image)])
}

/// A code object in which each of the family's kernels adds one to the number that its argument points to.
fn adders() -> getp::error::Result<&'static [u8]> {
    let target = Target::of(hip::open(0)?.device())?;
    let names: Vec<String> = target.family.table().kernels.iter().map(Kernel::name).collect();
    let mut source = String::from(".amdgcn_target \"amdgcn-amd-amdhsa--gfx90a\"\n.amdhsa_code_object_version 5\n");
    for name in &names {
        source += &format!(".globl {name}\n.type {name},@function\n");
    }
    source += ".text\n.p2align 8\n";
    for name in &names {
        source += &format!("{name}:\n");
    }
    source += "s_load_dwordx2 s[2:3], s[0:1], 0\n v_cmp_eq_u32 vcc, 0, v0\n s_and_b64 exec, exec, vcc\n\
               v_mov_b32 v1, 0\n v_mov_b32 v2, 1\n s_waitcnt lgkmcnt(0)\n\
               global_atomic_add v1, v2, s[2:3]\n s_endpgm\n.rodata\n.p2align 6\n";
    for name in &names {
        source += &format!(
            ".amdhsa_kernel {name}\n.amdhsa_user_sgpr_kernarg_segment_ptr 1\n.amdhsa_kernarg_size 8\n\
             .amdhsa_next_free_vgpr 8\n.amdhsa_accum_offset 8\n.amdhsa_next_free_sgpr 8\n\
             .amdhsa_float_denorm_mode_32 3\n.end_amdhsa_kernel\n"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let (assembly, object) = (folder.path().join("adders.s"), folder.path().join("adders.co"));
    std::fs::write(&assembly, source).unwrap();
    let mut clang = Command::new(clang());
    clang.args("-x assembler -target amdgcn-amd-amdhsa -mcpu=gfx90a -nostdlib -o".split(' '));
    assert!(clang.arg(&object).arg(&assembly).status().unwrap().success());
    Ok(std::fs::read(&object).unwrap().leak())
}

#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct AddOne {
    to: DevicePtr,
}

/// Captures three launches. Returns the outcome, and the value of a counter after the graph, if there is one, and one
/// more launch.
fn capture() -> getp::error::Result<String> {
    let context = context(adders()?)?;
    let number = DeviceBuffer::<i32>::zeroed(&context.stream, 1)?;
    let args = AddOne { to: number.at() };
    let kernel = Launch::new(&context.target.family.table().kernels[0], 1);
    let add_one = || {
        // SAFETY: all of these kernels take one address, of an int that lives.
        unsafe { context.launch(kernel, &args) }
    };
    let name = match context.capture(|| (0..3).try_for_each(|_| add_one()))? {
        Capture::Graph(graph) => {
            // SAFETY: its kernels' memory lives.
            unsafe { graph.launch(&context.stream) }?;
            "graph".to_owned()
        }
        Capture::Invalidated => "invalidated".to_owned(),
        Capture::Incomplete { nodes, launches } => format!("{nodes} of {launches}"),
    };
    add_one()?;
    // SAFETY: the buffer's own number.
    let values: Vec<i32> = unsafe { to_host(&context.stream, number.at(), 1) }?;
    Ok(format!("{name}, {}", values[0]))
}

/// The emulator's own cases: every instruction with chosen operands, and every kind of fault that it finds.
#[test]
#[cfg_attr(
    not(getp_emulated_code_objects),
    ignore = "this build has no code objects for AMD, so maybe no assembler; make test-gpu makes one that has"
)]
fn every_instruction_does_what_amd_s_documents_say() {
    let program = made().join("instructions_test");
    make(&program, &[format!("BUILD={}", made().display())]);
    let folder = tempfile::tempdir().unwrap();
    for target in ["gfx90a", "gfx942", "gfx950"] {
        let output = Command::new(&program)
            .arg(target)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hip/instructions.txt"))
            .arg(folder.path())
            .env("CLANG", clang())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// `one_launch.hip`, compiled for this target with these macros.
fn chain(folder: &Path, target: &str, macros: &[&str]) -> PathBuf {
    let object = folder.join(format!("{target}{}.co", macros.concat()));
    let root = env!("CARGO_MANIFEST_DIR");
    let status = Command::new(clang())
        .args("-x hip --cuda-device-only -mcode-object-version=5 -std=c++17 -O3 --no-gpu-bundle-output".split(' '))
        .args(["-nogpulib", "-nogpuinc", "-Werror", "-I", &format!("{root}/kernels")])
        .arg(format!("--offload-arch={target}"))
        .args(macros.iter().map(|name| format!("-D{name}")))
        .args([
            Path::new(root).join("tests/hip/one_launch.hip").as_path(),
            "-o".as_ref(),
        ])
        .arg(&object)
        .status()
        .unwrap();
    assert!(status.success(), "{target}, {macros:?}");
    object
}

/// What comes of it where caches do not see each other, with so many blocks at once, in this order.
fn run_chain(object: &Path, target: &str, residents: u32, order: &str, arguments: &[&str]) -> String {
    let output = Command::new(made().join("one_launch_test"))
        .args([target.as_ref(), object])
        .args(arguments)
        .env("HIP_EMULATOR_CACHES", "1")
        .env("HIP_EMULATOR_RESIDENT", residents.to_string())
        .env("HIP_EMULATOR_ORDER", order)
        .output()
        .unwrap();
    assert!(output.status.success(), "{target}, order {order}");
    String::from_utf8(output.stdout).unwrap()
}

/// The blocks of `one_launch.hip`.
const BLOCKS: u32 = 16;

fn make_chain_test() {
    make(
        &made().join("one_launch_test"),
        &[format!("BUILD={}", made().display())],
    );
}

#[test]
#[cfg_attr(
    not(getp_emulated_code_objects),
    ignore = "this build has no code objects for AMD, so maybe no compiler; make test-gpu makes one that has"
)]
fn values_cross_blocks_without_a_barrier() {
    make_chain_test();
    let folder = tempfile::tempdir().unwrap();
    for target in ["gfx90a", "gfx942", "gfx950"] {
        for macros in [&[][..], &["WIDE"]] {
            let object = chain(folder.path(), target, macros);
            for order in ["forward", "backward", "1", "2", "3"] {
                let said = run_chain(&object, target, BLOCKS, order, &[]);
                assert_eq!(said, "the same\n", "{target}, {macros:?}, order {order}");
            }
            let said = run_chain(&object, target, BLOCKS, "4", &["nan"]);
            assert_eq!(said, "the same\n", "{target}, {macros:?}, of a NaN");
        }
    }
}

/// What the test above finds: each of these is wrong in one thing.
#[test]
#[cfg_attr(
    not(getp_emulated_code_objects),
    ignore = "this build has no code objects for AMD, so maybe no compiler; make test-gpu makes one that has"
)]
fn values_that_cross_blocks_in_a_wrong_way_are_found() {
    const ORDERS: &[&str] = &["backward", "1"];
    const WAITS: &str = ": nothing is left but waiting\n";
    make_chain_test();
    let folder = tempfile::tempdir().unwrap();
    let wave = |scope| format!("{scope}=__HIP_MEMORY_SCOPE_WAVEFRONT");
    let (load, store) = (wave("LOAD_SCOPE"), wave("STORE_SCOPE"));
    for target in ["gfx90a", "gfx942"] {
        let found = |macros: &[&str], orders: &[&str], arguments: &[&str], words: &[&str]| {
            let object = chain(folder.path(), target, macros);
            for order in orders {
                let said = run_chain(&object, target, BLOCKS, order, arguments);
                let expected = words.iter().any(|word| said.contains(word));
                assert!(expected, "{target}, {macros:?}, order {order}: {said}");
            }
        };
        found(&[&load], ORDERS, &[], &[WAITS]);
        found(&["WIDE", "LOAD_BITS=\"\""], ORDERS, &[], &[WAITS]);
        // gfx90a has no store of a narrower scope, as all of a device have one L2.
        let narrow = if target == "gfx90a" { "the same" } else { WAITS };
        found(&[&store], ORDERS, &[], &[narrow]);
        found(&["ANY_NAN"], ORDERS, &["nan"], &[WAITS]);
        found(&["ANY_NAN", "WIDE"], ORDERS, &["nan"], &[WAITS]);
        found(&["NO_WIPE"], ORDERS, &[], &["differs"]);
        // Who takes a value of another vector computes wrong ones, or leaves others waiting.
        found(&["FEW_BUFFERS"], ORDERS, &[], &["differs", WAITS]);
        // Stores overtake each other in random orders alone, and not so in each that it matters.
        let object = chain(folder.path(), target, &["NO_WAIT"]);
        let mut orders = ["1", "2", "3", "4", "5", "6"].into_iter();
        assert!(
            orders.any(|order| run_chain(&object, target, BLOCKS, order, &[]).contains("differs")),
            "{target}"
        );
        // A block that is not on the device.
        let object = chain(folder.path(), target, &[]);
        let said = run_chain(&object, target, BLOCKS - 1, "forward", &[]);
        assert!(said.ends_with(WAITS), "{target}: {said}");
    }
}

/// The files of `layers_test.cpp`'s kernels, for this target, in a folder; none if this build has not all of them.
fn layers_objects(folder: &Path, target: &str) -> Vec<PathBuf> {
    let wanted = [
        "norm.hip",
        "norm_few.hip",
        "norm_route.hip",
        "settle.hip",
        "cdna/attention_decode.hip",
        "cdna/dense.hip",
        "cdna/mlp1.hip",
        "cdna/mlp2.hip",
        "cdna/one_launch.hip",
    ];
    let of = |object: &&CodeObject| object.family == "cdna" && object.arch == target;
    let objects = CODE_OBJECTS
        .iter()
        .filter(of)
        .filter(|object| wanted.contains(&object.file));
    let keep = |object: &CodeObject| {
        let path = folder.join(format!("{target}-{}.o", object.file.replace('/', "-")));
        std::fs::write(&path, object.image).unwrap();
        path
    };
    let kept: Vec<_> = objects.map(keep).collect();
    if kept.len() == wanted.len() { kept } else { Vec::new() }
}

/// The layers' kernels in one launch leave the bits that they leave apart, whatever order blocks and waves run in and
/// whatever caches do not see.
#[test]
#[cfg_attr(
    not(getp_emulated_code_objects),
    ignore = "this build has no code objects for AMD; make test-gpu makes one that has"
)]
fn layers_in_one_launch_are_those_of_separate_kernels() {
    const BLOCKS: u32 = 8;
    let program = made().join("layers_test");
    make(&program, &[format!("BUILD={}", made().display())]);
    let folder = tempfile::tempdir().unwrap();
    let run = |target: &str, objects: &[PathBuf], rows: u32, order: &str, residents: u32, ticks: &str| {
        let output = Command::new(&program)
            .args([target, &rows.to_string(), &BLOCKS.to_string()])
            .args(objects)
            .env("HIP_EMULATOR_ARCH", target)
            .env("HIP_EMULATOR_CACHES", "1")
            .env("HIP_EMULATOR_RESIDENT", residents.to_string())
            .env("HIP_EMULATOR_ORDER", order)
            .env("HIP_EMULATOR_TICKS", ticks)
            .output()
            .unwrap();
        assert!(output.status.success(), "{target}, order {order}");
        String::from_utf8(output.stdout).unwrap()
    };
    for target in ["gfx90a", "gfx942", "gfx950"] {
        let objects = layers_objects(folder.path(), target);
        if objects.is_empty() {
            println!("GETP_HIP_ARCHS has left {target} out");
            continue;
        }
        for (rows, order) in [(1, "forward"), (1, "1"), (5, "backward"), (8, "2"), (8, "3")] {
            let said = run(target, &objects, rows, order, BLOCKS, "0");
            assert_eq!(said, "the same\n", "{target}, {rows} rows, order {order}");
        }
        // A block that is not on the device, where time stands still and where it does not.
        let said = run(target, &objects, 2, "4", BLOCKS - 1, "10000");
        assert_eq!(said, "waited in vain\n", "{target}");
        let said = run(target, &objects, 2, "4", BLOCKS - 1, "0");
        assert!(said.ends_with(": nothing is left but waiting\n"), "{target}: {said}");
    }
}

#[test]
fn nothing_links_to_the_runtime() {
    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let program = File::parse(&*program).unwrap();
    let names = program.section_by_name(".dynstr").unwrap();
    let names = String::from_utf8_lossy(names.data().unwrap()).into_owned();
    assert!(names.contains("libc.so"), "{names}");
    assert!(!names.contains("amdhip64"), "{names}");
}

#[test]
fn any_rocm_s_properties_are_read_by_its_own_layout() {
    for (soname, flags, version) in [
        ("libamdhip64.so.5", &[][..], "50600000"),
        ("libamdhip64.so.6", &["-DR0600"][..], "60200000"),
        ("libamdhip64.so.7", &["-DR0600"][..], "70051831"),
        ("libamdhip64.so", &["-DR0600"][..], "60200000"),
    ] {
        let rocm = runtime(soname, flags);
        let found = play(
            "list",
            &[("ROCM_PATH", rocm.to_str().unwrap()), ("HIP_EMULATOR_VERSION", version)],
        );
        let expected = format!(
            "[ListedDevice {{ device: Device {{ runtime: \"hip\", ordinal: 0, name: \"Emulated Instinct\", arch: \"gfx90a\", \
             multiprocessors: 104 }}, total_bytes: {} }}]",
            1u64 << 30
        );
        assert_eq!(found, expected, "{soname}");
    }
}

#[test]
fn the_loader_finds_the_runtime_by_its_soname() {
    let rocm = runtime("libamdhip64.so.7", &["-DR0600"]);
    let lib = rocm.join("lib");
    assert_eq!(play("open", &[("LD_LIBRARY_PATH", lib.to_str().unwrap())]), "open");
}

/// Two runtimes in one process would not agree.
#[test]
fn the_runtime_that_the_program_has_loaded_is_taken() {
    let (newer, loaded) = (
        runtime("libamdhip64.so.7", &["-DR0600"]),
        runtime("libamdhip64.so.6", &["-DR0600", "-DCOMPUTE_UNITS=7"]),
    );
    let rocm = ("ROCM_PATH", newer.to_str().unwrap());
    assert!(play("list", &[rocm]).contains("multiprocessors: 104"));
    let library = loaded.join("lib/libamdhip64.so.6");
    let said = play("list", &[rocm, ("LD_PRELOAD", library.to_str().unwrap())]);
    assert!(said.contains("multiprocessors: 7"), "{said}");
}

/// A runtime that exists but cannot be loaded counts as missing, and the line says why it cannot be loaded.
#[test]
fn without_a_runtime_the_cpu_is_taken_with_a_line() {
    if Path::new("/opt/rocm/lib/libamdhip64.so").exists() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for soname in [
        "libamdhip64.so.7",
        "libamdhip64.so.6",
        "libamdhip64.so.5",
        "libamdhip64.so",
    ] {
        std::fs::write(folder.path().join(soname), "no library at all").unwrap();
    }
    let said = play("usable", &[("LD_LIBRARY_PATH", folder.path().to_str().unwrap())]);
    assert!(said.starts_with("running on the CPU: "), "{said}");
    assert!(said.contains("hip: dlopen("), "{said}");
    assert!(said.contains("libamdhip64.so.7: "), "{said}");
    assert!(
        said.contains("no working driver; install the device's driver"),
        "{said}"
    );
}

#[test]
fn rocm_before_5_6_is_refused() {
    for scene in ["list", "open"] {
        let said = play_with(scene, &[("HIP_EMULATOR_VERSION", "50531061")]);
        let expected = "hip: hipRuntimeGetVersion: HIP 5.5 (50531061): ROCm before 5.6 leaves kernels out of graphs; \
                        install ROCm 5.6 or later, or set GETP_DEVICE=cpu";
        assert_eq!(said, expected);
    }
    let said = play_with("usable", &[("HIP_EMULATOR_VERSION", "50221153")]);
    assert!(said.starts_with("running on the CPU: "), "{said}");
    assert!(said.contains("HIP 5.2"), "{said}");
    assert_eq!(play_with("open", &[("HIP_EMULATOR_VERSION", "50600000")]), "open");
}

#[test]
fn an_architecture_without_code_is_named() {
    let said = play_with("usable", &[("HIP_EMULATOR_ARCH", "gfx1010")]);
    let words = "hip:0 (Emulated Instinct, gfx1010) is not used: no code object for this architecture";
    assert!(said.contains(words), "{said}");
}

/// A device that only the kernels for any GPU run is used, with a line.
#[test]
#[cfg_attr(
    not(getp_emulated_code_objects),
    ignore = "this build has no code objects for AMD; make test-gpu makes one that has"
)]
fn a_device_without_kernels_made_for_it_is_told() {
    let mut plain = CODE_OBJECTS.iter().filter(|object| {
        let family = TABLES.iter().find(|family| family.name == object.family);
        let (_, platform) = platform_of(object.arch).unwrap();
        platform.toolchain == Toolchain::Hip && family.unwrap().kernels.iter().all(|kernel| kernel.weights.is_none())
    });
    let Some(CodeObject { arch, .. }) = plain.next() else {
        return println!("GETP_HIP_ARCHS has left them out");
    };
    let said = play_with("usable", &[("HIP_EMULATOR_ARCH", *arch)]);
    let words = format!("hip:0 (Emulated Instinct, {arch}) runs by the kernels that serve any GPU");
    assert!(said.contains(&words), "{said}");
    let said = play_with("usable", &[("HIP_EMULATOR_ARCH", "gfx90a")]);
    assert!(!said.contains("any GPU"), "{said}");
}

/// A runtime may not know a link: that is no reason to do without the device.
#[test]
fn a_link_that_nobody_knows_is_a_long_one() {
    let distance = |link: &[(&str, &str)]| -> u32 {
        let said = play_with("link", &[&[("HIP_EMULATOR_DEVICES", "2")], link].concat());
        let distance = said.strip_prefix("true ").and_then(|rest| rest.parse().ok());
        distance.unwrap_or_else(|| panic!("{said}"))
    };
    let of = |type_and_hops| distance(&[("HIP_EMULATOR_LINK", type_and_hops)]);
    let (near, far, over_pcie, unknown) = (of("4 1"), of("4 2"), of("2 1"), distance(&[]));
    assert!(near < far && far < over_pcie && over_pcie < unknown);
}

#[test]
fn a_code_object_that_is_refused_is_reported_with_its_own_error() {
    for (code, words) in [
        ("209", "no code for this device; build getp for its architecture"),
        ("200", "the runtime knows no such code object"),
        ("218", "could not load the code object"),
        ("303", "could not load the code object"),
        ("2", "out of device memory"),
        ("999", "the device is lost"),
    ] {
        let said = play_with("load", &[("HIP_EMULATOR_REFUSE", code)]);
        assert!(said.starts_with("hip:0: hipModuleLoadData(64 bytes): "), "{said}");
        assert!(said.contains(words), "{said}");
        assert!(said.ends_with(&format!("(code {code})")), "{said}");
    }
}

#[test]
#[cfg_attr(
    not(getp_emulated_code_objects),
    ignore = "this build has no code objects for AMD, so maybe no assembler; make test-gpu makes one that has"
)]
fn a_capture_has_all_kernels() {
    assert_eq!(play_with("capture", &[]), "graph, 4");
}

#[test]
#[cfg_attr(
    not(getp_emulated_code_objects),
    ignore = "this build has no code objects for AMD, so maybe no assembler; make test-gpu makes one that has"
)]
fn a_kernel_that_a_capture_loses_is_noticed() {
    for which in ["1", "2", "3"] {
        assert_eq!(play_with("capture", &[("HIP_EMULATOR_DROP", which)]), "2 of 3, 1");
    }
}

#[test]
#[cfg_attr(
    not(getp_emulated_code_objects),
    ignore = "this build has no code objects for AMD, so maybe no assembler; make test-gpu makes one that has"
)]
fn a_capture_that_is_invalidated_is_tried_again() {
    for times in ["1", "2"] {
        assert_eq!(play_with("capture", &[("HIP_EMULATOR_INVALIDATE", times)]), "graph, 4");
    }
}

/// Kernels are launched all the same: on a stream that was never captured.
#[test]
#[cfg_attr(
    not(getp_emulated_code_objects),
    ignore = "this build has no code objects for AMD, so maybe no assembler; make test-gpu makes one that has"
)]
fn a_capture_that_is_always_invalidated_is_given_up() {
    assert_eq!(
        play_with("capture", &[("HIP_EMULATOR_INVALIDATE", "1000")]),
        "invalidated, 1"
    );
}
