//! Packing is exact: in whatever format a matrix is packed, its layout unpacks to the bits of the checkpoint.

#[path = "../benches/gpu/random_model.rs"]
mod random_model;
#[path = "common/synthetic.rs"]
mod synthetic;

use getp::backend::cpu::{Tiles, load};
use getp::checkpoint::{Checkpoint, Columns, Element, Part, Tensor, TensorId, Values};
use getp::config::ModelConfig;
use getp::dtype::{E2M1, MXFP4_BLOCK, MXFP4_BLOCK_BYTES};
use getp::weights::{Layout, Packed, RowMajor, WeightFormat, pack, pack_tiles};
use half::bf16;
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use random_model::RandomModel;
use synthetic::{Dense, Experts, Synthetic, SyntheticCheckpoint, Temperament};

const FORMATS: [WeightFormat; 3] = [WeightFormat::Mxfp4, WeightFormat::Bf16, WeightFormat::F32];

/// Every layout.
const LAYOUTS: [&dyn Layout; 3] = [&Tiles { gated: false }, &Tiles { gated: true }, &RowMajor];

/// Values that the format represents exactly and that no narrower one does (unless there are very few).
fn draw(rng: &mut ChaCha8Rng, format: WeightFormat, count: usize) -> Vec<f32> {
    let mut scale = 0.0;
    (0..count)
        .map(|i| match format {
            WeightFormat::Mxfp4 => {
                if i % MXFP4_BLOCK == 0 {
                    scale = (rng.random_range(-20..=5) as f32).exp2();
                }
                E2M1[rng.random_range(0..16)] * scale
            }
            WeightFormat::Bf16 => bf16::from_f32(rng.random_range(-1.0..1.0)).to_f32(),
            WeightFormat::F32 => rng.random_range(-1.0..1.0),
        })
        .collect()
}

fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// A matrix in one part.
fn whole(values: Values<'_>, cols: usize) -> Tensor<'_> {
    let rows = values.count() / cols;
    let parts = vec![Part { rows, values }];
    Tensor { rows, cols, parts }
}

/// Packs matrices given as float32.
fn pack_f32(members: &[Vec<f32>], cols: usize, expected: WeightFormat, layout: &dyn Layout) -> Packed {
    let bytes: Vec<_> = members.iter().map(|m| to_bytes(m)).collect();
    let tensors: Vec<_> = bytes.iter().map(|b| whole(Values::F32(b), cols)).collect();
    pack(&tensors, expected, layout).unwrap()
}

/// Every tile unpacks to the matrix's rows, bit for bit, with zeros after the last one.
#[track_caller]
fn check_bits(packed: &Packed, layout: &dyn Layout, members: &[Vec<f32>]) {
    assert_eq!(packed.members, members.len());
    let mut tile_values = vec![f32::NAN; layout.tile_rows() * packed.cols];
    for (member, source) in members.iter().enumerate() {
        let mut values = Vec::new();
        for tile in 0..packed.tiles {
            layout.read(packed.format, packed.cols, packed.tile(member, tile), &mut tile_values);
            values.extend(tile_values.iter().map(|v| v.to_bits()));
        }
        let padding = values.split_off(source.len());
        let expected: Vec<u32> = source.iter().map(|v| v.to_bits()).collect();
        assert!(values == expected, "matrix {member} differs in {:?}", packed.format);
        assert!(padding.iter().all(|&bits| bits == 0));
    }
}

#[test]
fn every_format_and_layout_gives_back_the_bits() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for format in FORMATS {
        for layout in LAYOUTS {
            // Fewer and more rows than a tile. Column groups, and scales, are fewer than a run, whole runs and more,
            // the last of them whole or not.
            for rows in [1, 31, 32, 33, 70] {
                for cols in [1, 31, 33, 64, 544, 2080] {
                    if format == WeightFormat::Mxfp4 && cols % MXFP4_BLOCK != 0 {
                        continue;
                    }
                    let members: Vec<_> = (0..2).map(|_| draw(&mut rng, format, rows * cols)).collect();
                    let packed = pack_f32(&members, cols, format, layout);
                    assert_eq!((packed.format, &packed.misfit), (format, &None));
                    check_bits(&packed, layout, &members);
                }
            }
        }
    }
}

