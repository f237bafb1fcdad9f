//! The rows of rank 0 on their way to all ranks.

use crate::cluster::message::{MOST_WORDS, Reader, Writer};
use crate::cluster::transport::{Transport, spread};
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::requests::Requests;

/// What all ranks know at the end.
#[derive(Default)]
pub struct Closing {
    /// Tokens in all rows.
    pub tokens: u64,
    /// Requests without an answer, but for those refused.
    pub unfinished: usize,
    /// The state of request 0's random stream after its answer.
    pub first_state: Option<u64>,
    /// Why there are no rows; empty if there are.
    pub failure: String,
}

impl Closing {
    fn write(&self, writer: &mut Writer) -> Result<()> {
        writer.long(self.tokens)?;
        writer.number(self.unfinished)?;
        writer.word(u32::from(self.first_state.is_some()))?;
        writer.long(self.first_state.unwrap_or(0))?;
        writer.text(&self.failure)
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let (tokens, unfinished) = (reader.long()?, reader.number()?);
        let (has_state, state) = (reader.word()? != 0, reader.long()?);
        Ok(Self {
            tokens,
            unfinished,
            first_state: has_state.then_some(state),
            failure: reader.text()?,
        })
    }
}

/// Gives all ranks the rows and the closing of rank 0. `words` has room for any message.
pub fn share_rows(
    transport: &dyn Transport,
    requests: &mut Requests<'_>,
    mut closing: Closing,
    words: &mut Vec<u32>,
) -> Result<Closing> {
    if transport.rank() > 0 {
        return receive_rows(transport, requests, words);
    }
    let mut request = 0;
    loop {
        let rows = if closing.failure.is_empty() {
            some_rows(requests, &mut request)
        } else {
            Ok((0, Vec::new()))
        };
        let (count, rows) = rows.unwrap_or_else(|why: Error| {
            closing.failure = failed(0, &why);
            (0, Vec::new())
        });
        let is_last = request == requests.len() || !closing.failure.is_empty();
        let mut writer = Writer::default();
        writer.word(u32::from(is_last))?;
        closing.write(&mut writer)?;
        writer.number(count)?;
        words.clear();
        memory::append(words, &writer.words(), Purpose::Requests)?;
        memory::append(words, &rows, Purpose::Requests)?;
        spread(transport, words)?;
        if is_last {
            return Ok(closing);
        }
    }
}

/// As many of the next rows as a message may have: their number, and themselves.
fn some_rows(requests: &Requests<'_>, request: &mut usize) -> Result<(usize, Vec<u32>)> {
    let mut rows = Writer::default();
    let mut count = 0;
    while *request < requests.len() && rows.len() < MOST_WORDS {
        let tokens = memory::collect(requests.answer(*request), Purpose::Requests)?;
        if !tokens.is_empty() {
            rows.number(*request)?;
            rows.list(&tokens)?;
            count += 1;
        }
        *request += 1;
    }
    Ok((count, rows.words()))
}

fn receive_rows(transport: &dyn Transport, requests: &mut Requests<'_>, words: &mut Vec<u32>) -> Result<Closing> {
    loop {
        spread(transport, words)?;
        let mut reader = Reader::new(words);
        let is_last = reader.word()? != 0;
        let closing = Closing::read(&mut reader)?;
        for _ in 0..reader.number()? {
            requests.store(reader.number()?, reader.part()?);
        }
        if is_last {
            return Ok(closing);
        }
    }
}

/// What all ranks are told of one that has failed.
pub fn failed(rank: usize, why: &Error) -> String {
    format!("rank {rank} has failed: {why}")
}
