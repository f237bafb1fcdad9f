//! What carries messages between ranks, and what all ranks do together with it.

use super::message::{Reader, Writer};
use crate::error::Result;
use crate::memory::{self, Purpose};
use std::thread;
use std::time::Duration;

/// Carries messages between ranks. Messages from one rank to another arrive in the order in which they were sent.
pub trait Transport: Send {
    /// The number of this rank, from 0.
    fn rank(&self) -> usize;
    /// How many ranks there are.
    fn ranks(&self) -> usize;
    /// Sends a message. It may wait until the other rank receives it.
    fn send(&self, to: usize, words: &[u32]) -> Result<()>;
    /// Takes the next message of a rank, or of any, whose words replace `words`; the rank that has sent it, `None` if
    /// none has arrived. If there is no memory for it, it can be taken later.
    fn receive(&self, from: Option<usize>, words: &mut Vec<u32>) -> Result<Option<usize>>;
    /// Notes that this rank has stopped in the middle of what all do together: others wait for it in vain.
    fn abandon(&self);
}

/// Abandons the others if it is dropped before it is told that all is done, be it by an error or a panic.
pub struct Promise<'t>(Option<&'t dyn Transport>);

impl<'t> Promise<'t> {
    /// From here on others wait for this rank.
    pub fn new(transport: &'t dyn Transport) -> Self {
        Self(Some(transport))
    }

    /// Nobody waits any more.
    pub fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        if let Some(transport) = self.0 {
            transport.abandon();
        }
    }
}

/// Sleeps between looks for a message, longer each time: an answer may be microseconds or minutes away, and the cores
/// have other work.
#[derive(Default)]
pub struct Nap(u32);

impl Nap {
    /// Sleeps 20 µs the first time, and at most 1 ms.
    pub fn sleep(&mut self) {
        const SHORTEST: Duration = Duration::from_micros(20);
        const LONGEST: Duration = Duration::from_millis(1);
        thread::sleep((SHORTEST * (1 << self.0)).min(LONGEST));
        self.0 = (self.0 + 1).min(6);
    }

    /// Makes the next sleep a short one.
    pub fn reset(&mut self) {
        self.0 = 0;
    }
}

/// Waits for the next message of a rank, or of any, whose words replace `words`; gives the rank that has sent it.
pub fn wait(transport: &dyn Transport, from: Option<usize>, words: &mut Vec<u32>) -> Result<usize> {
    let mut nap = Nap::default();
    loop {
        match transport.receive(from, words)? {
            Some(from) => return Ok(from),
            None => nap.sleep(),
        }
    }
}

/// Sends rank 0's message to all ranks; on the others it replaces `words`. Each rank passes it on to two.
pub fn spread(transport: &dyn Transport, words: &mut Vec<u32>) -> Result<()> {
    let rank = transport.rank();
    if rank > 0 {
        wait(transport, Some((rank - 1) / 2), words)?;
    }
    for child in [2 * rank + 1, 2 * rank + 2] {
        if child < transport.ranks() {
            transport.send(child, words)?;
        }
    }
    Ok(())
}

/// Gives every rank what each rank has brought, in the order of ranks.
pub fn gather(transport: &dyn Transport, record: Vec<u32>) -> Result<Vec<Vec<u32>>> {
    let ranks = transport.ranks();
    let mut all = Vec::new();
    if transport.rank() == 0 {
        let none = (0..ranks).map(|_| Vec::new());
        let mut records: Vec<Vec<u32>> = memory::collect(none, Purpose::Requests)?;
        for _ in 1..ranks {
            let from = wait(transport, None, &mut all)?;
            records[from] = std::mem::take(&mut all);
        }
        records[0] = record;
        let mut writer = Writer::default();
        records.iter().try_for_each(|record| writer.list(record))?;
        all = writer.words();
    } else {
        transport.send(0, &record)?;
    }
    spread(transport, &mut all)?;
    let mut reader = Reader::new(&all);
    let records = memory::try_collect((0..ranks).map(|_| reader.list()), Purpose::Requests)?;
    reader.end()?;
    Ok(records)
}
