//! Files of recorded logits, of every position of a run, to compare two runs.
//!
//! A file is little endian. It begins with the eight bytes of [`MAGIC`], and the vocabulary's size and a zero as
//! uint32. Then come records of one size: request, position, the position's token and a zero as uint32, then `[vocab]`
//! float32. Records are in the order in which they were computed, which differs between runs: match them by request and
//! position. If a device failed and a request was started again, its positions occur twice; the later records are its
//! answer's.

mod target;

use crate::batch::{StepOutput, StepPlan};
use crate::error::{Error, Result};
use crate::file_kind::{self, GivenAs};
use crate::memory::{self, Purpose};
use crate::report;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use target::Target;

/// The first bytes of a file.
pub const MAGIC: &[u8; 8] = b"GETPLOG1";

const HEADER_BYTES: u64 = 16;
const RECORD_HEADER_BYTES: usize = 16;
/// Records are buffered up to this size: five rows of gpt-oss's vocabulary.
const BUFFER_BYTES: usize = 4 << 20;
/// The largest vocabulary accepted in a header; no model's is that large.
const MAX_VOCAB: u32 = 1 << 24;

/// Which logits a record holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordKey {
    /// The request, from 0.
    pub request: u32,
    /// The position whose token was the input, from 0.
    pub position: u32,
}

/// Writes a file of recorded logits.
pub struct LogitsWriter {
    path: PathBuf,
    file: Target,
    vocab: usize,
    /// Bytes not yet written to the file.
    bytes: Vec<u8>,
}

impl LogitsWriter {
    /// Creates the file, or truncates it, and writes its header. Fails unless it is a regular file that is empty or
    /// holds recorded logits, so that no other file is overwritten.
    pub fn create(path: &Path, vocab: usize) -> Result<Self> {
        let file = Target::create(path, MAGIC)?;
        let mut writer = Self {
            path: path.to_owned(),
            file,
            vocab,
            bytes: memory::room(BUFFER_BYTES + RECORD_HEADER_BYTES + 4 * vocab, Purpose::Logits)?,
        };
        writer.bytes.extend_from_slice(MAGIC);
        writer.bytes.extend_from_slice(&(vocab as u32).to_le_bytes());
        writer.bytes.extend_from_slice(&0u32.to_le_bytes());
        Ok(writer)
    }

    /// Adds a record. `logits` is `[vocab]`.
    pub fn write(&mut self, key: RecordKey, token: u32, logits: &[f32]) -> Result<()> {
        assert_eq!(logits.len(), self.vocab, "a record has a logit for each token");
        for word in [key.request, key.position, token, 0] {
            self.bytes.extend_from_slice(&word.to_le_bytes());
        }
        self.bytes.extend(logits.iter().flat_map(|logit| logit.to_le_bytes()));
        if self.bytes.len() < BUFFER_BYTES {
            return Ok(());
        }
        self.write_bytes()
    }

    /// Writes the bytes that are still buffered.
    pub fn finish(mut self) -> Result<()> {
        self.write_bytes()
    }

    fn write_bytes(&mut self) -> Result<()> {
        let written = self.file.write_all(&self.bytes).map_err(|e| Error::io(&self.path, e));
        self.bytes.clear();
        written
    }
}

/// Records the logits of a run. On the first failure to write it prints a line and stops recording; the run goes on.
pub struct Recorder {
    writer: Option<LogitsWriter>,
}

impl Recorder {
    /// Creates the file at `path`. Fails as [`LogitsWriter::create`] does: whoever asks for logits is told before the
    /// run that there would be none.
    pub fn create(path: &Path, vocab: usize) -> Result<Self> {
        let writer = LogitsWriter::create(path, vocab)?;
        Ok(Self { writer: Some(writer) })
    }

    /// Adds every row of logits in a step's output. `request` gives the request of a slot.
    pub fn step(&mut self, plan: &StepPlan, output: &StepOutput, request: impl Fn(usize) -> Option<usize>) {
        let Some(writer) = &mut self.writer else { return };
        let rows = plan.logits.iter().zip(output.logits.chunks_exact(writer.vocab));
        let written = rows.into_iter().try_for_each(|(row, logits)| {
            let Some(request) = request(row.slot) else {
                return Ok(());
            };
            let key = RecordKey {
                request: request as u32,
                position: row.position as u32,
            };
            // With whole rows requested the host samples, so the plan holds every token itself, no slot of the device.
            let token = plan.tokens[row.row].cast_unsigned();
            writer.write(key, token, logits)
        });
        if let Err(error) = written {
            stopped(error);
            self.writer = None;
        }
    }

    /// Writes what is still buffered.
    pub fn finish(self) {
        if let Some(Err(error)) = self.writer.map(LogitsWriter::finish) {
            stopped(error);
        }
    }
}

fn stopped(error: Error) {
    report::error(format_args!("logits are not recorded: {error}"));
}

/// Reads a file of recorded logits: the records' keys when it is opened, logits on demand.
pub struct LogitsReader {
    path: PathBuf,
    file: BufReader<File>,
    vocab: usize,
    records: Vec<(RecordKey, u32)>,
    bytes: Vec<u8>,
}

