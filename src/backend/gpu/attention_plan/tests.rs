use super::super::args::ITEM_PAGES;
use super::super::attention_runs::{is_one_job_a_block, least_run, max_partials, most_items};
use super::super::shared_keys::{PagedRow, tests::RandomRows};
use super::*;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const MULTIPROCESSORS: usize = 132;
const KV_HEADS: usize = 8;
const ALONE: Sharing<'_> = Sharing::Pairs(&[]);

/// Pseudo-random contexts `(row, first, keys)`; windowed ones if `window` is given.
fn contexts(rows: usize, longest: usize, window: Option<usize>, seed: u32) -> Vec<(usize, usize, usize)> {
    let mut state = seed;
    (0..rows)
        .map(|row| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let position = (state >> 8) as usize % longest;
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
            (row, first, position + 1 - first)
        })
        .collect()
}

/// Checks one row's items as the kernels take them; marks its partial sums.
fn check_row(items: &[AttentionItem], first: usize, keys: usize, used: &mut [bool]) {
    let mut at = first;
    for item in items {
        assert_eq!(item.first_unit as usize, at / ATTENTION_UNIT);
        assert!(item.tokens > 0);
        let last = at + item.tokens as usize - 1;
        assert!(last / KV_PAGE - at / KV_PAGE < ITEM_PAGES);
        assert_eq!(item.row_items as usize, items.len());
        if items.len() > 1 {
            let size = item.run as usize * ATTENTION_UNIT;
            assert!(at == first || at.is_multiple_of(size));
            assert_eq!(at / size, last / size);
            let partial = item.partial as usize + at / size - first / size;
            assert!(!std::mem::replace(&mut used[partial], true), "a partial sum used twice");
        }
        at = last + 1;
    }
    assert_eq!(at, first + keys, "each key once");
}

fn load(least_run: usize, most_partials: usize) -> Load {
    Load {
        kv_heads: KV_HEADS,
        at_once: MULTIPROCESSORS,
        least_run,
        most_partials,
        by_position: false,
        whole_rows: false,
    }
}

fn check(contexts: &[(usize, usize, usize)]) -> Vec<AttentionItem> {
    check_runs(contexts, 1)
}

#[test]
fn a_row_by_itself_is_one_job_a_block_as_far_as_that_is_said() {
    for blocks in [16, 20, 58, 84, 108, 132, 160] {
        let longest = (1..200_000)
            .take_while(|&keys| is_one_job_a_block(0, keys, KV_HEADS, blocks))
            .last();
        let longest = longest.expect("a row of one key");
        assert!(longest.is_multiple_of(GROUP_KEYS) && longest / GROUP_KEYS == blocks / KV_HEADS - 1);
        for at_once in [blocks, 2 * blocks, 5 * blocks] {
            let load = Load {
                at_once,
                ..load(ATTENTION_GROUP, usize::MAX)
            };
            let mut items = Vec::new();
            let rows = (1..=longest)
                .step_by(61)
                .flat_map(|keys| [(0, keys), (4_000 + keys, keys)]);
            for (first, keys) in rows.filter(|&(first, keys)| is_one_job_a_block(first, keys, KV_HEADS, blocks)) {
                let row = std::iter::once((0, first, keys));
                plan_decode(row, ALONE, &load, &mut Cuts::default(), &mut items).unwrap();
                assert!(
                    items.len() * KV_HEADS <= blocks,
                    "{keys} keys from {first}, {blocks} blocks"
                );
                // A whole row's item does not say where it begins.
                let begins = |item: &AttentionItem| first.max(item.first_unit as usize * ATTENTION_UNIT);
                let units = |item: &AttentionItem| {
                    let last = begins(item) + item.tokens as usize - 1;
                    last / ATTENTION_UNIT - begins(item) / ATTENTION_UNIT + 1
                };
                assert!(
                    items.iter().all(|item| units(item) <= ATTENTION_GROUP),
                    "{keys} keys from {first}"
                );
            }
        }
    }
    // The longest window that lies in no more units wherever it begins.
    let begun_anywhere = |keys| (0..ATTENTION_UNIT).all(|first| is_one_job_a_block(first, keys, KV_HEADS, 132));
    assert!(begun_anywhere(385) && !begun_anywhere(386) && !begun_anywhere(512) && begun_anywhere(513));
}

