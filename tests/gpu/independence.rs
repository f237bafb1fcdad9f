//! A request's logits are the same bit for bit alone and in a batch, in any order of requests, for any prompt chunks,
//! and on one device and a group of them.

use super::answers::{Answers, Run, answer, options, prompt, prompts};
use super::ops::WIDE;
use super::synthetic::{Dense, Experts, Synthetic, SyntheticCheckpoint, Temperament};
use super::wide::Wide;
use super::{drivers, open};
use getp::backend::gpu::args::{ATTENTION_GROUP, ATTENTION_UNIT, KV_PAGE};
use getp::backend::gpu::attention_plan::won_by_sharing;
use getp::backend::gpu::attention_runs::{Load, least_run};
use getp::backend::gpu::open::inspect::open_cut;
use getp::backend::gpu::replica::GpuReplica;
use getp::backend::gpu::shared_keys::{PagedRow, SharedPrefixes};
use getp::batch::Want;
use getp::checkpoint::Checkpoint;
use getp::config::ModelConfig;
use getp::options::{Options, Precision};
use getp::replica::Replica;
use std::collections::HashMap;

/// One model has the 20b's heads, whose attention uses the matrix cores, others have different heads.
fn configs() -> [ModelConfig; 2] {
    let grouped = ModelConfig {
        vocab_size: 302,
        hidden_dim: 160,
        n_experts: 8,
        experts_per_token: 2,
        intermediate_dim: 96,
        head_dim: 64,
        n_attn_heads: 16,
        n_kv_heads: 2,
        sliding_window: 100,
        seq_len: 256,
        ..ModelConfig::preset_7m()
    };
    let odd = ModelConfig {
        head_dim: 24,
        n_attn_heads: 6,
        ..grouped.clone()
    };
    [grouped, odd]
}

/// Kinds of weights: as released checkpoints have them, and float32, which plain kernels multiply.
const KINDS: [(Dense, Experts); 2] = [(Dense::Bf16, Experts::Mxfp4), (Dense::F32, Experts::F32)];

/// Tokens fed beyond a prompt.
const MORE: usize = 10;

fn run(want: Want) -> Run {
    Run {
        more: MORE,
        want,
        record_all: true,
        ends: false,
        share_beginnings: false,
        preempts: false,
    }
}

/// Prompts of which some are longer than a window, a chunk and a unit of attention.
fn mixed(config: &ModelConfig) -> Vec<Vec<u32>> {
    let mut prompts = prompts(config, 5);
    let long: Vec<u32> = prompts.concat();
    prompts[2] = [&long[..], &long[..]].concat()[..150].to_vec();
    prompts
}

/// Prompts of which each begins as the longest one does, as far as it goes or up to a place of its own.
fn alike(prompts: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let longest = &prompts[2];
    let ends = [longest.len(), 140, 128, 129, 64, 130];
    ends.iter()
        .zip(prompts.iter().cycle())
        .map(|(&end, tail)| [&longest[..end], &tail[..tail.len().min(9)]].concat())
        .collect()
}

/// Checks that `request` has the same results in `answers` as in the first run, where its number is `of`.
#[track_caller]
fn check(first: &Answers, of: usize, answers: &Answers, request: usize, what: &str) {
    assert_eq!(first.tokens[&of], answers.tokens[&request], "{what}: tokens of {of}");
    for (&(_, position), &expected) in first.greedy.range((of, 0)..(of + 1, 0)) {
        let got = answers.greedy[&(request, position)];
        let bits = |(token, logit): (u32, f32)| (token, logit.to_bits());
        assert_eq!(bits(got), bits(expected), "{what}: request {of}, position {position}");
        let (Some(expected), Some(got)) = (
            first.logits.get(&(of, position)),
            answers.logits.get(&(request, position)),
        ) else {
            continue;
        };
        let differ = (0..got.len()).find(|&i| got[i].to_bits() != expected[i].to_bits());
        assert_eq!(
            differ, None,
            "{what}: request {of}, position {position}: a logit differs"
        );
    }
}

