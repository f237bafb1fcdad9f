//! The messages of a run, and how they are written: as 32-bit words, in the machine's byte order.

use crate::error::{Error, Result};
use crate::memory::{self, Purpose};

/// The most words of answers in a report, beside its last answer: 1 MiB.
pub const MOST_WORDS: usize = 1 << 18;

/// Words that have room for any message of a run with answers of up to `steps` tokens: in a report, besides the
/// answers, for as many requests that go back or are refused as a rank ever has.
pub fn room(steps: usize) -> Result<Vec<u32>> {
    memory::room(2 * MOST_WORDS + steps, Purpose::Requests)
}

/// What a rank tells rank 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// How many of its devices work.
    pub devices: usize,
    /// How many more requests it asks for.
    pub ask: usize,
    /// Requests that it gives back without an answer.
    pub back: Vec<u32>,
    /// Requests that none of its devices takes, and why.
    pub refused: Vec<(u32, String)>,
    /// Requests and their answers.
    pub answers: Vec<(u32, Vec<u32>)>,
    /// The state of request 0's random stream after its answer, if that is among the answers.
    pub first_state: Option<u64>,
    /// Why the rank cannot go on; empty if it can.
    pub failure: String,
}

/// What rank 0 tells a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// Nothing is left to do, or no device is left to do it, or a rank has failed.
    pub end: bool,
    /// The devices that work, of all ranks.
    pub devices: usize,
    /// The requests without an answer, of all ranks.
    pub unfinished: usize,
    /// Requests for this rank.
    pub granted: Vec<u32>,
}

impl Report {
    /// As words.
    pub fn to_words(&self) -> Result<Vec<u32>> {
        let mut writer = Writer::default();
        writer.number(self.devices)?;
        writer.number(self.ask)?;
        writer.list(&self.back)?;
        writer.number(self.refused.len())?;
        for (request, why) in &self.refused {
            writer.word(*request)?;
            writer.text(why)?;
        }
        writer.number(self.answers.len())?;
        for (request, tokens) in &self.answers {
            writer.word(*request)?;
            writer.list(tokens)?;
        }
        writer.word(u32::from(self.first_state.is_some()))?;
        writer.long(self.first_state.unwrap_or(0))?;
        writer.text(&self.failure)?;
        Ok(writer.words())
    }

    /// From words.
    pub fn from_words(words: &[u32]) -> Result<Self> {
        let mut reader = Reader::new(words);
        let (devices, ask, back) = (reader.number()?, reader.number()?, reader.list()?);
        let refused = reader.many(|reader| Ok((reader.word()?, reader.text()?)))?;
        let answers = reader.many(|reader| Ok((reader.word()?, reader.list()?)))?;
        let has_state = reader.word()? != 0;
        let state = reader.long()?;
        let failure = reader.text()?;
        reader.end()?;
        Ok(Self {
            devices,
            ask,
            back,
            refused,
            answers,
            first_state: has_state.then_some(state),
            failure,
        })
    }
}

impl Reply {
    /// As words.
    pub fn to_words(&self) -> Result<Vec<u32>> {
        let mut writer = Writer::default();
        writer.word(u32::from(self.end))?;
        writer.number(self.devices)?;
        writer.number(self.unfinished)?;
        writer.list(&self.granted)?;
        Ok(writer.words())
    }

    /// From words.
    pub fn from_words(words: &[u32]) -> Result<Self> {
        let mut reader = Reader::new(words);
        let reply = Self {
            end: reader.word()? != 0,
            devices: reader.number()?,
            unfinished: reader.number()?,
            granted: reader.list()?,
        };
        reader.end()?;
        Ok(reply)
    }
}

/// Writes a message.
#[derive(Default)]
pub struct Writer(Vec<u32>);

impl Writer {
    /// What has been written.
    pub fn words(self) -> Vec<u32> {
        self.0
    }

    /// How many words have been written.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing has been written.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Writes one word.
    pub fn word(&mut self, word: u32) -> Result<()> {
        memory::push(&mut self.0, word, Purpose::Requests)
    }

    /// Writes a number of requests, devices or words: numbers of requests are ints in the program's struct.
    pub fn number(&mut self, number: usize) -> Result<()> {
        self.word(number as u32)
    }

