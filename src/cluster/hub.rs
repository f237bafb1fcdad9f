//! Rank 0's side of a run: who has which request, and who gets the next ones.

use super::message::{Reply, Report, broken};
use crate::error::Result;
use crate::memory::{self, Purpose};
use std::collections::{BTreeSet, VecDeque};

/// The most requests in a reply.
const MOST_GRANTED: usize = 4096;

/// Nobody has the request: it waits.
const WAITS: u32 = u32::MAX;
/// The request has its answer, or never was to get one.
const DONE: u32 = u32::MAX - 1;

/// The queue of all ranks.
///
/// A rank gets what it asks for, but never more than its devices' share of the unfinished requests: the rule by which
/// the replicas of one process take requests from their queue. So all devices finish at about the same time, and how
/// fast each one is shows in how often its rank asks.
#[derive(Debug)]
pub struct Hub {
    /// Requests that nobody has, the next one first.
    waiting: VecDeque<u32>,
    /// By request: the rank that has it, [`WAITS`] or [`DONE`].
    holder: Vec<u32>,
    unfinished: usize,
    ranks: Vec<Rank>,
    /// The devices that work, of all ranks.
    devices: usize,
    /// Requests that a rank cannot run, and that rank.
    unfit: BTreeSet<[u32; 2]>,
}

/// What rank 0 knows of a rank.
#[derive(Clone, Debug, Default)]
struct Rank {
    devices: usize,
    /// Requests it has.
    holds: usize,
    /// Whether it waits for the reply to a report.
    waits: bool,
    /// What it asked for in its last report.
    asks: usize,
    /// Whether it has nothing, and can run nothing of what waits: others share what is left.
    rests: bool,
    /// Whether it knows that the run has ended.
    ended: bool,
}

impl Hub {
    /// A queue of these requests, out of `requests` requests, for ranks with these numbers of devices.
    pub fn new(requests: usize, waiting: impl IntoIterator<Item = u32>, devices: &[usize]) -> Result<Self> {
        let waiting = memory::collect(waiting, Purpose::Requests)?;
        let mut holder = memory::filled(DONE, requests, Purpose::Requests)?;
        waiting.iter().for_each(|&request| holder[request as usize] = WAITS);
        let rank = |&devices: &usize| Rank {
            devices,
            ..Rank::default()
        };
        Ok(Self {
            unfinished: waiting.len(),
            waiting: waiting.into(),
            holder,
            ranks: memory::collect(devices.iter().map(rank), Purpose::Requests)?,
            devices: devices.iter().sum(),
            unfit: BTreeSet::new(),
        })
    }

    /// Begins a run with the requests that have no answer, for ranks with these numbers of devices.
    pub fn begin(&mut self, devices: &[usize]) {
        for (rank, &devices) in self.ranks.iter_mut().zip(devices) {
            rank.devices = devices;
            (rank.rests, rank.ended) = (false, false);
        }
        self.devices = devices.iter().sum();
        self.unfit.clear();
    }

    /// Notes that a rank cannot run a request.
    pub fn exclude(&mut self, rank: usize, request: u32) {
        self.unfit.insert([request, rank as u32]);
    }

    /// Notes that a report of a rank has arrived. It gets a reply from [`Self::report`] or [`Self::dismiss`].
    pub fn hear(&mut self, from: usize) -> Result<()> {
        if std::mem::replace(&mut self.ranks[from].waits, true) {
            return Err(broken(format_args!("rank {from} reports before it has a reply")));
        }
        Ok(())
    }

    /// Takes the report that was heard of a rank, whose answers the caller stores, and calls `reply` with each rank
    /// that gets a reply now. Gives the requests that no rank can run whose devices work: they get no answer. Fails,
    /// and changes nothing of what is reported, if the rank reports requests that it does not have.
    pub fn report(
        &mut self,
        from: usize,
        report: &Report,
        mut reply: impl FnMut(usize, Reply) -> Result<()>,
    ) -> Result<Vec<u32>> {
        for &(request, _) in &report.answers {
            self.take_from(from, request, DONE)?;
            self.unfinished -= 1;
        }
        for &(request, _) in report.refused.iter().rev() {
            self.take_from(from, request, WAITS)?;
            self.waiting.push_front(request);
            self.unfit.insert([request, from as u32]);
        }
        for &request in report.back.iter().rev() {
            self.take_from(from, request, WAITS)?;
            self.waiting.push_front(request);
        }
        if !(report.back.is_empty() && report.refused.is_empty()) {
            self.ranks.iter_mut().for_each(|rank| rank.rests = false);
        }
        let rank = &mut self.ranks[from];
        let lost = rank.devices.saturating_sub(report.devices);
        rank.devices -= lost;
        self.devices -= lost;
        rank.asks = report.ask;
        let stranded = self.take_stranded()?;
        if report.back.is_empty() && report.refused.is_empty() && lost == 0 {
            self.answer(from, &mut reply)?;
        } else {
            // There is more for those that have nothing to do.
            (0..self.ranks.len()).try_for_each(|rank| self.answer(rank, &mut reply))?;
        }
        self.end(&mut reply)?;
        Ok(stranded)
    }

