//! Norm and router by clusters of blocks, which reach each other's shared memory: where a cluster finds its
//! multiprocessors, and how many of them do at once.

use super::super::block_a_row;
use super::super::verdict::{ANOTHER, FOR_MORE, HOLDS_FEWER, Verdict};
use crate::backend::gpu::catalogue::Kernel;
use crate::backend::gpu::shapes::NormRouteShape;

/// Shared memory of a multiprocessor, and what is kept of it for each block.
const MULTIPROCESSOR_SHARED: usize = 228 * 1024;
const BLOCK_RESERVED: usize = 1024;
/// Threads of clusters that a multiprocessor holds, as their registers allow.
const CLUSTER_THREADS: usize = 512;

const LARGEST: &str = "it is the largest of which each row has one at once";
const IN_TURN: &str = "no kernel's clusters have place for each row, and of the smallest most have";
const NO_PLACE: &str = "its clusters have no place for each row at once";
const SMALLER: &str = "larger clusters have place for each row at once";
const MOST_ROWS: &str = "it is faster than those for fewer rows";
const CLUSTERS: &str = "clusters are faster";

/// What is said of each kernel. Clusters that share few rows are the largest of which each row has one at once; where
/// there are none, the smallest take the rows in turn. Of those that share many, the one for the most rows is taken; of
/// equals the last.
pub fn norm_route(shape: &NormRouteShape, kernels: &[&'static Kernel]) -> Vec<Verdict> {
    let is_few = |kernel: &Kernel| kernel.cluster > 0 && kernel.is_for_few(shape.rows);
    let is_many = |kernel: &Kernel| kernel.cluster > 0 && (1..=shape.rows).contains(&kernel.least_rows);
    let has_place = |kernel: &Kernel| shape.rows <= side_by_side(kernel, shape);
    let few = || kernels.iter().filter(|kernel| is_few(kernel));
    let largest = few()
        .filter(|kernel| has_place(kernel))
        .map(|kernel| kernel.cluster)
        .max();
    let smallest = few().map(|kernel| kernel.cluster).min();
    let many = kernels.iter().filter(|kernel| is_many(kernel));
    let most = many.max_by_key(|kernel| kernel.least_rows).map(|kernel| kernel.index);
    let of = |kernel: &&'static Kernel| match **kernel {
        Kernel { cluster: 0, .. } if smallest.is_some() || most.is_some() => Verdict::Passed(CLUSTERS),
        Kernel { cluster: 0, .. } => block_a_row(shape),
        Kernel { cluster, .. } if is_few(kernel) => match largest {
            Some(largest) if cluster == largest => Verdict::Taken(blocks_of_few(kernel, shape), LARGEST),
            Some(_) if has_place(kernel) => Verdict::Passed(SMALLER),
            None if Some(cluster) == smallest => Verdict::Taken(blocks_of_few(kernel, shape), IN_TURN),
            _ => Verdict::Passed(NO_PLACE),
        },
        _ if !kernel.holds(shape.rows) => Verdict::Refused(HOLDS_FEWER),
        _ if smallest.is_some() || !is_many(kernel) => Verdict::Passed(FOR_MORE),
        _ if Some(kernel.index) == most => Verdict::Taken(blocks_of_many(kernel, shape), MOST_ROWS),
        _ => Verdict::Passed(ANOTHER),
    };
    kernels.iter().map(of).collect()
}

/// A cluster for each row, or as many as run at once, but so many that each takes at most as many rows as it has
/// blocks.
fn blocks_of_few(kernel: &Kernel, shape: &NormRouteShape) -> usize {
    let clusters = side_by_side(kernel, shape).max(shape.rows.div_ceil(kernel.cluster));
    kernel.cluster * clusters.min(shape.rows)
}

/// Clusters that run side by side. The blocks of a cluster run within one of the device's groups of 16 to 18
/// multiprocessors (GPC), some of which may be missing there: a quarter of as many clusters of eight as all
/// multiprocessors together hold finds no place.
fn side_by_side(kernel: &Kernel, shape: &NormRouteShape) -> usize {
    shape.multiprocessors * CLUSTER_THREADS * 3 / 4 / (kernel.threads * kernel.cluster)
}

/// Clusters take the rows in turn where there are more than run at once. (On an H200 of 132 multiprocessors those are
/// 30 clusters of four, or 62 with two blocks each.)
fn blocks_of_many(kernel: &Kernel, shape: &NormRouteShape) -> usize {
    let clusters = shape.rows.div_ceil(kernel.cluster * kernel.per_block);
    let resident = MULTIPROCESSOR_SHARED / (kernel.shared_bytes + BLOCK_RESERVED);
    let at_once = shape.multiprocessors * resident * 9 / 10 / kernel.cluster;
    kernel.cluster * clusters.min(at_once.max(1))
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
