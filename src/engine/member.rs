//! A rank in a run: fills its replicas' queue with what rank 0 grants, and sends it what they answer. On rank 0 it also
//! keeps the queue of all ranks and stores the answers.

use super::answers::Answers;
use super::queue::{Counts, OfRanks};
use super::rows::failed;
use super::run::{Outbox, Results, Run, lock};
use crate::cluster::hub::Hub;
use crate::cluster::message::{self, MOST_WORDS, Reply, Report, broken};
use crate::cluster::stock::{Seen, Stock};
use crate::cluster::transport::{Nap, Transport, wait};
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::request::{Answer, Request};
use crate::scheduler::Limits;
use std::collections::{BTreeSet, VecDeque};
use std::time::Instant;

/// See the module.
pub struct Member<'t> {
    /// The way to the other ranks.
    pub transport: &'t dyn Transport,
    /// Rank 0's.
    hub: Option<Hub>,
    stock: Stock,
    start: Instant,
    /// By request: what is to be answered and is not in this rank's queue.
    elsewhere: Vec<Option<Request>>,
    /// Requests granted to this rank that rank 0 has heard nothing of.
    held: BTreeSet<u32>,
    /// The most positions of a request.
    positions: usize,
    /// Devices, and the queue's counts, in the last report.
    devices: usize,
    counted: Counts,
    /// Whether a report of another rank than 0 has been sent and its reply not received.
    awaits: bool,
    /// The run's last reply.
    end: Option<Reply>,
    /// The state of request 0's random stream after its answer, once rank 0 knows it.
    pub first_state: Option<u64>,
    /// Rank 0's: why the run was ended before all was done; empty if it was not.
    pub failure: String,
    /// Room for any message: it is there before a request is taken.
    pub words: Vec<u32>,
}

impl<'t> Member<'t> {
    /// For a run of these requests, out of `requests` requests, with up to `positions` positions and as many tokens.
    pub fn new(
        transport: &'t dyn Transport,
        waiting: VecDeque<Request>,
        requests: usize,
        positions: usize,
    ) -> Result<Self> {
        let numbers = waiting.iter().map(|request| request.number as u32);
        let none = vec![0; transport.ranks()];
        let hub = (transport.rank() == 0)
            .then(|| Hub::new(requests, numbers, &none))
            .transpose()?;
        let mut elsewhere = memory::collect((0..requests).map(|_| None), Purpose::Requests)?;
        for request in waiting {
            let number = request.number;
            elsewhere[number] = Some(request);
        }
        Ok(Self {
            hub,
            stock: Stock::new(transport.ranks()),
            transport,
            start: Instant::now(),
            elsewhere,
            held: BTreeSet::new(),
            devices: 0,
            counted: Counts::default(),
            positions,
            awaits: false,
            end: None,
            first_state: None,
            failure: String::new(),
            words: message::room(positions)?,
        })
    }

    /// Begins a run, to which the ranks bring so many devices. `limits` are those of each rank's, as far as they are
    /// known.
    pub fn begin(&mut self, run: &Run<'_, '_>, devices: &[usize], limits: &[Vec<Limits>]) {
        let more = OfRanks {
            more: true,
            share: 0,
            positions: self.positions,
        };
        run.queue.add(Vec::new(), more);
        if let Some(hub) = &mut self.hub {
            hub.begin(devices);
            for (rank, limits) in limits.iter().enumerate().filter(|(_, limits)| !limits.is_empty()) {
                let unfit = |request: &&Request| !limits.iter().any(|limits| limits.take(request));
                let unfit = self.elsewhere.iter().flatten().filter(unfit);
                unfit.for_each(|request| hub.exclude(rank, request.number as u32));
            }
        }
        self.stock = Stock::new(self.transport.ranks());
        self.devices = devices[self.transport.rank()];
        self.end = None;
    }

    /// Requests without an answer when the run ended.
    pub fn unfinished(&self) -> usize {
        self.end.as_ref().map_or(0, |end| end.unfinished)
    }