    /// Ends the run before all is done: calls `reply` with each other rank that waits for a reply. Whether all other
    /// ranks know by now; if not, they do after another report of theirs.
    pub fn dismiss(&mut self, mut reply: impl FnMut(usize) -> Result<()>) -> Result<bool> {
        for (rank, known) in self.ranks.iter_mut().enumerate().skip(1) {
            if known.waits && !known.ended {
                reply(rank)?;
                known.ended = true;
            }
        }
        Ok(self.ranks.iter().skip(1).all(|rank| rank.ended))
    }

    /// The requests without an answer, if another rank knows that the run has ended with these; else 0.
    pub fn left(&self) -> usize {
        let is_known = self.ranks.iter().skip(1).any(|rank| rank.ended);
        if is_known { self.unfinished } else { 0 }
    }

    fn take_from(&mut self, rank: usize, request: u32, to: u32) -> Result<()> {
        match self.holder.get_mut(request as usize) {
            Some(holder) if *holder == rank as u32 => {
                *holder = to;
                self.ranks[rank].holds -= 1;
                Ok(())
            }
            _ => Err(broken(format_args!("rank {rank} does not have request {request}"))),
        }
    }

    /// Takes the requests out of the queue that no rank can run whose devices work, if there is such a rank.
    fn take_stranded(&mut self) -> Result<Vec<u32>> {
        if self.unfit.is_empty() {
            return Ok(Vec::new());
        }
        let works = |(rank, known): (usize, &Rank)| (known.devices > 0).then_some(rank as u32);
        let working = memory::collect(self.ranks.iter().enumerate().filter_map(works), Purpose::Requests)?;
        let (unfit, holder) = (&self.unfit, &self.holder);
        let nobody = |request: u32| working.iter().all(|&rank| unfit.contains(&[request, rank]));
        let is_stranded = |&[request, _]: &[u32; 2]| holder[request as usize] == WAITS && nobody(request);
        let mut stranded = Vec::new();
        if working.is_empty() {
            return Ok(stranded);
        }
        for [request, _] in self.unfit.iter().copied().filter(|pair| is_stranded(pair)) {
            if stranded.last() != Some(&request) {
                memory::push(&mut stranded, request, Purpose::Requests)?;
            }
        }
        stranded
            .iter()
            .for_each(|&request| self.holder[request as usize] = DONE);
        self.unfinished -= stranded.len();
        self.waiting.retain(|&request| self.holder[request as usize] == WAITS);
        Ok(stranded)
    }

    /// Takes up to `most` requests out of the queue that a rank can run, the first ones.
    fn take_for(&mut self, rank: usize, most: usize) -> Result<Vec<u32>> {
        if self.unfit.is_empty() {
            let most = most.min(self.waiting.len());
            return memory::collect(self.waiting.drain(..most), Purpose::Requests);
        }
        let fits = |&request: &u32| !self.unfit.contains(&[request, rank as u32]);
        let taken = memory::collect(self.waiting.iter().copied().filter(fits).take(most), Purpose::Requests)?;
        let mut next = taken.iter().peekable();
        self.waiting
            .retain(|request| next.next_if(|&taken| taken == request).is_none());
        Ok(taken)
    }

    /// Replies to a rank that waits for it, unless it has nothing to do and there is nothing for it.
    fn answer(&mut self, to: usize, reply: &mut impl FnMut(usize, Reply) -> Result<()>) -> Result<()> {
        let Rank {
            devices,
            holds,
            waits,
            asks,
            ..
        } = self.ranks[to];
        if !waits {
            return Ok(());
        }
        let resting = self.ranks.iter().filter(|rank| rank.rests && rank.holds == 0);
        let sharing = self.devices.saturating_sub(resting.map(|rank| rank.devices).sum());
        let share = self.unfinished.div_ceil(sharing.max(1)) * devices;
        // Whoever has nothing can do with one for each device: what it asked for may be long ago.
        let asks = if holds == 0 { asks.max(devices) } else { asks };
        let most = share.saturating_sub(holds).min(asks).min(MOST_GRANTED);
        let granted = self.take_for(to, most)?;
        self.ranks[to].rests = most > 0 && granted.is_empty() && !self.waiting.is_empty();
        if holds + granted.len() == 0 {
            return Ok(());
        }
        for &request in &granted {
            self.holder[request as usize] = to as u32;
        }
        self.ranks[to].holds += granted.len();
        reply(to, self.state(false, granted))?;
        self.ranks[to].waits = false;
        Ok(())
    }