/// Processes compare it, whatever their devices' layouts.
#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "fingerprints are taken with the feature mpi alone")]
fn the_fingerprint_depends_on_values_and_places_alone() {
    let (rows, cols) = (70, 64);
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    let members: Vec<_> = (0..2)
        .map(|_| draw(&mut rng, WeightFormat::Mxfp4, rows * cols))
        .collect();
    let swapped = [members[1].clone(), members[0].clone()];
    let mut negated = members.clone();
    negated[1][rows * cols - 1] *= -1.0;
    let mut wide = members.clone();
    wide[1][rows * cols - 1] = 1.0 / 3.0;
    let mut fingerprints = Vec::new();
    for members in [&members[..], &swapped, &negated, &wide] {
        // The last one's tiles are packed three times, each time wider.
        let fingerprint = pack_f32(members, cols, WeightFormat::Mxfp4, &Tiles { gated: false }).fingerprint;
        let of_gated = pack_f32(members, cols, WeightFormat::Mxfp4, &Tiles { gated: true }).fingerprint;
        assert_eq!(fingerprint, of_gated);
        assert!(!fingerprints.contains(&fingerprint), "{fingerprints:?}");
        fingerprints.push(fingerprint);
    }
    let as_f32 = pack_f32(&wide, cols, WeightFormat::F32, &RowMajor).fingerprint;
    assert_eq!(as_f32, fingerprints[3]);
    // In parts, as for GPUs.
    let bytes: Vec<_> = members.iter().map(|m| to_bytes(m)).collect();
    let values = bytes.iter().map(|bytes| Values::F32(bytes));
    let tensors: Vec<_> = values
        .map(|values| Tensor {
            rows,
            cols,
            parts: vec![Part { rows, values }],
        })
        .collect();
    let layout = Tiles { gated: false };
    let mut buffer = vec![0; 2 * layout.tile_bytes(WeightFormat::Mxfp4, cols)];
    let mut part = |first| pack_tiles(&tensors, WeightFormat::Mxfp4, &layout, first, &mut buffer);
    let parts: Vec<u64> = [0, 2, 4]
        .map(&mut part)
        .into_iter()
        .map(|found| found.unwrap().fingerprint)
        .collect();
    assert_eq!(
        parts.iter().fold(0u64, |sum, part| sum.wrapping_add(*part)),
        fingerprints[0]
    );
}

#[test]
fn mxfp4_takes_four_and_a_quarter_bits() {
    let members = vec![draw(&mut ChaCha8Rng::seed_from_u64(2), WeightFormat::Mxfp4, 64 * 96); 3];
    let packed = pack_f32(&members, 96, WeightFormat::Mxfp4, &Tiles { gated: true });
    assert_eq!(packed.bytes.len() * 8 * 4, 3 * 64 * 96 * 17);
}

#[test]
fn columns_that_are_no_blocks_are_not_mxfp4() {
    let members = [vec![1.0; 3 * 40]];
    let packed = pack_f32(&members, 40, WeightFormat::Mxfp4, &Tiles { gated: false });
    assert_eq!(packed.format, WeightFormat::Bf16);
    check_bits(&packed, &Tiles { gated: false }, &members);
}

/// Puts a value of `needs` at every place among values of `fits`; the report says where it is.
#[test]
fn one_misfit_anywhere_widens_all_members() {
    let (rows, cols) = (70, 64);
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    // 1.125 is a bfloat16 with one mantissa bit too many for E2M1; a third is neither.
    let cases = [
        (WeightFormat::Mxfp4, WeightFormat::Bf16, 1.125_f32),
        (WeightFormat::Mxfp4, WeightFormat::F32, 1.0 / 3.0),
        (WeightFormat::Bf16, WeightFormat::F32, 1.0 / 3.0),
    ];
    for (fits, needs, odd) in cases {
        for layout in LAYOUTS {
            for (member, row, col) in [(0, 0, 0), (1, 35, 41), (1, 32, 63), (2, 69, 63)] {
                let mut members: Vec<_> = (0..3).map(|_| draw(&mut rng, fits, rows * cols)).collect();
                // The misfit's block, so that it is the only one in it whatever was drawn.
                let block = row * cols + col / MXFP4_BLOCK * MXFP4_BLOCK;
                members[member][block..block + MXFP4_BLOCK].fill(1.0);
                members[member][row * cols + col] = odd;
                let packed = pack_f32(&members, cols, fits, layout);
                assert_eq!(packed.format, needs);
                check_bits(&packed, layout, &members);
                let report = format!("{odd:e} at row {row}, column {col} of matrix {member}");
                assert_eq!(packed.misfit.as_deref(), Some(report.as_str()));
                assert!(packed.non_finite.is_none());
            }
        }
    }
}