    /// Takes part until the run ends, or until the queue is stopped since a worker has panicked. `answers` are rank
    /// 0's. If this rank fails, the run ends for all; an error means that not all can be told.
    pub fn serve(&mut self, run: &Run<'_, '_>, answers: Option<&mut Answers<'_, '_>>) -> Result<()> {
        self.take_part_or_fail(run, answers, false)
    }

    /// Takes part without devices until the run ends: no worker is left, and what they had goes back.
    pub fn give_up(&mut self, run: &Run<'_, '_>, answers: Option<&mut Answers<'_, '_>>) -> Result<()> {
        self.take_part_or_fail(run, answers, true)
    }

    fn take_part_or_fail(
        &mut self,
        run: &Run<'_, '_>,
        answers: Option<&mut Answers<'_, '_>>,
        gives_up: bool,
    ) -> Result<()> {
        let Err(why) = self.take_part(run, answers, gives_up) else {
            return Ok(());
        };
        // Without this rank the workers would wait for ever.
        run.queue.stop();
        if self.hub.is_some() {
            self.dismiss(&why)
        } else {
            self.tell(&why)
        }
    }

    /// Rank 0: ends the run for all ranks. Those that wait for a reply are told now, the others when they report. If
    /// one knows already that devices are to be opened again, all are told so, and hear of the failure there.
    fn dismiss(&mut self, why: &Error) -> Result<()> {
        if self.failure.is_empty() {
            self.failure = failed(0, why);
        }
        let (Some(hub), transport) = (&mut self.hub, self.transport) else {
            return Err(broken("a rank without the queue dismisses the others"));
        };
        let end = Reply {
            end: true,
            unfinished: hub.left(),
            ..Reply::default()
        };
        while !hub.dismiss(|to| transport.send(to, &end.to_words()?))? {
            hub.hear(wait(transport, None, &mut self.words)?)?;
        }
        self.end = Some(end);
        Ok(())
    }

    /// Another rank: tells rank 0 that this one has failed, and waits for the end.
    fn tell(&mut self, why: &Error) -> Result<()> {
        let report = Report {
            failure: why.to_string(),
            ..Report::default()
        };
        while self.end.is_none() {
            if !self.awaits {
                self.transport.send(0, &report.to_words()?)?;
            }
            wait(self.transport, Some(0), &mut self.words)?;
            self.awaits = false;
            let reply = Reply::from_words(&self.words)?;
            self.end = reply.end.then_some(reply);
        }
        Ok(())
    }

    fn take_part(
        &mut self,
        run: &Run<'_, '_>,
        mut answers: Option<&mut Answers<'_, '_>>,
        gives_up: bool,
    ) -> Result<()> {
        let mut nap = Nap::default();
        while self.end.is_none() && (gives_up || !run.queue.is_stopped()) {
            let heard = self.hear(run, answers.as_deref_mut())?;
            let said = self.report(run, answers.as_deref_mut(), gives_up)?;
            if heard || said {
                nap.reset();
            } else {
                nap.sleep();
            }
        }
        Ok(())
    }

    /// Takes a message that has arrived; `false` if none has.
    fn hear(&mut self, run: &Run<'_, '_>, answers: Option<&mut Answers<'_, '_>>) -> Result<bool> {
        let from = if self.hub.is_some() { None } else { Some(0) };
        let Some(from) = self.transport.receive(from, &mut self.words)? else {
            return Ok(false);
        };
        if let Some(hub) = &mut self.hub {
            hub.hear(from)?;
            self.handle(run, from, Report::from_words(&self.words)?, answers)?;
        } else {
            self.awaits = false;
            self.take(run, Reply::from_words(&self.words)?)?;
        }
        Ok(true)
    }

