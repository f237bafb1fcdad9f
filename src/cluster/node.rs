//! What the ranks of one machine share: its devices and cores.

use std::collections::BTreeMap;

/// The part of a rank in what it sees. `seen` has what each rank of the machine sees; what several of them see is
/// divided among these, in the order of ranks, and what one alone sees is its own.
pub fn share_out<T: Ord + Clone>(seen: &[Vec<T>], rank: usize) -> Vec<T> {
    let mut shared: BTreeMap<Vec<usize>, Vec<&T>> = BTreeMap::new();
    for thing in &seen[rank] {
        let who = (0..seen.len()).filter(|&other| seen[other].contains(thing));
        shared.entry(who.collect()).or_default().push(thing);
    }
    let mut mine = Vec::new();
    for (who, mut things) in shared {
        // Others may see them in another order.
        things.sort_unstable();
        let place = who.iter().position(|&other| other == rank).unwrap_or(0);
        let bound = |place: usize| place * things.len() / who.len();
        mine.extend(things[bound(place)..bound(place + 1)].iter().copied());
    }
    let mine = seen[rank].iter().filter(|thing| mine.contains(thing));
    mine.cloned().collect()
}

/// The name of this machine, as long as it runs. Not the host's name, which containers have of their own.
pub fn name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    name.trim().to_owned()
}

/// The numbers of the cores that this process may use.
pub fn cores() -> Vec<u32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.map(listed).unwrap_or_default()
}

/// The numbers in a list as the kernel writes it: `0-3,8`.
fn listed(list: &str) -> Vec<u32> {
    let ranges = list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    ranges.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(seen: &[&[u32]]) -> Vec<Vec<u32>> {
        let seen: Vec<_> = seen.iter().map(|seen| seen.to_vec()).collect();
        (0..seen.len()).map(|rank| share_out(&seen, rank)).collect()
    }

    #[test]
    fn what_all_see_is_divided_and_what_one_sees_is_its_own() {
        let all: &[u32] = &[0, 1, 2, 3, 4, 5, 6, 7];
        assert_eq!(parts(&[all, all]), [[0, 1, 2, 3], [4, 5, 6, 7]]);
        assert_eq!(parts(&[all]), [all]);
        assert_eq!(parts(&[&[0, 1], &[2, 3], &[]]), [vec![0, 1], vec![2, 3], vec![]]);
        assert_eq!(parts(&[&[0, 1, 2], &[2, 1, 0]]), [vec![0], vec![2, 1]]);
        assert_eq!(
            parts(&[&[0, 1, 2, 3], &[2, 3], &[2, 3]]),
            [vec![0, 1], vec![2], vec![3]]
        );
        assert_eq!(parts(&[&[0], &[0], &[0]]), [vec![], vec![], vec![0]]);
    }

    #[test]
    fn no_device_is_used_twice_or_by_nobody() {
        for ranks in 1..10 {
            for devices in 0..20 {
                let seen = vec![(0..devices).collect::<Vec<_>>(); ranks];
                let mut used: Vec<_> = (0..ranks).flat_map(|rank| share_out(&seen, rank)).collect();
                used.sort_unstable();
                assert_eq!(used, seen[0]);
            }
        }
    }

    #[test]
    fn cores_are_those_of_the_kernels_list() {
        assert_eq!(listed("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert!(listed("").is_empty());
        assert_eq!(cores().len(), std::thread::available_parallelism().unwrap().get());
    }
}
