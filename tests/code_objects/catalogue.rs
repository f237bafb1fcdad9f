//! The host, the catalogue and the code objects say the same: every launch that the host can choose is in the code
//! objects with the same threads and shared memory, and they have no kernel that it can never choose.

use super::resources::{self, Resources};
use getp::backend::gpu::args::{Format, PackArgs};
use getp::backend::gpu::catalogue::{self, Elements, Kernel, Op, PackedFormat, Toolchain};
use getp::backend::gpu::code_objects::{CODE_OBJECTS, CodeObject};
use getp::backend::gpu::family::{self, Family};
use getp::backend::gpu::launch::Launch;
use getp::backend::gpu::layout::TypedPtr;
use getp::backend::gpu::shapes::{AttentionWork, MatrixForm, Mlp1Launch, NormWork, Numbers, Product, SortGatherLaunch};
use getp::backend::gpu::target::Target;
use getp::config::ModelConfig;
use getp::options::StepLimits;
use getp::weights::WeightFormat;
use std::collections::BTreeMap;

const ROWS: usize = 8192;
/// Multiprocessors: of a partition of a device, of the CPU that emulates one, and of whole devices.
const MULTIPROCESSORS: [usize; 6] = [1, 4, 104, 114, 132, 304];
const ACTIVATIONS: [(Elements, usize); 4] = [
    (Elements::F16, 1),
    (Elements::Bf16, 1),
    (Elements::F16, 2),
    (Elements::Bf16, 3),
];
const WIRE: [MatrixForm; 2] = [
    MatrixForm::Wire(WeightFormat::Bf16),
    MatrixForm::Wire(WeightFormat::F32),
];
const CODES: MatrixForm = MatrixForm::Wire(WeightFormat::Mxfp4);

/// Released models, and one whose dimensions are no powers of two and whose heads matrix core attention does not
/// support.
fn models() -> [ModelConfig; 4] {
    let odd = ModelConfig {
        vocab_size: 257,
        hidden_dim: 96,
        intermediate_dim: 160,
        n_experts: 9,
        head_dim: 24,
        n_attn_heads: 6,
        n_kv_heads: 2,
        ..ModelConfig::preset_7m()
    };
    [
        ModelConfig::preset_20b(),
        ModelConfig::preset_120b(),
        ModelConfig::preset_7m(),
        odd,
    ]
}

/// Every count of rows up to 300, and around each power of two and each half between two.
fn rows() -> impl Iterator<Item = usize> {
    let around = (8..=13).flat_map(|power| {
        let power = 1_usize << power;
        [power - 1, power, power + 1, power + power / 2]
    });
    (1..=300).chain(around).filter(|&rows| rows <= ROWS)
}

/// Launches by their kernels' names, each kernel once.
type Chosen = BTreeMap<String, &'static Kernel>;

fn note(chosen: &mut Chosen, launch: Launch) {
    assert!(launch.blocks > 0, "{} without blocks", launch.kernel.name());
    chosen.insert(launch.kernel.name(), launch.kernel);
}

/// Every launch of a family that the host can choose.
fn walk(family: &'static dyn Family) -> Chosen {
    let mut chosen = Chosen::new();
    for multiprocessors in MULTIPROCESSORS {
        let target = Target {
            family,
            multiprocessors,
        };
        small_kernels(&target, &mut chosen);
        let usable = |config: &ModelConfig| target.supports(config, &StepLimits::GPU).is_ok();
        for config in models().into_iter().filter(usable) {
            for rows in rows() {
                norms(&target, &config, rows, &mut chosen);
                products(&target, &config, rows, &mut chosen);
                attention(&target, &config, rows, &mut chosen);
            }
        }
    }
    chosen
}

fn small_kernels(target: &Target, chosen: &mut Chosen) {
    for rows in [1, 2, 33, 1000, ROWS] {
        for launch in [
            target.upload(),
            target.embed(rows),
            target.settle(rows),
            target.rope_store(rows),
            target.route(rows),
            target.argmax(false, rows),
            target.argmax(true, rows),
            target.score(rows),
            target.range(rows * 2880),
        ] {
            note(chosen, launch);
        }
        target.matrix_peak().into_iter().for_each(|launch| note(chosen, launch));
        target
            .attention_peak()
            .into_iter()
            .for_each(|launch| note(chosen, launch));
        target.draw(rows).into_iter().for_each(|launch| note(chosen, launch));
        match target.sort_gather(rows, 45) {
            SortGatherLaunch::Together(launch) => {
                assert!(launch.kernel.holds(rows));
                note(chosen, launch);
            }
            SortGatherLaunch::Apart { sort, gather } => {
                [sort, gather].into_iter().for_each(|launch| note(chosen, launch))
            }
        }
    }
    for weights in [PackedFormat::Mxfp4, PackedFormat::W16] {
        target
            .pack(weights, &pack(target, weights))
            .into_iter()
            .for_each(|launch| note(chosen, launch));
    }
}