    /// Writes 64 bits.
    pub fn long(&mut self, value: u64) -> Result<()> {
        self.word(value as u32)?;
        self.word((value >> 32) as u32)
    }

    /// Writes words, behind their number.
    pub fn list(&mut self, words: &[u32]) -> Result<()> {
        self.number(words.len())?;
        memory::append(&mut self.0, words, Purpose::Requests)
    }

    /// Writes a text, behind the number of its bytes.
    pub fn text(&mut self, text: &str) -> Result<()> {
        self.number(text.len())?;
        for bytes in text.as_bytes().chunks(4) {
            let mut word = [0; 4];
            word[..bytes.len()].copy_from_slice(bytes);
            self.word(u32::from_ne_bytes(word))?;
        }
        Ok(())
    }
}

/// Reads a message. A message that ends too early is an error.
pub struct Reader<'a>(&'a [u32]);

impl<'a> Reader<'a> {
    /// A message's words.
    pub fn new(words: &'a [u32]) -> Self {
        Self(words)
    }

    /// Whether everything has been read.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn words(&mut self, words: usize) -> Result<&'a [u32]> {
        let (taken, rest) = self
            .0
            .split_at_checked(words)
            .ok_or_else(|| broken("a message is cut"))?;
        self.0 = rest;
        Ok(taken)
    }

    /// What has not been read.
    pub fn rest(self) -> &'a [u32] {
        self.0
    }

    /// One word.
    pub fn word(&mut self) -> Result<u32> {
        Ok(self.words(1)?[0])
    }

    /// What [`Writer::number`] has written.
    pub fn number(&mut self) -> Result<usize> {
        Ok(self.word()? as usize)
    }

    /// 64 bits.
    pub fn long(&mut self) -> Result<u64> {
        let (low, high) = (self.word()?, self.word()?);
        Ok(u64::from(low) | u64::from(high) << 32)
    }

    /// Words, behind their number.
    pub fn list(&mut self) -> Result<Vec<u32>> {
        memory::collect(self.part()?.iter().copied(), Purpose::Requests)
    }

    /// Words, behind their number, where they are.
    pub fn part(&mut self) -> Result<&'a [u32]> {
        let words = self.number()?;
        self.words(words)
    }

    /// A text, behind the number of its bytes.
    pub fn text(&mut self) -> Result<String> {
        let bytes = self.number()?;
        let words = self.words(bytes.div_ceil(4))?;
        let text = words.iter().flat_map(|word| word.to_ne_bytes()).take(bytes);
        let text = memory::collect(text, Purpose::Requests)?;
        String::from_utf8(text).map_err(|_| broken("a text is not UTF-8"))
    }

    /// Values behind their number.
    pub fn many<T>(&mut self, mut value: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let values = self.number()?;
        let mut all = Vec::new();
        for _ in 0..values {
            memory::push(&mut all, value(self)?, Purpose::Requests)?;
        }
        Ok(all)
    }

    /// Fails if something is left.
    pub fn end(&self) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        Err(broken(format_args!("a message has {} words too many", self.0.len())))
    }
}

/// The error for a rank that has sent what it cannot have sent.
pub fn broken(what: impl std::fmt::Display) -> Error {
    Error::Internal(format!("the ranks do not understand each other: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent_and_are_refused_if_cut() {
        let report = Report {
            devices: 8,
            ask: 70_000,
            back: vec![5, 3],
            refused: vec![(9, "zu lang: ä".into()), (10, String::new())],
            answers: vec![(0, vec![199_999]), (7, vec![]), (4, vec![1, 2, 3])],
            first_state: Some(0x0123_4567_89ab_cdef),
            failure: "no memory".into(),
        };
        let words = report.to_words().unwrap();
        assert_eq!(Report::from_words(&words).unwrap(), report);
        for len in 0..words.len() {
            assert!(Report::from_words(&words[..len]).is_err(), "{len} words");
        }
        assert!(Report::from_words(&[&words[..], &[0]].concat()).is_err());
        let reply = Reply {
            end: true,
            devices: 1000,
            unfinished: 1 << 30,
            granted: vec![1, 2],
        };
        let words = reply.to_words().unwrap();
        assert_eq!(Reply::from_words(&words).unwrap(), reply);
        assert!(Reply::from_words(&words[..5]).is_err());
    }
}