impl LogitsReader {
    /// Opens the file, checks its header and length, and reads the keys of all records.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |e| Error::io(path, e);
        let mut file = BufReader::with_capacity(1 << 16, File::open(path).map_err(io)?);
        let file_bytes = file.get_ref().metadata().map_err(io)?.len();
        let mut header = [0; HEADER_BYTES as usize];
        if file_bytes < HEADER_BYTES {
            return Err(length(path, HEADER_BYTES, file_bytes));
        }
        file.read_exact(&mut header).map_err(io)?;
        let vocab = word(&header, 2);
        if !header.starts_with(MAGIC) || vocab == 0 || vocab > MAX_VOCAB {
            let error = Error::format(path.display().to_string(), "its header is not that of logits");
            return Err(file_kind::explain(path, error, GivenAs::Logits));
        }
        let mut reader = Self {
            path: path.to_owned(),
            file,
            vocab: vocab as usize,
            records: Vec::new(),
            bytes: vec![0; 4 * vocab as usize],
        };
        reader.read_keys(file_bytes - HEADER_BYTES)?;
        Ok(reader)
    }

    /// Number of tokens in the vocabulary.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Each record's key and the token at its position, in the order of the file.
    pub fn records(&self) -> &[(RecordKey, u32)] {
        &self.records
    }

    /// Reads the logits of record `index` into `logits`.
    pub fn read(&mut self, index: usize, logits: &mut Vec<f32>) -> Result<()> {
        let start = HEADER_BYTES + index as u64 * self.record_bytes() + RECORD_HEADER_BYTES as u64;
        self.file
            .seek(SeekFrom::Start(start))
            .map_err(|e| Error::io(&self.path, e))?;
        self.file
            .read_exact(&mut self.bytes)
            .map_err(|e| Error::io(&self.path, e))?;
        logits.clear();
        logits.extend(self.bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)));
        Ok(())
    }

    fn record_bytes(&self) -> u64 {
        (RECORD_HEADER_BYTES + 4 * self.vocab) as u64
    }

    fn read_keys(&mut self, records_bytes: u64) -> Result<()> {
        let record_bytes = self.record_bytes();
        if !records_bytes.is_multiple_of(record_bytes) {
            let expected = HEADER_BYTES + records_bytes.next_multiple_of(record_bytes);
            return Err(length(&self.path, expected, HEADER_BYTES + records_bytes));
        }
        let mut header = [0; RECORD_HEADER_BYTES];
        for _ in 0..records_bytes / record_bytes {
            self.file
                .read_exact(&mut header)
                .map_err(|e| Error::io(&self.path, e))?;
            let key = RecordKey {
                request: word(&header, 0),
                position: word(&header, 1),
            };
            self.records.push((key, word(&header, 2)));
            self.file
                .seek_relative(4 * self.vocab as i64)
                .map_err(|e| Error::io(&self.path, e))?;
        }
        Ok(())
    }
}

/// The uint32 at `index` of a header.
fn word(header: &[u8; 16], index: usize) -> u32 {
    u32::from_le_bytes(header.as_chunks().0[index])
}

fn length(path: &Path, expected_bytes: u64, actual_bytes: u64) -> Error {
    Error::Length {
        what: path.display().to_string(),
        expected_bytes,
        actual_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(request: u32, position: u32) -> RecordKey {
        RecordKey { request, position }
    }

    #[test]
    fn records_come_back_bit_for_bit() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut writer = LogitsWriter::create(file.path(), 3).unwrap();
        writer.write(key(1, 0), 7, &[1.5, f32::NEG_INFINITY, -0.0]).unwrap();
        writer.write(key(0, 2), 8, &[f32::MIN_POSITIVE, 2.0, 3.0]).unwrap();
        writer.finish().unwrap();

        let mut reader = LogitsReader::open(file.path()).unwrap();
        assert_eq!(reader.vocab(), 3);
        assert_eq!(reader.records(), [(key(1, 0), 7), (key(0, 2), 8)]);
        let mut logits = Vec::new();
        reader.read(1, &mut logits).unwrap();
        assert_eq!(logits, [f32::MIN_POSITIVE, 2.0, 3.0]);
        reader.read(0, &mut logits).unwrap();
        assert_eq!(
            logits.iter().map(|l| l.to_bits()).collect::<Vec<_>>(),
            [0x3fc0_0000, 0xff80_0000, 0x8000_0000]
        );
    }

    #[test]
    fn a_file_cut_short_or_of_another_kind_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut writer = LogitsWriter::create(file.path(), 3).unwrap();
        writer.write(key(0, 0), 7, &[1.0, 2.0, 3.0]).unwrap();
        writer.finish().unwrap();
        let whole = std::fs::read(file.path()).unwrap();
        for cut in [0, 8, 15, 17, whole.len() - 1] {
            std::fs::write(file.path(), &whole[..cut]).unwrap();
            assert!(
                matches!(LogitsReader::open(file.path()), Err(Error::Length { .. })),
                "{cut}"
            );
        }
        let mut wrong = whole.clone();
        wrong[0] ^= 1;
        std::fs::write(file.path(), wrong).unwrap();
        assert!(matches!(LogitsReader::open(file.path()), Err(Error::Format { .. })));
    }
}