/// On one worker, tiles go in order: the first misfit stops the first attempt, the second the next, which by then
/// widens tiles from their codes.
#[test]
fn misfits_of_two_kinds_widen_twice_and_the_first_is_reported() {
    let (rows, cols) = (100, 32);
    let mut member = draw(&mut ChaCha8Rng::seed_from_u64(4), WeightFormat::Mxfp4, rows * cols);
    member[40 * cols..41 * cols].fill(1.0);
    member[40 * cols + 5] = -1.125;
    member[99 * cols + 31] = 1.0 / 3.0;
    let members = [member];
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| {
        for layout in LAYOUTS {
            let packed = pack_f32(&members, cols, WeightFormat::Mxfp4, layout);
            assert_eq!(packed.format, WeightFormat::F32);
            assert_eq!(
                packed.misfit.as_deref(),
                Some("-1.125e0 at row 40, column 5 of matrix 0")
            );
            check_bits(&packed, layout, &members);
        }
    });
}

#[test]
fn a_value_too_small_for_its_block_is_a_misfit() {
    let mut block = vec![4.0; MXFP4_BLOCK];
    block[7] = 0.25;
    let members = [block];
    let packed = pack_f32(&members, MXFP4_BLOCK, WeightFormat::Mxfp4, &Tiles { gated: false });
    assert_eq!(packed.format, WeightFormat::Bf16);
    assert_eq!(packed.misfit.as_deref(), Some("2.5e-1 at row 0, column 7 of matrix 0"));
    check_bits(&packed, &Tiles { gated: false }, &members);
}

#[test]
fn zeros_keep_their_signs() {
    let row = |i: usize| (0..64).map(move |j| if (i + j).is_multiple_of(3) { -0.0 } else { 0.0 });
    let mut member: Vec<f32> = (0..33).flat_map(row).collect();
    // One block with values beside its zeros.
    member[5 * 64..5 * 64 + 2].copy_from_slice(&[6.0, -0.5]);
    let members = [member];
    for format in FORMATS {
        for layout in LAYOUTS {
            let packed = pack_f32(&members, 64, format, layout);
            assert_eq!(packed.format, format);
            check_bits(&packed, layout, &members);
        }
    }
}

/// All codes at every scale there is. Kernels read no scale of 0 or 255 and no value that is subnormal or overflows;
/// a block that would need one becomes bfloat16, which has them all.
#[test]
fn every_scale_is_kept() {
    let codes: Vec<u8> = (0..MXFP4_BLOCK_BYTES as u8).map(|i| i << 4 | (15 - i)).collect();
    for scale in 0..=255 {
        let values = Values::Mxfp4 {
            blocks: &codes,
            scales: &[scale],
        };
        let tensor = Tensor {
            rows: 1,
            cols: MXFP4_BLOCK,
            parts: vec![Part { rows: 1, values }],
        };
        let layout = Tiles { gated: false };
        let packed = pack(std::slice::from_ref(&tensor), WeightFormat::Mxfp4, &layout).unwrap();
        let expected = match scale {
            2..=252 => WeightFormat::Mxfp4,
            _ => WeightFormat::Bf16,
        };
        assert_eq!(packed.format, expected, "scale {scale}");
        check_bits(&packed, &layout, &[tensor.to_f32().unwrap()]);
        assert_eq!(packed.non_finite.is_some(), scale > 252, "scale {scale}");
    }
}

/// Matrices are packed to the same bytes, with the same findings, as their values are when given as float32. On one
/// worker, so that of many misfits the first is found.
#[track_caller]
fn check_as_float32(members: &[Tensor<'_>], values: &[Vec<f32>], expected: WeightFormat) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for layout in LAYOUTS {
        let stored = pool.install(|| pack(members, expected, layout)).unwrap();
        let by_float32 = pool.install(|| pack_f32(values, members[0].cols, expected, layout));
        let findings = |packed: &Packed| {
            let non_finite = format!("{:?}", packed.non_finite);
            (packed.format, packed.misfit.clone(), non_finite, packed.fingerprint)
        };
        assert_eq!(findings(&stored), findings(&by_float32));
        assert!(*stored.bytes == *by_float32.bytes, "in {:?}", stored.format);
        check_bits(&stored, layout, values);
    }
}