fn check_runs(contexts: &[(usize, usize, usize)], least_run: usize) -> Vec<AttentionItem> {
    let mut items = Vec::new();
    let load = load(least_run, usize::MAX);
    let planned = plan_decode(contexts.iter().copied(), ALONE, &load, &mut Cuts::default(), &mut items).unwrap();
    let partials = planned.partials;
    let keys = contexts.iter().map(|&(.., keys)| keys).sum();
    assert!(
        partials <= max_partials(keys, KV_HEADS, MULTIPROCESSORS),
        "{partials} partial sums for {keys} keys"
    );
    assert!(
        items.windows(2).all(|pair| pair[0].tokens >= pair[1].tokens),
        "longest first"
    );
    let longest = contexts.iter().map(|&(.., keys)| keys).max().unwrap_or(1);
    let from_start = contexts.iter().all(|&(_, first, _)| first == 0);
    let most = most_items(contexts.len(), longest, from_start, KV_HEADS, MULTIPROCESSORS);
    assert!(items.len() <= most, "{} items, at most {most} foreseen", items.len());
    let mut used = vec![false; partials];
    let mut by_row = items.clone();
    by_row.sort_by_key(|item| (item.row, item.first_unit));
    let mut rest = &by_row[..];
    for &(row, first, keys) in contexts {
        let (own, others) = rest.split_at(rest.iter().take_while(|item| item.row as usize == row).count());
        check_row(own, first, keys, &mut used);
        rest = others;
    }
    assert!(rest.is_empty());
    assert!(used.iter().all(|&is_used| is_used), "a partial sum that no item has");
    items
}

#[test]
fn items_cover_every_key_once() {
    for rows in [0, 1, 2, 7, 32, 128, 890] {
        for longest in [1, 64, 129, 1000, 5000, 40_000] {
            for window in [None, Some(1), Some(128), Some(129), Some(1000), Some(4096)] {
                let contexts = contexts(rows, longest, window, (rows * longest) as u32);
                check(&contexts);
                let items = check_runs(&contexts, ATTENTION_GROUP);
                assert!(items.iter().all(|item| item.run as usize >= ATTENTION_GROUP));
            }
        }
    }
}

/// Where rows may stay whole, those that do come first, and have one item and no partial sum.
#[test]
fn whole_rows_come_first() {
    let (mut all, mut some, mut none) = (0, 0, 0);
    for seed in 0..300 {
        let rng = &mut ChaCha8Rng::seed_from_u64(seed);
        let rows = rng.random_range(9..400);
        let (least, longest) = [(1, 2500), (1, 9000), (8000, 9000), (30_000, 33_000)][rng.random_range(0..4)];
        let contexts: Vec<_> = (0..rows)
            .map(|row| (3 * row, 0, rng.random_range(least..=longest)))
            .collect();
        let load = Load {
            whole_rows: true,
            ..load(1, usize::MAX)
        };
        let mut items = Vec::new();
        let contexts_of = contexts.iter().copied();
        let planned = plan_decode(contexts_of, ALONE, &load, &mut Cuts::default(), &mut items).unwrap();
        let teams = Load {
            least_run: ATTENTION_GROUP,
            ..load
        };
        let contexts_of = contexts.iter().copied();
        let of_teams = plan_decode(contexts_of, ALONE, &teams, &mut Cuts::default(), &mut Vec::new()).unwrap();
        assert_eq!(of_teams.whole, 0, "teams take none");
        let (whole, others) = items.split_at(planned.whole);
        for items in [whole, others] {
            let is_longest_first = items.windows(2).all(|pair| pair[0].tokens >= pair[1].tokens);
            assert!(is_longest_first, "seed {seed}");
        }
        let shortest = whole.last().map_or(usize::MAX, |item| item.tokens as usize);
        let mut used = vec![false; planned.partials];
        for &(row, first, keys) in &contexts {
            let of_row = |item: &&AttentionItem| item.row as usize == row;
            let mut own: Vec<_> = others.iter().filter(of_row).copied().collect();
            if let Some(item) = whole.iter().find(of_row) {
                assert_eq!((item.first_unit, item.tokens as usize, item.row_items), (0, keys, 1));
                assert!(own.is_empty(), "seed {seed}: row {row} twice");
            } else {
                assert!(keys <= shortest, "seed {seed}: a longer row is cut");
                own.sort_by_key(|item| item.first_unit);
                check_row(&own, first, keys, &mut used);
            }
        }
        assert!(
            used.iter().all(|&is_used| is_used),
            "seed {seed}: a partial sum that no item has"
        );
        let kind = match planned.whole {
            0 => &mut none,
            count if count == rows => &mut all,
            _ => &mut some,
        };
        *kind += 1;
    }
    assert!(all > 20 && some > 20 && none > 20, "{all}, {some}, {none}");
}