    /// Sends a report if one is due; `false` if none is. After the run's last reply none is: rank 0 would take it for
    /// the next thing that all ranks do together.
    fn report(&mut self, run: &Run<'_, '_>, answers: Option<&mut Answers<'_, '_>>, gives_up: bool) -> Result<bool> {
        let now = self.start.elapsed();
        if self.end.is_some() || !self.stock.may_report(now) {
            return Ok(false);
        }
        if !gives_up {
            run.refuse_unfit();
        }
        let watched = run.queue.watch();
        let devices = if gives_up { 0 } else { watched.replicas };
        let mut outbox = outbox(run)?;
        let has_results = !outbox.answers.is_empty() || !outbox.refused.is_empty();
        let seen = Seen {
            devices,
            waiting: watched.waiting,
            looks: watched.counts.looks - self.counted.looks,
            started: watched.counts.taken - self.counted.taken,
            wanted: watched.counts.wanted - self.counted.wanted,
            news: has_results || devices != self.devices,
        };
        let Some(wish) = self.stock.report(now, seen) else {
            return Ok(false);
        };
        (self.devices, self.counted) = (devices, watched.counts);
        let (mut report, refused) = results(&mut outbox)?;
        let is_empty = outbox.answers.is_empty();
        drop(outbox);
        report.devices = devices;
        report.ask = wish.ask;
        for request in refused {
            let number = request.number;
            self.elsewhere[number] = Some(request);
        }
        let done = report.answers.iter().map(|(request, _)| request);
        for request in done.chain(report.refused.iter().map(|(request, _)| request)) {
            self.held.remove(request);
        }
        for request in run.queue.withdraw(wish.back) {
            let number = request.number;
            self.held.remove(&(number as u32));
            memory::push(&mut report.back, number as u32, Purpose::Requests)?;
            self.elsewhere[number] = Some(request);
        }
        if gives_up && is_empty {
            report.back.extend(std::mem::take(&mut self.held));
        }
        self.say(run, report, answers)?;
        Ok(true)
    }

    fn say(&mut self, run: &Run<'_, '_>, report: Report, answers: Option<&mut Answers<'_, '_>>) -> Result<()> {
        if let Some(hub) = &mut self.hub {
            hub.hear(0)?;
            return self.handle(run, 0, report, answers);
        }
        self.transport.send(0, &report.to_words()?)?;
        self.awaits = true;
        Ok(())
    }

    /// Rank 0: stores a report's answers and sends the replies.
    fn handle(
        &mut self,
        run: &Run<'_, '_>,
        from: usize,
        report: Report,
        answers: Option<&mut Answers<'_, '_>>,
    ) -> Result<()> {
        let (Some(hub), Some(answers)) = (&mut self.hub, answers) else {
            return Err(broken("a report has come to a rank without the queue"));
        };
        if !report.failure.is_empty() {
            let why = Error::State(report.failure);
            self.failure = failed(from, &why);
            return Err(why);
        }
        let (transport, mut own) = (self.transport, None);
        let stranded = hub.report(from, &report, |to, reply| match to {
            0 => {
                own = Some(reply);
                Ok(())
            }
            _ => transport.send(to, &reply.to_words()?),
        })?;
        self.first_state = report.first_state.or(self.first_state);
        for (number, tokens) in report.answers {
            let number = number as usize;
            let rng_state = report.first_state.filter(|_| number == 0).unwrap_or(0);
            answers.store(Answer {
                number,
                tokens,
                rng_state,
            });
        }
        for number in stranded {
            let said = report.refused.iter().find(|(refused, _)| *refused == number);
            let why = said.map_or_else(
                || format!("request {number}: no device that is left has room for it"),
                |(_, why)| why.clone(),
            );
            answers.refuse(number as usize, &why);
        }
        own.map_or(Ok(()), |reply| self.take(run, reply))
    }

    /// Takes a reply.
    fn take(&mut self, run: &Run<'_, '_>, reply: Reply) -> Result<()> {
        self.stock.reply(self.start.elapsed(), reply.granted.len());
        let mut granted = memory::room(reply.granted.len(), Purpose::Requests)?;
        for &request in &reply.granted {
            let asked = self.elsewhere.get_mut(request as usize).and_then(Option::take);
            let asked = asked.ok_or_else(|| broken(format_args!("request {request} is here already")))?;
            self.held.insert(request);
            granted.push(asked);
        }
        let of_ranks = OfRanks {
            more: !reply.end,
            share: reply.unfinished.div_ceil(reply.devices.max(1)),
            positions: self.positions,
        };
        run.queue.add(granted, of_ranks);
        if reply.end {
            if !self.held.is_empty() {
                // A rank has failed: nobody wants the answers that the workers would go on for.
                run.queue.stop();
            }
            self.end = Some(reply);
        }
        Ok(())
    }
}