/// Blocks as any program may have written them: with the scale that packing has, with larger ones, and zeros of all
/// scales; and one block among them at each scale beyond those that kernels read, or near.
#[test]
fn stored_mxfp4_is_packed_as_its_values_are() {
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    for (rows, cols) in [(1, 32), (31, 96), (33, 2880), (70, 544)] {
        for odd in [
            None,
            Some(0),
            Some(1),
            Some(2),
            Some(252),
            Some(253),
            Some(254),
            Some(255),
        ] {
            let mut member = || {
                let (mut blocks, mut scales) = (Vec::new(), Vec::new());
                for _ in 0..rows * cols / MXFP4_BLOCK {
                    // Magnitudes below 1 are zeros; zeros have any scale.
                    let magnitudes = [8, 8, 8, 6, 4, 2, 1][rng.random_range(0..7)];
                    let mut code = || rng.random_range(0..magnitudes) | rng.random_range(0..2) << 3;
                    blocks.extend((0..MXFP4_BLOCK_BYTES).map(|_| code() | code() << 4));
                    scales.push(rng.random_range(if magnitudes == 1 { 0..=254 } else { 4..=252 }));
                }
                (blocks, scales)
            };
            let mut members: [(Vec<u8>, Vec<u8>); 2] = [member(), member()];
            if let Some(odd) = odd {
                let at = rng.random_range(0..members[1].1.len());
                members[1].1[at] = odd;
            }
            let tensor = |(blocks, scales)| whole(Values::Mxfp4 { blocks, scales }, cols);
            let tensors = members.each_ref().map(|(blocks, scales)| tensor((blocks, scales)));
            let values = tensors.each_ref().map(|tensor| tensor.to_f32().unwrap());
            for expected in FORMATS {
                check_as_float32(&tensors, &values, expected);
            }
        }
    }
}

/// All 65,536 of them at once, those that are not finite, and those that are.
#[test]
fn stored_bfloat16_is_packed_as_its_values_are() {
    let all = 0..=u16::MAX;
    let finite = all.clone().filter(|&bits| bf16::from_bits(bits).is_finite());
    for stored in [all.clone().collect::<Vec<_>>(), finite.collect()] {
        for cols in [32, 64, 255, 256] {
            let stored = &stored[..stored.len() / cols * cols];
            let bytes: Vec<u8> = stored.iter().flat_map(|bits| bits.to_le_bytes()).collect();
            let values = stored
                .iter()
                .map(|&bits| f32::from_bits(u32::from(bits) << 16))
                .collect();
            for expected in FORMATS {
                check_as_float32(
                    &[whole(Values::Bf16(&bytes), cols)],
                    std::slice::from_ref(&values),
                    expected,
                );
            }
        }
    }
}

#[test]
fn what_is_not_finite_is_kept_and_reported() {
    for odd in [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        // A NaN that is no bfloat16.
        f32::from_bits(0xff80_0001),
    ] {
        for expected in FORMATS {
            for layout in LAYOUTS {
                let mut members = vec![draw(&mut ChaCha8Rng::seed_from_u64(5), expected, 70 * 32); 2];
                // In both matrices, two in one row, and in a tile after the first one's.
                for (member, row, col) in [(0, 67, 3), (1, 2, 31), (0, 35, 17), (0, 35, 20)] {
                    members[member][row * 32 + col] = odd;
                }
                let packed = pack_f32(&members, 32, expected, layout);
                let needs = if odd.to_bits() & 0xffff != 0 {
                    WeightFormat::F32
                } else {
                    expected.max(WeightFormat::Bf16)
                };
                assert_eq!(packed.format, needs);
                check_bits(&packed, layout, &members);
                let found = packed.non_finite.expect("some values are not finite");
                assert_eq!((found.count, found.matrix, found.row, found.col), (4, 0, 35, 17));
                assert_eq!(found.value.to_bits(), odd.to_bits());
                assert_eq!(packed.misfit.is_some(), needs != expected);
            }
        }
    }
}

/// A checkpoint with one value of some tensors replaced.
struct Changed<'a> {
    checkpoint: &'a SyntheticCheckpoint,
    /// Each tensor's bytes as float32.
    tensors: Vec<(TensorId, Vec<u8>)>,
}