/// Few rows are cut into units; of many rows there are not many more items than rows.
#[test]
fn the_most_items_are_no_more_than_there_can_be() {
    for rows in [1, 4] {
        let items = check(&(0..rows).map(|row| (row, 0, 1024)).collect::<Vec<_>>());
        assert_eq!(items.len(), most_items(rows, 1024, true, KV_HEADS, MULTIPROCESSORS));
    }
    assert_eq!(most_items(1, 1024, true, KV_HEADS, MULTIPROCESSORS), 8);
    assert_eq!(most_items(32, 128, true, KV_HEADS, MULTIPROCESSORS), 32);
    assert!(most_items(890, 1024, true, KV_HEADS, MULTIPROCESSORS) < 1100);
}

#[test]
fn long_rows_are_cut_only_where_rows_are_few() {
    let runs = |rows, keys| check(&(0..rows).map(|row| (row, 0, keys)).collect::<Vec<_>>())[0].run;
    let of_teams = |rows, keys| {
        let rows: Vec<_> = (0..rows).map(|row| (row, 0, keys)).collect();
        check_runs(&rows, ATTENTION_GROUP)[0].run
    };
    assert_eq!(runs(1, 1024), 1);
    assert_eq!(runs(16, 1024), 4);
    assert_eq!(runs(890, 1024), 16);
    // Of 132 multiprocessors 128 have a span each; but three rows of 11,000 keys have 18 spans, for 144.
    let spans = [(1, 32_768), (2, 16_400), (4, 8193)].map(|(rows, keys)| of_teams(rows, keys));
    assert_eq!((spans, of_teams(4, 7000), of_teams(3, 11_000)), ([16; 3], 4, 4));
    assert_eq!(runs(1, 32_768), 4, "warps alone want more than one a block");
}

/// Every row has all its keys once, by items of its own or of the row that it shares them with, and each has a
/// partial sum of its own for each of them, of which there are no more than have room.
#[test]
fn pairs_share_items_and_no_partial_sums() {
    for seed in 0..200 {
        let rng = &mut ChaCha8Rng::seed_from_u64(seed);
        let rows = rng.random_range(2..60);
        let longest = [700, 3000, 20_000][rng.random_range(0..3)];
        let contexts: Vec<_> = (0..rows)
            .map(|row| (3 * row, 0, rng.random_range(1..=longest)))
            .collect();
        let mut places: Vec<usize> = (0..rows).collect();
        places.shuffle(rng);
        let mut pairs = Vec::new();
        for two in places.chunks_exact(2) {
            let most = two
                .iter()
                .map(|&place| (contexts[place].2 - 1) / GROUP_KEYS)
                .min()
                .unwrap();
            if most > 0 && rng.random_bool(0.7) {
                let rows = [two[0].min(two[1]), two[0].max(two[1])];
                let groups = rng.random_range(1..=most);
                pairs.push(Pair { rows, groups });
            }
        }
        let plan = |pairs: &[Pair], most_partials| {
            let (load, mut items) = (load(1, most_partials), Vec::new());
            let contexts = contexts.iter().copied();
            let pairs = Sharing::Pairs(pairs);
            let planned = plan_decode(contexts, pairs, &load, &mut Cuts::default(), &mut items).unwrap();
            (planned.partials, items)
        };
        let (least, _) = plan(&[], usize::MAX);
        let (most, all) = plan(&pairs, usize::MAX);
        let mut two_rows = 0;
        let shared: usize = pairs.iter().map(|pair| pair.groups).sum();
        assert_eq!(all.iter().filter(|item| item.second >= 0).count(), shared);
        for room in [least.max(most), least.max(most).midpoint(least), least] {
            let (partials, mut items) = plan(&pairs, room);
            assert!(partials <= room, "seed {seed}");
            two_rows += items.iter().filter(|item| item.second >= 0).count();
            let seconds = items.clone().into_iter().filter(|item| item.second >= 0);
            let seconds: Vec<_> = seconds
                .map(|item| AttentionItem {
                    row: item.second,
                    partial: item.second_partial,
                    row_items: contexts[item.second as usize / 3].2.div_ceil(GROUP_KEYS) as i32,
                    ..item
                })
                .collect();
            assert!(
                seconds
                    .iter()
                    .all(|item| item.tokens == GROUP_KEYS as i32 && item.run == 4)
            );
            items.extend(seconds);
            items.sort_by_key(|item| (item.row, item.first_unit));
            let mut used = vec![false; partials];
            let mut rest = &items[..];
            for &(row, first, keys) in &contexts {
                let (own, others) = rest.split_at(rest.iter().take_while(|item| item.row as usize == row).count());
                check_row(own, first, keys, &mut used);
                rest = others;
            }
            assert!(rest.is_empty() && used.iter().all(|&is_used| is_used), "seed {seed}");
        }
        assert!(two_rows >= shared);
    }
}

