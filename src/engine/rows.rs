//! The rows of rank 0 on their way to all ranks.

use crate::cluster::message::{MOST_WORDS, Reader, Writer};
use crate::cluster::transport::{Transport, spread};
use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::requests::Requests;

/// What all ranks know at the end.
pub struct Closing {
    /// Tokens in all rows.
    pub tokens: u64,
    /// Requests without an answer, but for those refused.
    pub unfinished: usize,
    /// The state of request 0's random stream after its answer.
    pub first_state: Option<u64>,
}

/// Gives all ranks the rows and the closing of rank 0.
pub fn share_rows(transport: &dyn Transport, requests: &mut Requests<'_>, closing: Closing) -> Result<Closing> {
    if transport.rank() > 0 {
        return receive_rows(transport, requests);
    }
    let mut request = 0;
    loop {
        let mut writer = Writer::default();
        let mut rows = Writer::default();
        let mut count = 0;
        while request < requests.len() && rows.len() < MOST_WORDS {
            let tokens = memory::collect(requests.answer(request), Purpose::Requests)?;
            if !tokens.is_empty() {
                rows.number(request)?;
                rows.list(&tokens)?;
                count += 1;
            }
            request += 1;
        }
        let is_last = request == requests.len();
        writer.word(u32::from(is_last))?;
        writer.long(closing.tokens)?;
        writer.number(closing.unfinished)?;
        writer.word(u32::from(closing.first_state.is_some()))?;
        writer.long(closing.first_state.unwrap_or(0))?;
        writer.number(count)?;
        let mut words = writer.words();
        memory::append(&mut words, &rows.words(), Purpose::Requests)?;
        spread(transport, &mut words)?;
        if is_last {
            return Ok(closing);
        }
    }
}

fn receive_rows(transport: &dyn Transport, requests: &mut Requests<'_>) -> Result<Closing> {
    let mut words = Vec::new();
    loop {
        spread(transport, &mut words)?;
        let mut reader = Reader::new(&words);
        let is_last = reader.word()? != 0;
        let (tokens, unfinished) = (reader.long()?, reader.number()?);
        let (has_state, state) = (reader.word()? != 0, reader.long()?);
        for (request, tokens) in reader.many(|reader| Ok((reader.number()?, reader.list()?)))? {
            requests.store(request, &tokens);
        }
        if is_last {
            return Ok(Closing {
                tokens,
                unfinished,
                first_state: has_state.then_some(state),
            });
        }
    }
}