impl<'a> Changed<'a> {
    fn new(checkpoint: &'a SyntheticCheckpoint, changes: &[(TensorId, usize, f32)]) -> Self {
        let mut ids: Vec<TensorId> = changes.iter().map(|&(id, ..)| id).collect();
        ids.dedup();
        let tensor = |id: TensorId| {
            let mut values = checkpoint.tensor(id).unwrap().to_f32().unwrap();
            let of_tensor = changes.iter().filter(|(changed, ..)| *changed == id);
            of_tensor.for_each(|&(_, at, value)| values[at] = value);
            (id, to_bytes(&values))
        };
        Self {
            checkpoint,
            tensors: ids.into_iter().map(tensor).collect(),
        }
    }
}

impl Checkpoint for Changed<'_> {
    fn config(&self) -> &ModelConfig {
        self.checkpoint.config()
    }

    fn tensor(&self, id: TensorId) -> getp::error::Result<Tensor<'_>> {
        let Some((_, bytes)) = self.tensors.iter().find(|(changed, _)| *changed == id) else {
            return self.checkpoint.tensor(id);
        };
        let [rows, cols] = id.shape(self.config());
        let values = Values::F32(bytes);
        let parts = vec![Part { rows, values }];
        Ok(Tensor { rows, cols, parts })
    }
}

/// A model of few tensors.
fn few_experts() -> ModelConfig {
    ModelConfig {
        vocab_size: 40,
        n_experts: 4,
        ..ModelConfig::preset_7m()
    }
}

#[test]
fn tensors_that_are_not_finite_are_named() {
    let config = few_experts();
    let checkpoint = SyntheticCheckpoint::new(&config, 7, Temperament::Tame).unwrap();
    let (layer, expert) = (1, 3);
    let changed = Changed::new(
        &checkpoint,
        &[
            (TensorId::Embedding, 39 * 32 + 5, f32::NAN),
            (TensorId::AttnNorm { layer }, 4, f32::INFINITY),
            (TensorId::Mlp1 { layer, expert }, 70 * 32 + 1, f32::NEG_INFINITY),
            (TensorId::Mlp2Bias { layer, expert }, 6, f32::NAN),
            // -inf is no sink, which is as good as any.
            (TensorId::Sinks { layer: 0 }, 0, f32::NEG_INFINITY),
            (TensorId::Sinks { layer: 0 }, 1, f32::INFINITY),
            (TensorId::Sinks { layer: 1 }, 0, f32::NEG_INFINITY),
            (TensorId::Sinks { layer: 1 }, 1, f32::NEG_INFINITY),
            (TensorId::RouterBias { layer }, 2, f32::NEG_INFINITY),
        ],
    );
    let (_, report) = load(&changed).unwrap();
    let mut lines = report.non_finite;
    lines.sort();
    assert_eq!(
        lines,
        [
            "attn_sinks of layer 0: 1 of its values not finite, the first inf at row 0, column 1",
            "b_mlp2 of layer 1: 1 of its values not finite, the first NaN at row 0, column 6 of expert 3",
            "b_router of layer 1: 1 of its values not finite, the first -inf at row 0, column 2",
            "rms_attn_w of layer 1: 1 of its values not finite, the first inf at row 0, column 4",
            "token_embedding_table: 1 of its values not finite, the first NaN at row 39, column 5",
            "w_mlp1 of layer 1: 1 of its values not finite, the first -inf at row 70, column 1 of expert 3",
        ]
    );
    assert!(
        report
            .kinds
            .iter()
            .all(|kind| kind.remark.as_ref().is_none_or(|remark| remark.starts_with("not ")))
    );
    assert!(load(&checkpoint).unwrap().1.non_finite.is_empty());
}