/// Every row has all its keys once, by items of its own or of shared prefixes, whose rows see the same pages, and a
/// partial sum of its own for each. Where these have no room nobody shares.
#[test]
fn shared_prefixes_and_rows_have_every_key_once() {
    let (mut in_all, mut fewer) = (0, 0);
    for seed in 0..300 {
        let rng = &mut ChaCha8Rng::seed_from_u64(seed);
        let rows = RandomRows::new(rng);
        let keys = || rows.positions.iter().map(|position| position + 1);
        let load = load([1, ATTENTION_GROUP][rng.random_range(0..2)], usize::MAX);
        let pages = [ATTENTION_GROUP, ATTENTION_SPAN][rng.random_range(0..2)] * ATTENTION_UNIT / KV_PAGE;
        let mut prefixes = SharedPrefixes::default();
        prefixes.find(&rows.paged(), pages, usize::MAX).unwrap();
        let (mut cuts, mut items) = (Cuts::default(), Vec::new());
        let (mut shared, mut sharers) = (Vec::new(), Vec::new());
        let contexts = || keys().enumerate().map(|(row, keys)| (3 * row, 0, keys));
        let alone = plan_decode(contexts(), ALONE, &load, &mut cuts, &mut items)
            .unwrap()
            .partials;
        let mut plan = |most_partials| {
            let load = Load { most_partials, ..load };
            let sharing = Sharing::Prefixes(&prefixes);
            let planned = plan_decode(contexts(), sharing, &load, &mut cuts, &mut items).unwrap();
            let partials = planned.partials;
            let table = |place| 1000 * place;
            shared.clear();
            sharers.clear();
            plan_shared(&cuts, &prefixes, 16, table, &mut shared, &mut sharers).unwrap();
            let mut all = items.clone();
            for item in &shared {
                assert!((2..=16).contains(&item.sharers) && item.pages as usize == pages);
                let from = item.table as usize;
                let seen = |row: usize, at: usize| &rows.tables[row][at..at + pages];
                let same = seen(from / 1000, from % 1000);
                for sharer in &sharers[item.first_sharer as usize..][..item.sharers as usize] {
                    let row = sharer.row as usize / 3;
                    assert_eq!(seen(row, item.part as usize * pages), same, "seed {seed}");
                    all.push(AttentionItem {
                        row: sharer.row,
                        first_unit: item.part * (pages * KV_PAGE / ATTENTION_UNIT) as i32,
                        tokens: (pages * KV_PAGE) as i32,
                        row_items: all.iter().find(|item| item.row == sharer.row).unwrap().row_items,
                        partial: sharer.partial,
                        run: (pages * KV_PAGE / ATTENTION_UNIT) as i32,
                        ..AttentionItem::default()
                    });
                }
            }
            all.sort_by_key(|item| (item.row, item.first_unit));
            let mut used = vec![false; partials];
            let mut rest = &all[..];
            for (row, keys) in keys().enumerate() {
                let mine = |item: &&AttentionItem| item.row as usize == 3 * row;
                let (own, others) = rest.split_at(rest.iter().take_while(mine).count());
                check_row(own, 0, keys, &mut used);
                rest = others;
            }
            assert!(rest.is_empty() && used.iter().all(|&is_used| is_used), "seed {seed}");
            (partials, shared.len())
        };
        let (partials, count) = plan(usize::MAX);
        assert_eq!(count > 0, !prefixes.all.is_empty());
        assert_eq!(plan(partials.max(alone)).1, count);
        let room = rng.random_range(alone..=alone.max(partials));
        let (some_partials, some) = plan(room);
        assert!(some_partials <= room && some <= count, "seed {seed}");
        fewer += usize::from(some < count);
        in_all += count;
    }
    assert!(in_all > 1000 && fewer > 10, "{in_all}, {fewer}");
}