fn pack(target: &Target, weights: PackedFormat) -> PackArgs {
    let packed = target.packed(weights, 5760, 2880);
    PackArgs {
        wire: TypedPtr::NULL,
        out: TypedPtr::NULL,
        members: 32,
        rows: 5760,
        cols: 2880,
        row_blocks: packed.row_blocks as i32,
        k_blocks: 45,
        shift: 0,
        format: Format::F16,
        half: 0,
    }
}

fn norms(target: &Target, config: &ModelConfig, rows: usize, chosen: &mut Chosen) {
    for (elements, exact) in [
        (Elements::F16, false),
        (Elements::Bf16, false),
        (Elements::F16, true),
        (Elements::Bf16, true),
    ] {
        let numbers = Numbers::new(elements, exact);
        for adds in [false, true] {
            let work = NormWork {
                adds,
                ..NormWork::default()
            };
            note(chosen, target.norm(config, &numbers, &work, rows));
        }
        for router in WIRE {
            if let Some(found) = target.norm_route(config, &numbers, router, rows) {
                found.launch.kernel.takes(config).unwrap();
                assert!(!found.sends || rows == 1);
                note(chosen, found.launch);
            }
        }
        for experts in [PackedFormat::Mxfp4, PackedFormat::W16] {
            if let Some(kernel) = target.one_launch(config, &numbers, Some(experts)) {
                kernel.takes(config).unwrap();
                note(chosen, Launch::new(kernel, target.multiprocessors));
            }
        }
    }
}

fn products(target: &Target, config: &ModelConfig, rows: usize, chosen: &mut Chosen) {
    for product in Product::ALL {
        let packed = [MatrixForm::Mxfp4, MatrixForm::W16, MatrixForm::Heads].into_iter();
        for form in packed.chain([CODES]).chain(WIRE) {
            let experts = matches!(product, Product::Mlp1 | Product::Mlp2);
            // Only experts are MXFP4, and there is no fused argmax for weights in the wire format.
            let is_not = match form {
                MatrixForm::Mxfp4 | CODES => !experts,
                MatrixForm::W16 => false,
                MatrixForm::Heads => product != Product::Qkv || target.qkv_held(config, false) != form,
                MatrixForm::Wire(_) => product == Product::Greedy,
            };
            if is_not {
                continue;
            }
            for (elements, terms) in ACTIVATIONS {
                let shape = target.product_shape(config, product, form, elements, terms, rows);
                let multiplies = |weights| target.multiplies(product, weights, elements, terms, shape.n);
                if !form.packed().is_none_or(multiplies) {
                    continue;
                }
                let found = target.gemm(&shape).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
                let kernel = found.launch.kernel;
                assert!(kernel.holds(shape.rows), "{shape:?}");
                let unembeds = matches!(product, Product::Greedy | Product::Logits);
                let is_plain = form.packed().is_none();
                assert!(is_plain || unembeds == (found.candidates > 0), "{shape:?}");
                note(chosen, found.launch);
                if product == Product::Qkv
                    && let Some(both) = target.norm_qkv(config, &shape)
                {
                    both.kernel.takes(config).unwrap();
                    note(chosen, both);
                }
                if product == Product::Mlp1 && !is_plain {
                    let mlp1 = target.mlp1(&shape, rows, found.launch);
                    let gathered = matches!(mlp1, Mlp1Launch::Gathered(_));
                    assert!(gathered || !target.gathers(elements, terms, rows), "{shape:?}");
                    assert_eq!(mlp1.launch().kernel.tokens, kernel.tokens, "{shape:?}");
                    note(chosen, mlp1.launch());
                }
            }
        }
    }
}