/// Experts that are stored transposed are packed as if they were not, tile by tile.
#[test]
fn columns_are_packed_as_rows() {
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    let (rows, cols) = (70, 64);
    for (format, element) in [
        (WeightFormat::Mxfp4, Element::Bf16),
        (WeightFormat::Bf16, Element::Bf16),
        (WeightFormat::F32, Element::F32),
    ] {
        let members: Vec<_> = (0..2).map(|_| draw(&mut rng, format, rows * cols)).collect();
        let transposed = |values: &Vec<f32>| -> Vec<u8> {
            let places = (0..cols).flat_map(|col| (0..rows).map(move |row| row * cols + col));
            let values = places.map(|at| values[at]);
            match element {
                Element::F32 => values.flat_map(f32::to_le_bytes).collect(),
                Element::Bf16 => values.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect(),
            }
        };
        let bytes: Vec<_> = members.iter().map(transposed).collect();
        let tensor = |bytes| {
            let values = Values::Columns(Columns {
                element,
                bytes,
                stride: rows,
                first: 0,
                rows,
            });
            let parts = vec![Part { rows, values }];
            Tensor { rows, cols, parts }
        };
        let tensors: Vec<_> = bytes.iter().map(|bytes| tensor(bytes)).collect();
        for layout in LAYOUTS {
            let packed = pack(&tensors, WeightFormat::Mxfp4, layout).unwrap();
            assert_eq!(packed.format, format);
            check_bits(&packed, layout, &members);
        }
    }
}

/// Query, key and value projections as in a Hugging Face directory: separate tensors of different types, with borders
/// within a tile.
#[test]
fn parts_of_any_type_follow_one_another() {
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    let cols = 64;
    let [q_rows, k_rows, v_rows] = [45, 1, 30];
    let values = draw(&mut rng, WeightFormat::Mxfp4, q_rows * cols);
    let f32s = to_bytes(&values);
    let bf16s: Vec<u8> = draw(&mut rng, WeightFormat::Bf16, k_rows * cols)
        .iter()
        .flat_map(|&v| bf16::from_f32(v).to_le_bytes())
        .collect();
    let blocks: Vec<u8> = (0..v_rows * cols / 2).map(|_| rng.random()).collect();
    let scales: Vec<u8> = (0..v_rows * cols / MXFP4_BLOCK)
        .map(|_| rng.random_range(100..140))
        .collect();
    let mxfp4 = Values::Mxfp4 {
        blocks: &blocks,
        scales: &scales,
    };
    let part = |rows, values| Part { rows, values };
    let all = [
        (
            vec![part(q_rows, Values::F32(&f32s)), part(v_rows, mxfp4)],
            WeightFormat::Mxfp4,
        ),
        (
            vec![
                part(q_rows, Values::F32(&f32s)),
                part(k_rows, Values::Bf16(&bf16s)),
                part(v_rows, mxfp4),
            ],
            WeightFormat::Bf16,
        ),
        (
            vec![
                part(v_rows, mxfp4),
                part(k_rows, Values::Bf16(&bf16s)),
                part(q_rows, Values::F32(&f32s)),
            ],
            WeightFormat::Bf16,
        ),
    ];
    for (parts, format) in all {
        let rows = parts.iter().map(|p| p.rows).sum();
        let tensor = Tensor { rows, cols, parts };
        for layout in LAYOUTS {
            let packed = pack(std::slice::from_ref(&tensor), WeightFormat::Mxfp4, layout).unwrap();
            assert_eq!(packed.format, format);
            check_bits(&packed, layout, &[tensor.to_f32().unwrap()]);
        }
    }
}

