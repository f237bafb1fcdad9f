//! The kernels that every family has, in `kernels/*.hip`, and limits that are those of families' own, too.

use super::{Dimension, Elements, Kernel, Limit, Op, with};

/// How many kernels every family has.
pub const SHARED: usize = 25;

const NORM: Limit = Limit::AtMost(Dimension::Hidden, 6144);
const EXPERTS: Limit = Limit::AtMost(Dimension::Experts, 256);
const EXPERTS_PER_TOKEN: Limit = Limit::AtMost(Dimension::ExpertsPerToken, 8);
/// Heads are read in pieces of eight; places in a row of all heads are 32-bit numbers.
const ROPE: &[Limit] = &[
    Limit::MultipleOf(Dimension::HeadDim, 8),
    Limit::AtMost(Dimension::QkvDim, 1 << 30),
];
/// Threads of a norm's block.
pub const NORM_THREADS: usize = 384;
/// Of a norm whose threads have one piece each, and all of an experts' outputs at once.
pub const NORM_FEW: &[Limit] = &[
    Limit::AtMost(Dimension::Hidden, NORM_THREADS * 8),
    Limit::MultipleOf(Dimension::Hidden, 8),
    Limit::AtMost(Dimension::ExpertsPerToken, 4),
];
/// Up to so many rows the norm has a kernel whose loads are all on the way at once.
const FEW_ROWS: usize = 64;
const PLAIN_HEADS: &[Limit] = &[
    Limit::AtMost(Dimension::HeadDim, 128),
    Limit::MultipleOf(Dimension::HeadDim, 8),
];
/// What attention on any family's matrix cores supports.
pub const MATRIX_HEADS: &[Limit] = &[
    Limit::Exactly(Dimension::HeadDim, 64),
    Limit::Exactly(Dimension::HeadsPerKvHead, 8),
];

/// The kernels in `kernels/*.hip`, one source for all families, for waves of so many lanes.
pub const fn shared(wave: usize) -> [Kernel; SHARED] {
    use Elements::{Bf16, F16, F32};
    let plain = 8 * wave;
    let attention = Kernel::written(Op::AttentionPlain, "attention_plain.hip", 256)
        .per_block(8)
        .limits(PLAIN_HEADS);
    // As many rows as registers allow, and with wide waves as leave room for a second block's LDS.
    let route_rows = 256 / wave;
    // Keys, powers, the waves' sums, and each thread's buckets of five bytes.
    let draw_wide_bytes = 4096 * 8 + 32 * 8 + 512 / wave * 8 + 512 * 12 * 5 + 8;
    let all = [
        Kernel::written(Op::Upload, "upload.hip", 1024).plan_after_predecessor(),
        Kernel::written(Op::Embed, "embed.hip", 256).plan_after_predecessor(),
        Kernel::written(Op::Norm, "norm.hip", NORM_THREADS).limits(&[NORM]),
        Kernel::written(Op::Norm, "norm_few.hip", NORM_THREADS)
            .variant("few")
            .most_rows(FEW_ROWS)
            .limits(NORM_FEW),
        Kernel::written(Op::Settle, "settle.hip", NORM_THREADS),
        Kernel::written(Op::Route, "route.hip", 8 * wave)
            .per_block(route_rows)
            .limits(&[EXPERTS, EXPERTS_PER_TOKEN]),
        Kernel::written(Op::NormRoute, "norm_route.hip", NORM_THREADS).limits(&[NORM, EXPERTS, EXPERTS_PER_TOKEN]),
        Kernel::written(Op::Sort, "sort.hip", 1024)
            .per_block(512)
            .limits(&[EXPERTS]),
        Kernel::written(Op::Gather, "gather.hip", 256).per_block(32),
        Kernel::written(Op::SortGather, "sort_gather.hip", 256)
            .per_block(32)
            .most_rows(128)
            .limits(&[EXPERTS, EXPERTS_PER_TOKEN]),
        Kernel::written(Op::RopeStore, "rope_store.hip", 320).limits(ROPE),
        attention.elements(F32),
        attention.elements(F16),
        attention.elements(Bf16),
        Kernel::written(Op::PlainQkv, "gemm_plain.hip", plain),
        Kernel::written(Op::PlainAttnOut, "gemm_plain.hip", plain),
        Kernel::written(Op::PlainMlp1, "gemm_plain.hip", plain),
        Kernel::written(Op::PlainMlp2, "gemm_plain.hip", plain),
        Kernel::written(Op::PlainLogits, "gemm_plain.hip", plain),
        Kernel::written(Op::Argmax, "argmax.hip", 1024).per_block(8),
        Kernel::written(Op::ArgmaxLogits, "argmax.hip", 1024),
        Kernel::written(Op::Draw, "draw.hip", 256),
        Kernel::written(Op::DrawWide, "draw_wide.hip", 512).shared_bytes(draw_wide_bytes),
        Kernel::written(Op::Score, "score.hip", 256),
        Kernel::written(Op::Range, "pack_range.hip", 256),
    ];
    with(all, [])
}