/// What was fastest on an H200, of nothing, groups and spans, where rows share so many keys of 208 more.
#[test]
fn rows_share_what_is_faster() {
    let chosen = |rows: usize, shared: usize| {
        let load = load(least_run(rows, 8), usize::MAX);
        let tables: Vec<Vec<u32>> = (1..=rows as u32)
            .map(|row| {
                (0..(shared / KV_PAGE) as u32)
                    .chain(10_000 * row..10_000 * row + 4)
                    .collect()
            })
            .collect();
        let position = shared + 207;
        let paged: Vec<_> = tables.iter().map(|pages| PagedRow { position, pages }).collect();
        let won = [ATTENTION_GROUP, ATTENTION_SPAN].map(|run| {
            let mut prefixes = SharedPrefixes::default();
            prefixes
                .find(&paged, run * ATTENTION_UNIT / KV_PAGE, usize::MAX)
                .unwrap();
            (won_by_sharing(&load, &prefixes, 16, rows), run)
        });
        won.into_iter()
            .max()
            .filter(|(won, _)| *won > 0)
            .map_or(0, |(_, run)| run)
    };
    let of = |shared, rows: [usize; 5]| rows.map(|rows| chosen(rows, shared));
    assert_eq!(of(512, [2, 8, 64, 128, 256]), [0; 5]);
    assert_eq!(of(1024, [2, 8, 16, 64, 256]), [0, 0, 0, 4, 4]);
    assert_eq!(of(2048, [4, 16, 32, 64, 256]), [0, 0, 4, 4, 16]);
    assert_eq!(of(8192, [4, 8, 16, 64, 256]), [4, 4, 4, 16, 16]);
    assert_eq!(of(32_768, [2, 4, 8, 16, 64]), [16; 5]);
}

#[test]
fn items_alike_are_neighbours_by_row_or_by_position() {
    let first = |by_position| {
        let load = Load {
            by_position,
            ..load(1, usize::MAX)
        };
        let (contexts, mut items) = ((0..200).map(|row| (row, 0, 4096)), Vec::new());
        plan_decode(contexts, ALONE, &load, &mut Cuts::default(), &mut items).unwrap();
        [0, 1].map(|place: usize| (items[place].row, items[place].first_unit))
    };
    assert_eq!(first(false), [(0, 0), (0, 16)]);
    assert_eq!(first(true), [(0, 0), (1, 0)]);
}

#[test]
fn a_window_is_one_item() {
    let items = check(&[(0, 300 - 127, 128)]);
    assert_eq!(
        items,
        [AttentionItem {
            first_unit: 1,
            tokens: 128,
            row_items: 1,
            run: 1,
            second: -1,
            ..Default::default()
        }]
    );
}

#[test]
fn tiles_cover_every_row_once_longest_chunks_first() {
    let chunks = [(3, 100, 33), (5, 0, 16), (6, 999, 1), (9, 0, 100)];
    let mut tiles = vec![PrefillTile::default()];
    plan_prefill(chunks.into_iter(), 16, &mut tiles).unwrap();
    let mut order: Vec<_> = tiles.iter().map(|tile| tile.chunk).collect();
    order.dedup();
    assert_eq!(order, [6, 3, 9, 5], "1000, 133, 100 and 16 keys");
    let together = |pair: &&[PrefillTile]| pair[0].chunk == pair[1].chunk;
    assert!(
        tiles
            .windows(2)
            .filter(together)
            .all(|pair| pair[0].first > pair[1].first)
    );
    for (chunk, _, rows) in chunks {
        let mut own: Vec<_> = tiles.iter().filter(|tile| tile.chunk as usize == chunk).collect();
        own.sort_by_key(|tile| tile.first);
        assert!(
            own.iter()
                .enumerate()
                .all(|(i, tile)| tile.first as usize == i * 16 && tile.reserved == 0)
        );
        assert_eq!(own.iter().map(|tile| tile.rows as usize).sum::<usize>(), rows);
    }
}
