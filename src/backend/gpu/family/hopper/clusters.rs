//! Norm and router by clusters of blocks, which reach each other's shared memory: where a cluster finds its
//! multiprocessors, and how many of them do at once.

use crate::backend::gpu::catalogue::Kernel;
use crate::backend::gpu::launch::Launch;
use crate::backend::gpu::shapes::NormRouteShape;

/// Shared memory of a multiprocessor, and what is kept of it for each block.
const MULTIPROCESSOR_SHARED: usize = 228 * 1024;
const BLOCK_RESERVED: usize = 1024;
/// Threads of clusters that a multiprocessor holds, as their registers allow.
const CLUSTER_THREADS: usize = 512;

/// By clusters that share few rows, or by those that share many; `None` where no kernel is for so many.
pub fn norm_route(shape: &NormRouteShape, kernels: &[&'static Kernel]) -> Option<Launch> {
    let clustered = || kernels.iter().copied().filter(|kernel| kernel.cluster > 0);
    few(shape, clustered()).or_else(|| many(shape, clustered()))
}

/// The largest clusters of which each row has one at once. Where none are, they take the rows in turn, at most as many
/// each as a cluster has blocks.
fn few(shape: &NormRouteShape, kernels: impl Iterator<Item = &'static Kernel> + Clone) -> Option<Launch> {
    let fitting = kernels.filter(|kernel| kernel.is_for_few(shape.rows));
    let at_once = fitting
        .clone()
        .filter(|kernel| shape.rows <= side_by_side(kernel, shape));
    let largest = at_once.max_by_key(|kernel| kernel.cluster);
    let kernel = largest.or_else(|| fitting.min_by_key(|kernel| kernel.cluster))?;
    let clusters = side_by_side(kernel, shape).max(shape.rows.div_ceil(kernel.cluster));
    Some(Launch::new(kernel, kernel.cluster * clusters.min(shape.rows)))
}

/// Clusters that run side by side. The blocks of a cluster run within one of the device's groups of 16 to 18
/// multiprocessors (GPC), some of which may be missing there: a quarter of as many clusters of eight as all
/// multiprocessors together hold finds no place.
fn side_by_side(kernel: &Kernel, shape: &NormRouteShape) -> usize {
    shape.multiprocessors * CLUSTER_THREADS * 3 / 4 / (kernel.threads * kernel.cluster)
}

/// The clusters for the most rows that are at most so many. They take the rows in turn where there are more than run at
/// once. (On an H200 of 132 multiprocessors those are 30 clusters of four, or 62 with two blocks each.)
fn many(shape: &NormRouteShape, kernels: impl Iterator<Item = &'static Kernel>) -> Option<Launch> {
    let fitting = kernels.filter(|kernel| (1..=shape.rows).contains(&kernel.least_rows));
    let kernel = fitting.max_by_key(|kernel| kernel.least_rows)?;
    let clusters = shape.rows.div_ceil(kernel.cluster * kernel.per_block);
    let resident = MULTIPROCESSOR_SHARED / (kernel.shared_bytes + BLOCK_RESERVED);
    let at_once = shape.multiprocessors * resident * 9 / 10 / kernel.cluster;
    Some(Launch::new(kernel, kernel.cluster * clusters.min(at_once.max(1))))
}

#[cfg(test)]
mod tests {
    use crate::backend::gpu::catalogue::Elements;
    use crate::backend::gpu::family::hopper::Hopper;
    use crate::backend::gpu::shapes::{MatrixForm, Numbers};
    use crate::backend::gpu::target::Target;
    use crate::config::ModelConfig;
    use crate::weights::WeightFormat;

    const TARGET: Target = Target {
        family: &Hopper,
        multiprocessors: 132,
    };
    const BF16: MatrixForm = MatrixForm::Wire(WeightFormat::Bf16);

    fn chosen(config: &ModelConfig, exact: bool, router: MatrixForm, rows: usize) -> String {
        match TARGET.norm_route(config, &Numbers::new(Elements::F16, exact), router, rows) {
            Some(found) => format!("{rows} {} {}", found.launch.kernel.name(), found.launch.blocks),
            None => format!("{rows} none"),
        }
    }

    #[test]
    fn clusters_shrink_as_rows_grow() {
        let lines = |config: &ModelConfig, rows: &[usize]| -> Vec<_> {
            rows.iter().map(|&rows| chosen(config, false, BF16, rows)).collect()
        };
        assert_eq!(
            lines(
                &ModelConfig::preset_20b(),
                &[1, 8, 12, 13, 49, 64, 65, 512, 1023, 1024, 8192]
            ),
            [
                "1 norm_route_cluster8 8",
                "8 norm_route_cluster8 64",
                "12 norm_route_cluster8 96",
                "13 norm_route_cluster4 52",
                "49 norm_route_cluster4 196",
                "64 norm_route_cluster4 196",
                "65 norm_route_32x32 12",
                "512 norm_route_32x32 64",
                "1023 norm_route_32x32 116",
                "1024 norm_route_16x32 236",
                "8192 norm_route_16x32 236",
            ]
        );
        // 128 experts are too many for clusters of four.
        assert_eq!(
            lines(&ModelConfig::preset_120b(), &[1, 13, 64, 65, 8192]),
            [
                "1 norm_route_cluster8 8",
                "13 norm_route_cluster8 96",
                "64 norm_route_cluster8 96",
                "65 norm_route_32x128 12",
                "8192 norm_route_32x128 116",
            ]
        );
    }

    /// The sums of K's parts are rounded: not in `exact`, and not with a float32 router. There a row has a block, while
    /// each can have a multiprocessor.
    #[test]
    fn exact_routers_have_a_block_a_row() {
        let config = ModelConfig::preset_20b();
        for (exact, router) in [(true, BF16), (false, MatrixForm::Wire(WeightFormat::F32))] {
            let lines = [1, 132, 133].map(|rows| chosen(&config, exact, router, rows));
            assert_eq!(lines, ["1 norm_route 1", "132 norm_route 132", "133 none"]);
        }
    }

    /// mlp1 can read four experts' numbers before the router ends.
    #[test]
    fn a_single_rows_experts_are_told() {
        let tells = |experts_per_token| {
            let config = ModelConfig {
                experts_per_token,
                ..ModelConfig::preset_20b()
            };
            let found = |rows| {
                TARGET
                    .norm_route(&config, &Numbers::new(Elements::F16, false), BF16, rows)
                    .unwrap()
            };
            assert!(found(1).sends && !found(2).sends && !found(2).tells);
            found(1).tells
        };
        assert!(tells(4) && !tells(5));
    }
}
