//! The ladders of `cargo bench --bench gpu -- kernel`: every kernel of every family can be made the one that the
//! library launches, and what is on no ladder is known.

#[path = "../benches/gpu/kernel/forced.rs"]
mod forced;
#[path = "../benches/gpu/kernel/operation.rs"]
mod operation;

use forced::Forced;
use getp::backend::gpu::catalogue::{Kernel, Op, TABLES};
use getp::backend::gpu::family;
use getp::backend::gpu::launch::Launch;
use getp::backend::gpu::shapes::{AttentionWork, MatrixForm, NormWork, Product};
use getp::backend::gpu::target::Target;
use getp::config::ModelConfig;
use getp::tensors::TensorId;
use getp::weights::WeightFormat;
use operation::{Setup, Work};

const ROWS: [usize; 9] = [1, 2, 8, 32, 64, 128, 256, 890, 1536];

/// A product's matrix, and its format in released models.
fn product(operation: Work, kernel: &Kernel) -> Option<(Product, TensorId, WeightFormat)> {
    let (layer, expert) = (0, 0);
    Some(match operation {
        Work::Qkv => (Product::Qkv, TensorId::Qkv { layer }, WeightFormat::Bf16),
        Work::AttnOut => (Product::AttnOut, TensorId::AttnOut { layer }, WeightFormat::Bf16),
        Work::Mlp1 => (Product::Mlp1, TensorId::Mlp1 { layer, expert }, WeightFormat::Mxfp4),
        Work::Mlp2 => (Product::Mlp2, TensorId::Mlp2 { layer, expert }, WeightFormat::Mxfp4),
        Work::Unembed => {
            let product = match kernel.op {
                Op::GreedyLogits => Product::Greedy,
                _ => Product::Logits,
            };
            (product, TensorId::Unembedding, WeightFormat::Bf16)
        }
        _ => return None,
    })
}

/// What the library launches for an operation of the 20b on a device with the kernel forced.
fn launched(target: &Target, operation: Work, kernel: &Kernel, rows: usize) -> Vec<Launch> {
    let config = ModelConfig::preset_20b();
    let setup = Setup::of(kernel, operation, false);
    let numbers = setup.numbers;
    if let Some((product, tensor, format)) = product(operation, kernel) {
        let format = if setup.w16_experts { WeightFormat::Bf16 } else { format };
        let form = target.form(tensor, format, &config, &numbers);
        let shape = target.product_shape(&config, product, form, numbers.elements, numbers.terms, rows);
        // As `GpuOps` does it.
        let sorts = product == Product::Mlp1 && target.finds_rows(numbers.elements, numbers.terms, rows);
        let sorting = sorts.then(|| target.sort_mlp1(&shape, rows)).flatten();
        return vec![sorting.unwrap_or_else(|| target.gemm(&shape).unwrap().launch)];
    }
    match operation {
        Work::Norm => {
            let adds = NormWork {
                adds: true,
                ..NormWork::default()
            };
            vec![target.norm(&config, &numbers, &adds, rows)]
        }
        Work::Router => {
            let both = target.norm_route(&config, &numbers, MatrixForm::Wire(WeightFormat::Bf16), rows);
            vec![both.map_or_else(|| target.route(rows), |both| both.launch)]
        }
        _ => {
            let decodes = operation == Work::AttentionDecode;
            let work = AttentionWork {
                windowed: false,
                rows,
                items: if decodes { rows } else { 0 },
                tiles: if decodes { 0 } else { rows },
            };
            let launches = target.attention(&config, numbers.kv, numbers.exact, &work);
            launches.unwrap().into_iter().flatten().collect()
        }
    }
}

#[test]
fn every_kernel_can_be_forced() {
    let multiprocessors = 132;
    let mut forced = 0;
    for &family in family::FAMILIES {
        for operation in Work::ALL {
            for kernel in operation.kernels(family.table()) {
                let target = Target {
                    family: Forced::new(family, operation, kernel),
                    multiprocessors,
                };
                let fits = |&&rows: &&usize| kernel.most_rows == 0 || rows <= kernel.most_rows;
                // Beyond a row a multiprocessor norm and router are apart.
                let a_block_each = kernel.op == Op::NormRoute && kernel.cluster == 0;
                let rows = ROWS.iter().filter(fits);
                for &rows in rows.filter(|&&rows| !a_block_each || rows <= multiprocessors) {
                    let names: Vec<_> = launched(&target, operation, kernel, rows)
                        .iter()
                        .map(|launch| launch.kernel.name())
                        .collect();
                    assert_eq!(names, [kernel.name()], "{} of {rows} rows", operation.name());
                    forced += 1;
                }
            }
        }
    }
    assert!(forced > 1000, "{forced}");
}

/// A new operation's kernels get a ladder, or a name here.
#[test]
fn what_is_on_no_ladder_is_known() {
    let none = [
        Op::Upload,
        Op::Embed,
        Op::Settle,
        Op::Sort,
        Op::Gather,
        Op::SortGather,
        Op::RopeStore,
        Op::Argmax,
        Op::ArgmaxLogits,
        Op::Draw,
        Op::DrawWide,
        Op::Score,
        Op::Range,
        Op::Pack,
        Op::MatrixPeak,
        Op::AttentionPeak,
    ];
    for kernel in TABLES.iter().flat_map(|family| family.kernels) {
        let on_one = Work::ALL.iter().any(|operation| operation.ops().contains(&kernel.op));
        assert!(on_one != none.contains(&kernel.op), "{}", kernel.name());
    }
}