fn check_all(config: &ModelConfig, (dense, experts): (Dense, Experts), precision: Precision) {
    let synthetic = Synthetic {
        config: config.clone(),
        seed: 81,
        temperament: Temperament::Wild,
        dense,
        experts,
    };
    let checkpoint = SyntheticCheckpoint::widened(&synthetic.check().unwrap());
    let prompts = mixed(config);
    let name = format!("{precision:?}, {dense:?}, {experts:?}, heads of {}", config.head_dim);
    // Where every position is recorded, pieces of prompts have no more rows than the batch has sequences.
    let open = |max_batch, step_tokens| open(&checkpoint, &options(precision, max_batch, step_tokens));
    let mut replica = open(100, 128);
    let first = answer(&mut *replica, config, &prompts, run(Want::Logits));

    let reversed: Vec<_> = prompts.iter().rev().cloned().collect();
    let preempted = Run {
        preempts: true,
        ..run(Want::Tokens)
    };
    let backwards = answer(&mut *replica, config, &reversed, preempted);
    // Other prompt chunks and other requests beside them: different numbers of rows, tiles and rows per expert.
    let cut = answer(&mut *open(19, 37), config, &prompts, run(Want::Logits));
    for request in 0..prompts.len() {
        let last = prompts.len() - 1 - request;
        let what = format!("{name}: in reverse order, preempted, only the largest wanted");
        check(&first, request, &backwards, last, &what);
        check(&first, request, &cut, request, &format!("{name}: in other pieces"));
    }
    let is_emulated = drivers()[0].device().runtime == "simt";
    // The longest alone will do on the emulated device, for its time.
    for &request in if is_emulated { &[2][..] } else { &[0, 2] } {
        let alone = answer(
            &mut *open(33, 64),
            config,
            &prompts[request..=request],
            run(Want::Logits),
        );
        check(&first, request, &alone, 0, &format!("{name}: alone"));
    }
    // With blocks of their own, and with shared ones.
    let alike = alike(&prompts);
    let shared = |share_beginnings, want| Run {
        record_all: false,
        ends: true,
        share_beginnings,
        ..run(want)
    };
    // One of the two ways on the emulated device, for its time.
    let wants = &[Want::Tokens, Want::Logits][..if is_emulated { 1 } else { 2 }];
    let check_shared = |replica: &mut dyn Replica, prompts: &[Vec<u32>], what: &str| {
        let apart = answer(replica, config, prompts, shared(false, Want::Logits));
        for &want in wants {
            let together = answer(replica, config, prompts, shared(true, want));
            for request in 0..prompts.len() {
                check(&apart, request, &together, request, what);
            }
        }
    };
    check_shared(&mut *replica, &alike, &format!("{name}: shared beginnings"));
    // Behind an answer, whose keys and values decoding has computed: those of the second block's last positions.
    let mut replica = open(1, 128);
    let mut turns = vec![prompts[2][..120].to_vec()];
    let first_turn = answer(&mut *replica, config, &turns, shared(false, Want::Tokens));
    turns.push([&turns[0], &first_turn.tokens[&0], &prompts[4][..]].concat());
    check_shared(&mut *replica, &turns, &format!("{name}: behind an answer"));
    // A SIMT machine's groups have tests of their own.
    if is_emulated {
        return;
    }
    let devices = drivers();
    for stages in 2..=devices.len().clamp(2, config.n_layers) {
        let ends: Vec<_> = (1..=stages).map(|stage| stage * config.n_layers / stages).collect();
        // A device alone has all stages.
        let devices = devices.iter().cycle().take(stages).cloned();
        let devices = devices.map(super::context).collect();
        let mut group = open_cut(devices, &ends, &checkpoint, &options(precision, 60, 128)).unwrap();
        for want in [Want::Logits, Want::Tokens] {
            let of_group = answer(&mut group, config, &prompts, run(want));
            for request in 0..prompts.len() {
                let what = format!("{name}: in {stages} stages, {want:?}");
                check(&first, request, &of_group, request, &what);
            }
        }
    }
}

/// All kinds of weights in all models; on the emulated device, where they would take minutes, one kind in each.
fn check_kinds(precision: Precision) {
    let is_emulated = drivers()[0].device().runtime == "simt";
    for (i, config) in configs().iter().enumerate() {
        for (j, kind) in KINDS.into_iter().enumerate() {
            if i == j || !is_emulated {
                check_all(config, kind, precision);
            }
        }
    }
}

#[test]
fn fast() {
    check_kinds(Precision::Fast);
}

#[test]
fn exact() {
    check_kinds(Precision::Exact);
}

/// Steps of so many rows have kernels of their own for norms and the router, others with more than 32 experts, and
/// several blocks sort.
#[test]
#[cfg_attr(
    feature = "simt",
    ignore = "for a device: the emulated one has no such kernels and would take minutes"
)]
fn many_rows_at_once() {
    let [grouped, _] = configs();
    for n_experts in [grouped.n_experts, 41] {
        // Norms by waves take several steps and a rest of 576 elements.
        check_many_rows(ModelConfig {
            hidden_dim: 576,
            n_experts,
            experts_per_token: 4,
            ..grouped.clone()
        });
    }
}

