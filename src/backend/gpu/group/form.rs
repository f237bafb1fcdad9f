//! Which devices make a replica together: a pure function of what each has room for and how they are linked.

use crate::error::{Error, Result};
use std::ops::Range;

/// The devices there are, by number in their order.
pub struct Devices<'a> {
    /// Their names, for lines.
    pub names: &'a [String],
    /// What makes devices alike: only those go together.
    pub kinds: &'a [String],
    /// The name of the option by which the user asks for groups of a size.
    pub asked_by: &'a str,
    /// How far apart two are, compared with others.
    pub distance: &'a dyn Fn(usize, usize) -> u32,
}

/// Devices that make a replica, in the order of its stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// By number.
    pub devices: Vec<usize>,
    /// The layers of each.
    pub layers: Vec<Range<usize>>,
}

/// All replicas, and what the user should know.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Grouping {
    /// At least one.
    pub groups: Vec<Group>,
    /// A line for each device that is left over.
    pub lines: Vec<String>,
}

/// The layers of each of these devices if the model, beside a KV cache for so many sequences of its `seq_len`, fits
/// them.
pub type Fit<'a> = &'a dyn Fn(&[usize], usize) -> Option<Vec<Range<usize>>>;

/// Forms groups of `size` devices, or of as few as have room for the KV cache of `sequences` sequences.
pub fn form(devices: &Devices<'_>, size: Option<usize>, sequences: usize, fit: Fit<'_>) -> Result<Grouping> {
    let mut forming = Forming {
        devices,
        fit,
        left: (0..devices.names.len()).collect(),
        grouping: Grouping::default(),
    };
    let sizes = match size {
        Some(size) => size..=size,
        None => 1..=devices.names.len(),
    };
    // Where no group has room for as many sequences, fewer will do.
    let mut wanted = sequences;
    loop {
        sizes.clone().for_each(|size| forming.groups_of(size, wanted));
        if !forming.grouping.groups.is_empty() || wanted <= 1 {
            break;
        }
        wanted /= 2;
    }
    if size.is_none() {
        forming.join_left(wanted);
    }
    forming.finish(size)
}

struct Forming<'a> {
    devices: &'a Devices<'a>,
    fit: Fit<'a>,
    left: Vec<usize>,
    grouping: Grouping,
}

