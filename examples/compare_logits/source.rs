//! Files of logits: those that GETP_LOGITS writes, and lines of text.
//!
//! The text is what the evaluation program's checkers print: for each request in order a line for every so many
//! positions, with every so many of that position's logits. It does not say which they are, so that both strides have
//! to be told.

use getp::error::{Error, Result};
use getp::file_kind::{self, GivenAs};
use getp::logits::{LogitsReader, MAGIC, RecordKey};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::{Display, Formatter};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// The place of a row of logits in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// In a record.
    Record(RecordKey),
    /// In this line of a text, from 1; its request is not known.
    Line(usize),
}

impl Display for Place {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Record(RecordKey { request, position }) => write!(f, "request {request}, position {position}"),
            Place::Line(line) => write!(f, "line {line}"),
        }
    }
}

/// A file of logits.
pub enum Source {
    /// One that GETP_LOGITS wrote; rows are read on demand.
    Recorded(LogitsReader),
    /// The lines of a text, all of one length.
    Text(Vec<Vec<f32>>),
}

impl Source {
    /// Opens a file of either kind; its first bytes tell which.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_either(path).map_err(|error| file_kind::explain(path, error, GivenAs::Logits))
    }

    fn open_either(path: &Path) -> Result<Self> {
        let mut file = BufReader::new(File::open(path).map_err(|e| Error::io(path, e))?);
        let mut first = Vec::new();
        let magic = file.by_ref().take(MAGIC.len() as u64).read_to_end(&mut first);
        magic.map_err(|e| Error::io(path, e))?;
        if first == MAGIC {
            return Ok(Self::Recorded(LogitsReader::open(path)?));
        }
        read_text(path, first.chain(file)).map(Self::Text)
    }

    /// Whether it is lines of text.
    pub fn is_text(&self) -> bool {
        matches!(self, Self::Text(_))
    }

    /// Logits in a row as [`Source::read`] gives it for the same `tokens`.
    pub fn width(&self, tokens: usize) -> usize {
        match self {
            Self::Recorded(reader) => reader.vocab().div_ceil(tokens),
            Self::Text(lines) => lines.first().map_or(0, Vec::len),
        }
    }

    /// Its rows in the order of a text, and where they stand: lines as they come, records at every so many `positions`
    /// by request and position. Of records with one key the last counts.
    fn in_order(&self, positions: u32) -> Vec<(Place, usize)> {
        match self {
            Self::Recorded(reader) => {
                let records = (0..).zip(reader.records()).map(|(at, &(key, _))| (key, at));
                let kept: BTreeMap<RecordKey, usize> = records
                    .filter(|(key, _)| key.position.is_multiple_of(positions))
                    .collect();
                kept.into_iter().map(|(key, at)| (Place::Record(key), at)).collect()
            }
            Self::Text(lines) => (0..lines.len()).map(|at| (Place::Line(at + 1), at)).collect(),
        }
    }

    /// Reads row `at`: of a record every so many `tokens`, of a text what it has.
    pub fn read(&mut self, at: usize, tokens: usize, row: &mut Vec<f32>) -> Result<()> {
        match self {
            Self::Recorded(reader) => {
                reader.read(at, row)?;
                if tokens > 1 {
                    *row = row.iter().copied().step_by(tokens).collect();
                }
            }
            Self::Text(lines) => row.clone_from(&lines[at]),
        }
        Ok(())
    }
}

/// Rows of two files that belong together.
#[derive(Default)]
pub struct Pairs {
    /// Where they stand, the row in A, the row in B.
    pub rows: Vec<(Place, usize, usize)>,
    /// Rows of A without one in B.
    pub only_a: usize,
    /// Rows of B without one in A.
    pub only_b: usize,
    /// Pairs whose token fed differs.
    pub other_token: usize,
}

impl Pairs {
    /// Pairs records by their keys. If one file is a text, its lines are paired in order with those of the other, or
    /// with the other's records at every so many `positions`.
    pub fn new(a: &Source, b: &Source, positions: u32) -> Self {
        if let (Source::Recorded(a), Source::Recorded(b)) = (a, b) {
            return Self::by_key(a, b);
        }
        let (a, b) = (a.in_order(positions), b.in_order(positions));
        let pairs = a.iter().zip(&b).map(|(a, b)| (a.0.min(b.0), a.1, b.1));
        Self {
            rows: pairs.collect(),
            only_a: a.len().saturating_sub(b.len()),
            only_b: b.len().saturating_sub(a.len()),
            other_token: 0,
        }
    }

    fn by_key(a: &LogitsReader, b: &LogitsReader) -> Self {
        let in_b: HashMap<RecordKey, usize> = (0..).zip(b.records()).map(|(at, &(key, _))| (key, at)).collect();
        let mut in_a: Vec<(RecordKey, usize)> = (0..).zip(a.records()).map(|(at, &(key, _))| (key, at)).collect();
        in_a.sort(); // so that the first mismatch is the first in the requests' order too
        let mut pairs = Self::default();
        for &(key, at_a) in &in_a {
            let Some(&at_b) = in_b.get(&key) else {
                pairs.only_a += 1;
                continue;
            };
            pairs.other_token += usize::from(a.records()[at_a].1 != b.records()[at_b].1);
            pairs.rows.push((Place::Record(key), at_a, at_b));
        }
        let a_keys: HashSet<RecordKey> = in_a.into_iter().map(|(key, _)| key).collect();
        pairs.only_b = in_b.keys().filter(|key| !a_keys.contains(key)).count();
        pairs
    }
}

/// Lines of numbers between blanks; lines without any do not count.
fn read_text(path: &Path, text: impl BufRead) -> Result<Vec<Vec<f32>>> {
    let format = |why: String| Error::format(path.display().to_string(), why);
    let mut rows: Vec<Vec<f32>> = Vec::new();
    for (line, bytes) in (1..).zip(text.split(b'\n')) {
        let bytes = bytes.map_err(|e| Error::io(path, e))?;
        let numbers = std::str::from_utf8(&bytes).unwrap_or("?").split_ascii_whitespace();
        let row: std::result::Result<Vec<f32>, _> = numbers.map(str::parse).collect();
        let row = row.map_err(|_| {
            format(format!(
                "line {line} is not made of numbers, and the file does not begin as one that GETP_LOGITS writes does"
            ))
        })?;
        let expected = rows.first().map_or(row.len(), Vec::len);
        if !row.is_empty() && row.len() != expected {
            return Err(format(format!(
                "line {line} has {} logits, those before it {expected}",
                row.len()
            )));
        }
        rows.extend((!row.is_empty()).then_some(row));
    }
    match rows.is_empty() {
        true => Err(format("it holds no logits".into())),
        false => Ok(rows),
    }
}