/// Rows that have more keys than a span of decode attention's units, and windows that lie in two spans, by each of its
/// kernels. These cut rows in other ways, the more rows there are the fewer. Of few such rows warps have several jobs,
/// and fold a row's partial sums before the last one.
#[test]
#[cfg_attr(feature = "simt", ignore = "for a device: the emulated one would take minutes")]
fn rows_longer_than_a_span() {
    check_longer([2040, 6140, 4095, 2000], 2035, 100, &[4, 40, 280]);
}

/// Rows that blocks share out among their warps, of which a few are cut instead where blocks have a number of rows each
/// and some are left over.
#[test]
#[cfg_attr(feature = "simt", ignore = "for a device: the emulated one would take minutes")]
fn rows_that_stay_whole() {
    check_longer([8200, 8195, 8960, 4400], 8170, 100, &[36, 50, 64]);
}

/// Windows that are cut into items where rows are few, by warps that work in pairs.
#[test]
#[cfg_attr(feature = "simt", ignore = "for a device: the emulated one would take minutes")]
fn windows_of_several_items() {
    check_longer([1000, 290, 450, 2050], 500, 300, &[9, 40]);
}

/// Rows that are cut into groups if they are alone, and into spans, five each, if they are four.
#[test]
#[cfg_attr(feature = "simt", ignore = "for a device: the emulated one would take minutes")]
fn rows_of_several_spans() {
    check_longer([8200, 8195, 8210, 8199], 2035, 100, &[4, 40]);
}

/// Of one such row the warps that take jobs together have two jobs at most, of four of them three.
#[test]
#[cfg_attr(feature = "simt", ignore = "for a device: the emulated one would take minutes")]
fn rows_of_many_spans() {
    check_longer([33_000, 32_900, 33_100, 32_800], 2035, 100, &[4]);
}

/// Compares each of the first rows alone with the same in steps of so many rows, of which the others have `others` keys
/// and some more. Answers are so long that all rows decode together in the end.
fn check_longer(first: [usize; 4], others: usize, window: usize, counts: &[usize]) {
    const STEP_TOKENS: usize = 16_384;
    let [grouped, _] = configs();
    let length = |i: usize| first.get(i).copied().unwrap_or(others + i % 11);
    let most = counts.iter().copied().max().unwrap();
    let more = (0..most).map(length).sum::<usize>().div_ceil(STEP_TOKENS) + MORE;
    let config = ModelConfig {
        n_attn_heads: 64,
        n_kv_heads: 8,
        sliding_window: window,
        seq_len: first.iter().max().unwrap().max(&(others + 11)) + more,
        ..grouped
    };
    let checkpoint = SyntheticCheckpoint::new(&config, 83, Temperament::Wild).unwrap();
    let prompts: Vec<_> = (0..most).map(|i| prompt(&config, i, length(i))).collect();
    let answer = |requests: std::ops::Range<usize>| {
        let options = Options {
            kv_mb: 8192,
            ..options(Precision::Fast, requests.len(), STEP_TOKENS)
        };
        let mut replica = open(&checkpoint, &options);
        let recorded = Run {
            more,
            record_all: false,
            ..run(Want::Tokens)
        };
        answer(&mut *replica, &config, &prompts[requests], recorded)
    };
    let alone: Vec<Answers> = (0..first.len()).map(|i| answer(i..i + 1)).collect();
    for &count in counts {
        let together = answer(0..count);
        for (request, alone) in alone.iter().enumerate() {
            assert!(!alone.greedy.is_empty());
            check(alone, 0, &together, request, &format!("{count} rows"));
        }
    }
}

/// A row by itself, whose layers are one launch where the device has it, and the same beside others, whose are not: of
/// few keys and of as many as several blocks share, with more experts than a warp has lanes.
#[test]
#[cfg_attr(feature = "simt", ignore = "for a device: the emulated one has no such launches")]
fn a_row_by_itself() {
    check_alone(128);
}

/// The same with windows that may lie in more units than a team has warps, and in several items.
#[test]
#[cfg_attr(feature = "simt", ignore = "for a device: the emulated one has no such launches")]
fn a_row_by_itself_with_a_long_window() {
    check_alone(500);
    check_alone(700);
}