/// Takes results out of the outbox, as many as a report may have, and the requests that cannot run here.
fn results(outbox: &mut Outbox) -> Result<(Report, Vec<Request>)> {
    let (mut report, mut words) = (Report::default(), 0);
    while let Some(answer) = outbox.answers.pop_front() {
        words += 2 + answer.tokens.len();
        if answer.number == 0 {
            report.first_state = Some(answer.rng_state);
        }
        let number = answer.number as u32;
        memory::push(&mut report.answers, (number, answer.tokens), Purpose::Requests)?;
        if words >= MOST_WORDS {
            break;
        }
    }
    let mut refused = memory::room(outbox.refused.len(), Purpose::Requests)?;
    for (request, why) in outbox.refused.drain(..) {
        let number = request.number as u32;
        memory::push(&mut report.refused, (number, why.to_string()), Purpose::Requests)?;
        refused.push(request);
    }
    Ok((report, refused))
}

fn outbox<'a>(run: &'a Run<'_, '_>) -> Result<std::sync::MutexGuard<'a, Outbox>> {
    match &run.results {
        Results::Sent(outbox) => Ok(lock(outbox)),
        Results::Stored(_) | Results::Ledger(_) => Err(broken("a rank stores answers by itself")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::queue::Queue;
    use std::sync::{Arc, Mutex};

    /// Rank 1's way to a rank 0 that ends the run at the first report.
    #[derive(Default)]
    struct Ending {
        reports: Mutex<Vec<Report>>,
        replies: Mutex<VecDeque<Reply>>,
    }

    impl Transport for Ending {
        fn rank(&self) -> usize {
            1
        }

        fn ranks(&self) -> usize {
            2
        }

        fn send(&self, _: usize, words: &[u32]) -> Result<()> {
            self.reports.lock().unwrap().push(Report::from_words(words)?);
            let end = Reply {
                end: true,
                ..Reply::default()
            };
            self.replies.lock().unwrap().push_back(end);
            Ok(())
        }

        fn receive(&self, _: Option<usize>, words: &mut Vec<u32>) -> Result<Option<usize>> {
            let Some(reply) = self.replies.lock().unwrap().pop_front() else {
                return Ok(None);
            };
            *words = reply.to_words()?;
            Ok(Some(0))
        }

        fn abandon(&self) {}
    }

    fn run_with(outbox: Outbox) -> Run<'static, 'static> {
        Run {
            queue: Queue::new(VecDeque::new()).into(),
            results: Results::Sent(Mutex::new(outbox)),
            recorder: None,
            totals: Arc::default(),
        }
    }

    /// All other ranks wait for this one's workers.
    #[test]
    fn workers_stop_if_the_run_ends_before_they_have_answered() {
        for held in [None, Some(2)] {
            let run = run_with(Outbox::default());
            let transport = Ending::default();
            let mut member = Member::new(&transport, VecDeque::new(), 3, 1).unwrap();
            member.begin(&run, &[1, 1], &[]);
            member.held.extend(held);
            member.serve(&run, None).unwrap();
            assert_eq!(run.queue.is_stopped(), held.is_some());
        }
    }

    /// Rank 0 would take a later report for the beginning of the next inference.
    #[test]
    fn nothing_is_reported_after_the_last_reply() {
        let answer = |number| Answer {
            number,
            // A report has no room for two.
            tokens: vec![0; MOST_WORDS],
            rng_state: 0,
        };
        let outbox = Outbox {
            answers: [answer(1), answer(2)].into(),
            refused: Vec::new(),
        };
        let run = run_with(outbox);
        let transport = Ending::default();
        let mut member = Member::new(&transport, VecDeque::new(), 3, MOST_WORDS).unwrap();
        member.begin(&run, &[1, 1], &[]);
        // No pause between two reports.
        member.stock = Stock::new(0);
        member.serve(&run, None).unwrap();
        let reports = transport.reports.lock().unwrap();
        let answered: Vec<_> = reports.iter().map(|report| report.answers.len()).collect();
        assert_eq!(answered, [1]);
    }
}