/// Whether a block is E2M1 values times one scale that kernels read, by trying all.
fn is_mxfp4(block: &[f32]) -> bool {
    (1..=252).any(|scale| {
        let scale = f64::from(scale - 127).exp2();
        block
            .iter()
            .all(|&v| E2M1.iter().any(|&e| f64::from(e) * scale == f64::from(v)))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the blocks are, the format is the narrowest that is exact for all, and nothing is lost.
    #[test]
    fn the_narrowest_exact_format_is_chosen(
        blocks in prop::collection::vec(
            (prop::collection::vec(0..16_usize, MXFP4_BLOCK), -100..100_i32, 0..64_u8, 0..MXFP4_BLOCK, -8..8_i32),
            2..80,
        ),
        gated in any::<bool>(),
    ) {
        let values: Vec<f32> = blocks
            .iter()
            .flat_map(|(codes, exponent, kind, at, shift)| {
                let scale = (*exponent as f32).exp2();
                let mut block: Vec<f32> = codes.iter().map(|&c| E2M1[c] * scale).collect();
                match kind {
                    0 => block[*at] = 1.25 * scale,
                    1 => block[*at] = scale * 1.000_001,
                    // A value of the format, though perhaps not of this block's scale.
                    2 => block[*at] = scale * (*shift as f32).exp2(),
                    _ => {}
                }
                block
            })
            .collect();
        let expected = if values.iter().any(|v| v.to_bits() & 0xffff != 0) {
            WeightFormat::F32
        } else if values.chunks_exact(MXFP4_BLOCK).all(is_mxfp4) {
            WeightFormat::Mxfp4
        } else {
            WeightFormat::Bf16
        };
        let members = [values];
        let layout = Tiles { gated };
        let packed = pack_f32(&members, MXFP4_BLOCK, WeightFormat::Mxfp4, &layout);
        prop_assert_eq!(packed.format, expected);
        check_bits(&packed, &layout, &members);
    }
}

#[test]
fn the_report_says_what_each_kind_became() {
    let report = |dense, experts| {
        let synthetic = Synthetic {
            config: few_experts(),
            seed: 7,
            temperament: Temperament::Wild,
            dense,
            experts,
        };
        let (_, report) = load(&SyntheticCheckpoint::widened(&synthetic)).unwrap();
        let kind = |name: &str| report.kinds.iter().find(|k| k.name == name).unwrap().clone();
        [kind("w_qkv"), kind("w_mlp1"), kind("rms_attn_w")]
    };
    let [qkv, mlp1, norm] = report(Dense::Bf16, Experts::Mxfp4);
    assert_eq!([&qkv.format, &mlp1.format, &norm.format], ["BF16", "MXFP4", "F32"]);
    assert_eq!([qkv.remark, mlp1.remark, norm.remark], [None, None, None]);

    let [qkv, mlp1, norm] = report(Dense::F32, Experts::Bf16);
    assert_eq!([&qkv.format, &mlp1.format, &norm.format], ["F32", "BF16", "F32"]);
    assert!(qkv.remark.unwrap().starts_with("not BF16: "));
    assert!(mlp1.remark.unwrap().starts_with("not MXFP4: "));
    assert_eq!(norm.remark, None);
}

/// Each tensor in its format, every layer and expert with values of its own, spread as the model needs them.
#[test]
fn the_benchmarks_model_has_the_formats_of_a_released_one() {
    let config = few_experts();
    let model = RandomModel::new(&config, 0.5);
    let (_, report) = load(&model).unwrap();
    assert!(
        report.kinds.iter().all(|kind| kind.remark.is_none()),
        "{:?}",
        report.kinds
    );
    assert!(report.non_finite.is_empty());
    let values = |id| model.tensor(id).unwrap().to_f32().unwrap();
    let (layer, expert) = (1, 3);
    let mlp1 = values(TensorId::Mlp1 { layer, expert });
    assert_ne!(mlp1, values(TensorId::Mlp1 { layer, expert: 0 }));
    assert_ne!(mlp1, values(TensorId::Mlp1 { layer: 0, expert }));
    let deviation = |id| {
        let values = values(id);
        (values.iter().map(|v| f64::from(v * v)).sum::<f64>() / values.len() as f64).sqrt()
    };
    // Powers of two scale MXFP4.
    for (id, factor, within) in [
        (TensorId::Embedding, (config.hidden_dim as f64).sqrt(), 0.9..1.1),
        (TensorId::Qkv { layer }, 1.0, 0.9..1.1),
        (TensorId::AttnOut { layer }, 0.25, 0.9..1.1),
        (TensorId::Mlp1 { layer, expert }, 1.0, 0.5..1.2),
        (TensorId::Mlp2 { layer, expert }, 0.25, 0.5..1.2),
    ] {
        let [_, cols] = id.shape(&config);
        let ratio = deviation(id) * (cols as f64).sqrt() / factor;
        assert!(within.contains(&ratio), "{id:?}: {ratio}");
    }
}

#[test]
fn a_skewed_router_favours_another_expert_in_each_layer() {
    let config = ModelConfig::preset_7m();
    let experts = config.n_experts;
    let bias = |skew, layer| {
        let model = RandomModel::new(&config, skew);
        model.tensor(TensorId::RouterBias { layer }).unwrap().to_f32().unwrap()
    };
    for layer in 0..config.n_layers {
        assert!(bias(0.0, layer).iter().all(|&bias| bias == 0.0));
        let bias = bias(0.5, layer);
        let nth = |n: usize| bias[(layer + n) % experts];
        assert_eq!(nth(0), 0.0);
        assert!((1..experts).all(|n| nth(n) < nth(n - 1)), "{bias:?}");
    }
}