fn check_alone(window: usize) {
    const LENGTHS: [usize; 5] = [3, 130, 500, 2100, 8150];
    let [grouped, _] = configs();
    let config = ModelConfig {
        hidden_dim: 1216,
        n_experts: 40,
        experts_per_token: 4,
        intermediate_dim: 1184,
        n_attn_heads: 24,
        n_kv_heads: 3,
        n_layers: 5,
        sliding_window: window,
        seq_len: LENGTHS[4] + 4 * MORE,
        ..grouped
    };
    let checkpoint = SyntheticCheckpoint::new(&config, 87, Temperament::Wild).unwrap();
    let prompts: Vec<_> = (0..LENGTHS.len()).map(|i| prompt(&config, i, LENGTHS[i])).collect();
    let options = Options {
        kv_mb: 2048,
        ..options(Precision::Fast, prompts.len(), 4096)
    };
    let recorded = Run {
        record_all: false,
        more: 4 * MORE,
        ..run(Want::Logits)
    };
    let mut replica = open(&checkpoint, &options);
    let together = answer(&mut *replica, &config, &prompts, recorded);
    let in_one_launch = |replica: &dyn Replica| GpuReplica::of(replica).unwrap().steps_in_one_launch();
    GpuReplica::of_mut(&mut *replica)
        .unwrap()
        .insist_on_one_launch()
        .unwrap();
    for request in 0..prompts.len() {
        let before = in_one_launch(&*replica);
        let alone = answer(&mut *replica, &config, &prompts[request..][..1], recorded);
        check(&alone, 0, &together, request, "by itself");
        println!(
            "steps in one launch before and behind: {before:?}, {:?}",
            in_one_launch(&*replica)
        );
        if let (Some(before), Some(after)) = (before, in_one_launch(&*replica)) {
            // Where a window lies in five units a step is not one launch.
            let may_be_apart = window == 500 && LENGTHS[request] >= window;
            assert!(after > before || may_be_apart, "of {} keys", LENGTHS[request]);
        }
    }
}

/// Decoding rows that see the same keys in the same pages, up to different places, and others beside them: some
/// families read these keys once for two rows, others in another order. More rows than a device's teams take.
#[test]
fn rows_that_share_groups_of_keys() {
    let is_emulated = drivers()[0].device().runtime == "simt";
    let [grouped, _] = configs();
    let config = ModelConfig {
        hidden_dim: 64,
        n_layers: 2,
        seq_len: 1300 + MORE,
        ..grouped
    };
    let checkpoint = SyntheticCheckpoint::new(&config, 85, Temperament::Wild).unwrap();
    let long = prompt(&config, 3, 1200);
    let count = if is_emulated { 4 } else { 21 };
    let prompts: Vec<_> = (0..count)
        .map(|i| {
            let shared = [570, 590, 0, 1200, 530, 1090][i % 6];
            [&long[..shared], &prompt(&config, 50 + i, 9 + i)].concat()
        })
        .collect();
    // No answer ends before others have begun.
    let shared = |share_beginnings| Run {
        record_all: false,
        share_beginnings,
        more: 2 * MORE,
        ..run(Want::Logits)
    };
    let mut replica = open(&checkpoint, &options(Precision::Fast, count, 4096));
    let apart = answer(&mut *replica, &config, &prompts, shared(false));
    let together = answer(&mut *replica, &config, &prompts, shared(true));
    for request in 0..count {
        check(&apart, request, &together, request, "keys of two rows");
    }
}

/// Whether a step in which all of these decode is planned with keys that are read once for many.
fn wins_by_sharing(config: &ModelConfig, prompts: &[Vec<u32>]) -> bool {
    let mut numbers = HashMap::new();
    let tables: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| {
            let ends = (KV_PAGE..=prompt.len()).step_by(KV_PAGE);
            let mut number = |of: &[u32]| {
                let next = numbers.len() as u32;
                *numbers.entry(of.to_vec()).or_insert(next)
            };
            ends.map(|end| number(&prompt[..end])).collect()
        })
        .collect();
    let rows = prompts.iter().zip(&tables).map(|(prompt, pages)| PagedRow {
        position: prompt.len(),
        pages,
    });
    let rows: Vec<_> = rows.collect();
    let load = Load {
        kv_heads: config.n_kv_heads,
        at_once: 132,
        least_run: least_run(rows.len(), 8),
        most_partials: usize::MAX,
        by_position: false,
        whole_rows: false,
    };
    let mut prefixes = SharedPrefixes::default();
    let pages = ATTENTION_GROUP * ATTENTION_UNIT / KV_PAGE;
    prefixes.find(&rows, pages, 4 * rows.len()).unwrap();
    won_by_sharing(&load, &prefixes, 16, rows.len()) > 0
}