    /// Ends the run when all ranks have nothing to do.
    fn end(&mut self, reply: &mut impl FnMut(usize, Reply) -> Result<()>) -> Result<()> {
        let idle = |rank: &Rank| rank.waits && rank.holds == 0;
        if (self.unfinished > 0 && self.devices > 0) || !self.ranks.iter().all(idle) {
            return Ok(());
        }
        (0..self.ranks.len()).try_for_each(|rank| {
            reply(rank, self.state(true, Vec::new()))?;
            (self.ranks[rank].waits, self.ranks[rank].ended) = (false, true);
            Ok(())
        })
    }

    fn state(&self, end: bool, granted: Vec<u32>) -> Reply {
        Reply {
            end,
            devices: self.devices,
            unfinished: self.unfinished,
            granted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replies(hub: &mut Hub, from: usize, report: &Report) -> Vec<(usize, Reply)> {
        let mut replies = Vec::new();
        hub.hear(from).unwrap();
        hub.report(from, report, |to, reply| {
            replies.push((to, reply));
            Ok(())
        })
        .unwrap();
        replies
    }

    fn asking(devices: usize, ask: usize) -> Report {
        Report {
            devices,
            ask,
            ..Report::default()
        }
    }

    fn granted(replies: &[(usize, Reply)]) -> Vec<(usize, Vec<u32>)> {
        let granted = |(rank, reply): &(usize, Reply)| (*rank, reply.granted.clone());
        replies.iter().map(granted).collect()
    }

    fn answering(devices: usize, requests: &[u32]) -> Report {
        Report {
            answers: requests.iter().map(|&request| (request, vec![1])).collect(),
            ..asking(devices, 0)
        }
    }

    #[test]
    fn a_rank_gets_no_more_than_its_share_and_the_end_comes_when_all_have_nothing_left() {
        let mut hub = Hub::new(10, [0, 2, 4, 6, 8, 9], &[1, 2]).unwrap();
        assert_eq!(granted(&replies(&mut hub, 0, &asking(1, 9))), [(0, vec![0, 2])]);
        assert_eq!(granted(&replies(&mut hub, 1, &asking(2, 9))), [(1, vec![4, 6, 8, 9])]);
        // Rank 0 has nothing to do and waits for its reply.
        assert_eq!(replies(&mut hub, 0, &answering(1, &[2, 0])), []);
        assert_eq!(granted(&replies(&mut hub, 1, &answering(2, &[4, 6]))), [(1, vec![])]);
        let end = replies(&mut hub, 1, &answering(2, &[9, 8]));
        assert!(end.len() == 2 && end.iter().all(|(_, reply)| reply.end && reply.unfinished == 0));
    }

    #[test]
    fn what_a_rank_gives_back_goes_to_those_that_wait() {
        let mut hub = Hub::new(3, 0..3, &[1, 1, 1]).unwrap();
        for rank in 0..3 {
            assert_eq!(
                granted(&replies(&mut hub, rank, &asking(1, 1))),
                [(rank, vec![rank as u32])]
            );
        }
        assert_eq!(replies(&mut hub, 0, &answering(1, &[0])), []);
        let losing = |request| Report {
            back: vec![request],
            ..asking(0, 0)
        };
        assert_eq!(granted(&replies(&mut hub, 1, &losing(1))), [(0, vec![1])]);
        // Rank 0 is at work; it gets the next one when it reports.
        assert_eq!(replies(&mut hub, 2, &losing(2)), []);
        assert_eq!(granted(&replies(&mut hub, 0, &answering(1, &[1]))), [(0, vec![2])]);
        let end = replies(&mut hub, 0, &losing(2));
        assert!(end.len() == 3 && end.iter().all(|(_, reply)| reply.end && reply.unfinished == 1));
    }

    #[test]
    fn without_devices_the_run_ends_with_what_is_left() {
        let mut hub = Hub::new(4, 0..4, &[1, 0]).unwrap();
        assert_eq!(replies(&mut hub, 1, &asking(0, 0)), []);
        assert_eq!(granted(&replies(&mut hub, 0, &asking(1, 2))), [(0, vec![0, 1])]);
        let lost = Report {
            back: vec![1],
            ..answering(0, &[0])
        };
        let end = replies(&mut hub, 0, &lost);
        assert!(end.len() == 2 && end.iter().all(|(_, reply)| reply.end && reply.unfinished == 3));
        hub.begin(&[0, 1]);
        assert_eq!(replies(&mut hub, 0, &asking(0, 0)), []);
        assert_eq!(granted(&replies(&mut hub, 1, &asking(1, 9))), [(1, vec![1, 2, 3])]);
    }

    #[test]
    fn all_are_dismissed_once_each_when_they_report() {
        let mut hub = Hub::new(9, 0..9, &[1; 4]).unwrap();
        for rank in 0..3 {
            replies(&mut hub, rank, &asking(1, 1));
        }
        // Rank 2 has reported, and rank 3 as well, when its reply fails; the others are at work.
        hub.hear(2).unwrap();
        hub.hear(3).unwrap();
        let lost = hub.report(3, &asking(1, 1), |_, _| Err(broken("lost")));
        assert!(lost.is_err() && hub.hear(2).is_err());
        let mut told = Vec::new();
        let mut dismiss = |hub: &mut Hub| {
            hub.dismiss(|rank| {
                told.push(rank);
                Ok(())
            })
            .unwrap()
        };
        assert!(!dismiss(&mut hub) && !dismiss(&mut hub));
        hub.hear(1).unwrap();
        assert!(dismiss(&mut hub));
        assert_eq!(told, [2, 3, 1]);
    }

    #[test]
    fn requests_that_a_rank_does_not_have_are_refused() {
        for report in [answering(1, &[1]), answering(1, &[0, 0]), answering(1, &[7])] {
            let mut hub = Hub::new(2, 0..2, &[1, 1]).unwrap();
            replies(&mut hub, 0, &asking(1, 1));
            hub.hear(0).unwrap();
            assert!(hub.report(0, &report, |_, _| Ok(())).is_err(), "{report:?}");
        }
    }

    fn refusing(devices: usize, requests: &[u32]) -> Report {
        Report {
            refused: requests.iter().map(|&request| (request, "too long".into())).collect(),
            ..asking(devices, 9)
        }
    }

    #[test]
    fn what_a_rank_cannot_run_goes_to_one_that_has_not_refused_it() {
        let mut hub = Hub::new(4, 0..4, &[1, 1]).unwrap();
        assert_eq!(granted(&replies(&mut hub, 0, &asking(1, 2))), [(0, vec![0, 1])]);
        // Rank 1 waits for what there is; rank 0 hands one back and gets the next that it has not refused.
        assert_eq!(granted(&replies(&mut hub, 1, &asking(1, 2))), [(1, vec![2, 3])]);
        assert_eq!(granted(&replies(&mut hub, 0, &refusing(1, &[1]))), [(0, vec![])]);
        assert_eq!(granted(&replies(&mut hub, 1, &answering(1, &[2, 3]))), [(1, vec![1])]);
    }

    #[test]
    fn a_rank_that_can_run_nothing_of_what_waits_takes_no_share() {
        let mut hub = Hub::new(8, 0..8, &[1, 1]).unwrap();
        hub.begin(&[1, 1]);
        (0..8).for_each(|request| hub.exclude(1, request));
        assert_eq!(granted(&replies(&mut hub, 1, &asking(1, 9))), []);
        let all = (0..8).collect();
        assert_eq!(granted(&replies(&mut hub, 0, &asking(1, 9))), [(0, all)]);
        // What comes back may be for it, too.
        let back = Report {
            back: vec![7],
            ..asking(1, 0)
        };
        assert_eq!(granted(&replies(&mut hub, 0, &back)), [(0, vec![])]);
        assert!(!hub.ranks[0].rests);
    }

    #[test]
    fn what_no_rank_can_run_gets_no_answer() {
        let stranded = |hub: &mut Hub, from, report: &Report| {
            hub.hear(from).unwrap();
            hub.report(from, report, |_, _| Ok(())).unwrap()
        };
        let mut hub = Hub::new(3, 0..3, &[1, 1]).unwrap();
        replies(&mut hub, 0, &asking(1, 2));
        replies(&mut hub, 1, &asking(1, 2));
        assert_eq!(stranded(&mut hub, 0, &refusing(1, &[0, 1])), [0_u32; 0]);
        assert_eq!(stranded(&mut hub, 1, &refusing(1, &[2])), [0_u32; 0]);
        // Rank 1 has the first two now, and refuses one of them; then it loses its device with the other.
        assert_eq!(stranded(&mut hub, 1, &refusing(1, &[0])), [0]);
        let lost = Report {
            back: vec![1],
            ..asking(0, 0)
        };
        assert_eq!(stranded(&mut hub, 1, &lost), [1]);
        let end = replies(&mut hub, 0, &answering(1, &[2]));
        assert!(
            end.iter().all(|(_, reply)| reply.end && reply.unfinished == 0),
            "{end:?}"
        );
    }
}