impl Forming<'_> {
    /// As many groups of this size as can be.
    fn groups_of(&mut self, size: usize, sequences: usize) {
        let mut start = 0;
        while start < self.left.len() {
            match self
                .neighbours(start, size)
                .and_then(|devices| self.fitting(devices, sequences))
            {
                Some(group) => {
                    self.left.retain(|device| !group.devices.contains(device));
                    self.grouping.groups.push(group);
                }
                None => start += 1,
            }
        }
    }

    fn fitting(&self, devices: Vec<usize>, sequences: usize) -> Option<Group> {
        let layers = (self.fit)(&devices, sequences)?;
        Some(Group { devices, layers })
    }

    /// A chain of devices alike, each the nearest to the one before that is left; of those alike the one that comes
    /// first.
    fn neighbours(&self, start: usize, size: usize) -> Option<Vec<usize>> {
        let mut last = self.left[start];
        let mut chain = vec![last];
        while chain.len() < size {
            let alike = |&&device: &&usize| self.devices.kinds[device] == self.devices.kinds[last];
            let free = self.left.iter().filter(alike).filter(|device| !chain.contains(device));
            last = *free.min_by_key(|&&device| ((self.devices.distance)(last, device), device))?;
            chain.push(last);
        }
        Some(chain)
    }

    /// Devices too few for a group of their own join those that are pipelines anyway, the shortest first.
    fn join_left(&mut self, sequences: usize) {
        for device in std::mem::take(&mut self.left) {
            let kinds = &self.devices.kinds;
            let groups = self.grouping.groups.iter().enumerate();
            let pipelines = groups.filter(|(_, g)| g.devices.len() > 1 && kinds[g.devices[0]] == kinds[device]);
            let shortest = pipelines
                .min_by_key(|(_, group)| group.devices.len())
                .map(|(place, _)| place);
            let longer = shortest.and_then(|place| {
                let devices = [&self.grouping.groups[place].devices[..], &[device]].concat();
                Some((place, self.fitting(devices, sequences)?))
            });
            match longer {
                Some((place, group)) => self.grouping.groups[place] = group,
                None => self.left.push(device),
            }
        }
    }

    fn finish(mut self, size: Option<usize>) -> Result<Grouping> {
        let names = &self.devices.names;
        if self.grouping.groups.is_empty() {
            let all = names.join(", ");
            return Err(Error::State(match size {
                Some(1) | None => format!("the weights and a step do not fit the free memory of {all}"),
                Some(size) if size > names.len() => format!(
                    "{} asks for groups of {size} devices, and there are {}: {all}; choose fewer, or auto",
                    self.devices.asked_by,
                    names.len()
                ),
                Some(size) => format!(
                    "{} asks for groups of {size} devices, but no {size} alike of {all} have room for the model, or \
                     it has fewer layers than that; choose more or fewer, or auto",
                    self.devices.asked_by
                ),
            }));
        }
        let taken: Vec<usize> = self.grouping.groups.iter().map(|group| group.devices.len()).collect();
        let sizes = taken.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        for &device in &self.left {
            self.grouping.lines.push(format!(
                "{} is not used: it fits in no group; devices in each group: {sizes}",
                names[device]
            ));
        }
        Ok(self.grouping)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Forms groups of devices with room for so many layers of a model of ten, a fourth less with a full KV cache.
    fn formed(
        room: &[usize],
        size: Option<usize>,
        kinds: &[&str],
        distance: &dyn Fn(usize, usize) -> u32,
    ) -> Result<Grouping> {
        let names: Vec<_> = (0..room.len()).map(|i| format!("gpu:{i}")).collect();
        let kinds: Vec<_> = kinds.iter().map(|&kind| kind.to_owned()).collect();
        let devices = Devices {
            names: &names,
            kinds: &kinds,
            asked_by: "GETP_GROUP",
            distance,
        };
        let fit = |devices: &[usize], sequences: usize| {
            let room = devices
                .iter()
                .map(|&device| room[device] - room[device] * sequences / 1024);
            (room.sum::<usize>() >= 10).then(|| vec![0..1; devices.len()])
        };
        form(&devices, size, 256, &fit)
    }

    fn groups(room: &[usize], size: Option<usize>) -> Vec<Vec<usize>> {
        let grouping = formed(room, size, &vec!["X"; room.len()], &|a, b| a.abs_diff(b) as u32).unwrap();
        grouping.groups.into_iter().map(|group| group.devices).collect()
    }

    #[test]
    fn auto_takes_the_smallest_groups_with_room_for_the_cache() {
        assert_eq!(groups(&[16, 16, 16], None), [[0], [1], [2]]);
        // The weights alone would fit one of these.
        assert_eq!(groups(&[12, 12, 12, 12], None), [[0, 1], [2, 3]]);
        assert_eq!(groups(&[5; 8], None), [[0, 1, 2, 6], [3, 4, 5, 7]]);
        // Alone there is no choice.
        assert_eq!(groups(&[12], None), [[0]]);
        assert_eq!(groups(&[10], None), [[0]]);
    }

    #[test]
    fn devices_of_different_memory_do_what_they_can() {
        assert_eq!(groups(&[16, 8, 8], None), [vec![0], vec![1, 2]]);
        assert_eq!(groups(&[8, 16, 8], None), [vec![1], vec![0, 2]]);
        let grouping = formed(&[16, 4], None, &["X"; 2], &|_, _| 0).unwrap();
        assert_eq!(grouping.groups.len(), 1);
        assert_eq!(
            grouping.lines,
            ["gpu:1 is not used: it fits in no group; devices in each group: 1"]
        );
    }

    #[test]
    fn those_left_over_join_a_pipeline() {
        assert_eq!(groups(&[8; 3], None), [[0, 1, 2]]);
        assert_eq!(groups(&[8; 5], None), [vec![0, 1, 4], vec![2, 3]]);
        assert_eq!(groups(&[8; 7], None), [vec![0, 1, 6], vec![2, 3], vec![4, 5]]);
    }

    #[test]
    fn neighbours_go_together() {
        let packages = |a: usize, b: usize| u32::from(a % 2 != b % 2);
        let grouping = formed(&[8; 4], None, &["X"; 4], &packages).unwrap();
        let devices: Vec<_> = grouping.groups.iter().map(|group| group.devices.clone()).collect();
        assert_eq!(devices, [[0, 2], [1, 3]]);
    }

    #[test]
    fn only_devices_alike_go_together() {
        let grouping = formed(&[8; 4], None, &["X", "Y", "X", "Z"], &|_, _| 0).unwrap();
        assert_eq!(grouping.groups[0].devices, [0, 2]);
        assert_eq!((grouping.groups.len(), grouping.lines.len()), (1, 2));
    }

    #[test]
    fn a_size_asked_for_is_what_there_is() {
        assert_eq!(groups(&[16; 4], Some(2)), [[0, 1], [2, 3]]);
        assert_eq!(groups(&[16; 5], Some(5)), [[0, 1, 2, 3, 4]]);
        assert_eq!(groups(&[16; 5], Some(3)), [[0, 1, 2]]);
        assert_eq!(groups(&[12; 2], Some(1)), [[0], [1]]);
        let error = |room: &[usize], size| {
            let error = formed(room, Some(size), &vec!["X"; room.len()], &|_, _| 0).unwrap_err();
            error.to_string()
        };
        assert!(error(&[16; 2], 4).contains("GETP_GROUP asks for groups of 4 devices, and there are 2: gpu:0, gpu:1"));
        assert!(error(&[3; 3], 2).contains("no 2 alike of gpu:0, gpu:1, gpu:2 have room"));
        assert!(error(&[3], 1).contains("the weights and a step do not fit the free memory of gpu:0"));
    }
}