/// Many rows and few with beginnings so long that keys are read once for all of them, where a kernel does that, in both
/// of its formats. Some share a part of what others do, and some nothing.
#[test]
#[cfg_attr(feature = "simt", ignore = "for a device: the emulated one would take hours")]
fn rows_that_share_long_beginnings() {
    let [grouped, _] = configs();
    let config = ModelConfig {
        hidden_dim: 64,
        n_layers: 2,
        n_attn_heads: 64,
        n_kv_heads: 8,
        seq_len: 9500,
        ..grouped
    };
    let long = [3, 4].map(|seed| prompt(&config, seed, 9300));
    let prompts: Vec<_> = (0..45)
        .map(|i| {
            let shared = match i % 9 {
                0 => 0,
                1..=4 => 4700,
                5 | 6 => 9300,
                _ => 2100,
            };
            // The second half of the longest beginnings parts.
            let (common, parted) = (shared.min(5000), shared.max(5000));
            let own = prompt(&config, 50 + i, 9 + i);
            [&long[0][..common], &long[i % 2][5000..parted], &own].concat()
        })
        .collect();
    assert!(wins_by_sharing(&config, &prompts) && wins_by_sharing(&config, &prompts[..7]));
    let shared = |share_beginnings| Run {
        record_all: false,
        share_beginnings,
        more: 4 * MORE,
        ..run(Want::Logits)
    };
    let model = || SyntheticCheckpoint::new(&config, 86, Temperament::Wild).unwrap();
    let (released, wide) = (model(), Wide::new(model(), WIDE));
    let checkpoints: [&dyn Checkpoint; 2] = [&released, &wide];
    for checkpoint in checkpoints {
        for count in [prompts.len(), 7] {
            let prompts = &prompts[..count];
            let mut replica = open(checkpoint, &options(Precision::Fast, count, 4096));
            let apart = answer(&mut *replica, &config, prompts, shared(false));
            let together = answer(&mut *replica, &config, prompts, shared(true));
            for request in 0..count {
                check(&apart, request, &together, request, "long beginnings");
            }
        }
    }
}

/// Requests that take all positions that released models have, one of them with an answer of many tokens, alone, with
/// another chunk, and both together.
#[test]
#[cfg_attr(feature = "simt", ignore = "for a device: the emulated one would take hours")]
fn the_whole_context() {
    const CONTEXT: usize = 131_072;
    let [grouped, _] = configs();
    let config = ModelConfig {
        seq_len: CONTEXT,
        context_length: Some(CONTEXT),
        ..grouped
    };
    let checkpoint = SyntheticCheckpoint::new(&config, 84, Temperament::Wild).unwrap();
    let prompts = [CONTEXT - MORE, CONTEXT - 2000].map(|length| prompt(&config, 1, length));
    for precision in [Precision::Fast, Precision::Exact] {
        let answer = |requests: std::ops::Range<usize>, step_tokens, more| {
            let options = Options {
                kv_mb: 4096,
                ..options(precision, requests.len(), step_tokens)
            };
            let recorded = Run {
                record_all: false,
                more,
                ..run(Want::Tokens)
            };
            answer(&mut *open(&checkpoint, &options), &config, &prompts[requests], recorded)
        };
        let alone = answer(0..1, 8192, MORE);
        let last = *alone.greedy.keys().next_back().unwrap();
        assert_eq!(last, (0, CONTEXT - 1), "the last position that there is");
        check(&alone, 0, &answer(0..1, 3000, MORE), 0, "in other chunks");
        let long = answer(1..2, 3000, 2000);
        assert_eq!(long.greedy.len(), 2000 + 1);
        let together = answer(0..2, 5000, MORE);
        check(&alone, 0, &together, 0, "beside another");
        let first = (0, CONTEXT - 2000 - 1);
        let bits = |greedy: (u32, f32)| (greedy.0, greedy.1.to_bits());
        assert_eq!(
            bits(long.greedy[&first]),
            bits(together.greedy[&(1, first.1)]),
            "the other"
        );
    }
}

fn check_many_rows(config: ModelConfig) {
    let checkpoint = SyntheticCheckpoint::new(&config, 82, Temperament::Wild).unwrap();
    let prompts: Vec<_> = (0..13).map(|i| prompt(&config, i, 180 + i)).collect();
    let answer = |step_tokens| {
        let mut replica = open(&checkpoint, &options(Precision::Fast, 16, step_tokens));
        answer(&mut *replica, &config, &prompts, run(Want::Tokens))
    };
    let (many, few) = (answer(4096), answer(200));
    for request in 0..prompts.len() {
        check(&few, request, &many, request, "all prompts in one step");
    }
}