fn attention(target: &Target, config: &ModelConfig, rows: usize, chosen: &mut Chosen) {
    for (kv, exact) in [(Elements::F16, false), (Elements::Bf16, false), (Elements::F32, true)] {
        let works = [(rows, 0), (0, rows), (rows, rows)].into_iter();
        let works = works.flat_map(|(items, tiles)| {
            let kinds = [
                (false, false, false),
                (false, true, false),
                (false, false, true),
                (true, false, true),
            ];
            kinds.map(|(windowed, shares_keys, whole_rows)| AttentionWork {
                windowed,
                rows,
                items,
                shares_keys: shares_keys && items > 0,
                whole_rows: whole_rows && items > 0 && target.family.attends_to_whole_rows(),
                tiles,
            })
        });
        for work in works {
            let launches = target.attention(config, kv, exact, &work).unwrap();
            assert!(launches.iter().flatten().count() > 0, "rows without attention");
            for launch in launches.into_iter().flatten() {
                launch.kernel.takes(config).unwrap();
                note(chosen, launch);
            }
        }
    }
}

#[test]
fn the_host_chooses_every_kernel_of_the_catalogue() {
    for family in family::FAMILIES {
        let chosen = walk(*family);
        let table = family.table();
        let unused = table
            .kernels
            .iter()
            .map(Kernel::name)
            .filter(|name| !chosen.contains_key(name));
        assert_eq!(unused.collect::<Vec<_>>(), [""; 0], "{} cannot choose them", table.name);
    }
}

#[test]
#[cfg_attr(
    not(getp_code_objects),
    ignore = "this build has no code objects; make test-gpu makes one that has"
)]
fn amd_code_objects_have_what_the_host_chooses_and_nothing_else() {
    compare(Toolchain::Hip);
}

#[test]
#[cfg_attr(
    not(getp_code_objects),
    ignore = "this build has no code objects; make test-gpu makes one that has"
)]
fn nvidia_code_objects_have_what_the_host_chooses_and_nothing_else() {
    compare(Toolchain::Cuda);
}

/// The code objects of each architecture have the catalogue's kernels, in the files that it says, and no others.
fn compare(toolchain: Toolchain) {
    let mut archs: Vec<&str> = CODE_OBJECTS.iter().map(|object| object.arch).collect();
    assert!(!archs.is_empty(), "there are no code objects");
    archs.retain(|arch| catalogue::platform_of(arch).is_some_and(|(_, platform)| platform.toolchain == toolchain));
    archs.dedup();
    for arch in archs {
        let objects = CODE_OBJECTS.iter().filter(|object| object.arch == arch);
        let table = catalogue::table_of(arch).expect("a family's code");
        assert!(objects.clone().all(|object| object.family == table.name), "{arch}");
        let mut found = BTreeMap::<_, Vec<_>>::new();
        for object in objects {
            for arch in resources::archs(object) {
                for kernel in resources::of(object, &arch) {
                    let of_name = found.entry(kernel.name.clone()).or_default();
                    of_name.push((object, arch.clone(), kernel));
                }
            }
        }
        for kernel in table.kernels {
            let name = kernel.name();
            let of_name = found.remove(&name).unwrap_or_else(|| panic!("{arch} lacks {name}"));
            for (object, arch, resources) in of_name {
                check(kernel, object, &arch, &resources);
            }
        }
        assert_eq!(
            found.keys().collect::<Vec<_>>(),
            [""; 0],
            "{arch} has kernels that nobody chooses"
        );
    }
}

/// Bytes of shared memory that a block has on sm_90 and sm_100.
const LARGEST_SHARED: u64 = 227 << 10;

fn check(kernel: &Kernel, object: &CodeObject, arch: &str, resources: &Resources) {
    let name = format!("{} on {arch}", resources.name);
    assert_eq!(object.file, kernel.file, "{name}");
    assert_eq!(resources.threads, kernel.threads as u64, "threads of {name}");
    let all = resources.shared_bytes + kernel.shared_bytes as u64;
    // One launch is for devices that have more, and the driver says which do.
    let limit = match kernel.op {
        Op::OneLaunch => resources.shared_limit.max(LARGEST_SHARED),
        _ => resources.shared_limit,
    };
    assert!(all <= limit, "{name} takes {all} bytes of shared memory");
}

/// The emulated device has the same kernels, made for the same threads.
#[cfg(feature = "simt")]
#[test]
fn the_simt_library_has_what_the_host_chooses_and_nothing_else() {
    use getp::backend::gpu::code_objects;
    use getp::backend::gpu::driver::simt;

    let mut made = simt::kernels(code_objects::simt_image()).unwrap();
    for kernel in catalogue::table_of("simt").unwrap().kernels {
        let name = kernel.name();
        assert_eq!(made.remove(&name), Some(kernel.threads), "threads of {name}");
    }
    assert_eq!(made.into_keys().collect::<Vec<_>>(), [""; 0], "nobody chooses them");
}
