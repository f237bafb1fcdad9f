//! The file of answers: whole lines, each written at once, and what such a file has from a run before.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What the `id` of an answer begins with; the number of its request's line follows.
const ID: &str = "batch_req_";

/// What the line of an answer begins with.
const BEGINNING: &str = "{\"id\":\"batch_req_";

/// The `id` of the answer to a line.
pub fn id(line: usize) -> String {
    format!("{ID}{line}")
}

/// The lines that have an answer, and the custom_id that it gives.
pub type Done = HashMap<usize, Option<String>>;

/// Whether both are names of one file that is there.
pub fn is_same(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| path.metadata().map(|file| (file.dev(), file.ino()));
    matches!((place(one), place(other)), (Ok(one), Ok(other)) if one == other)
}

/// A file of answers. Only one process writes to it.
pub struct Output {
    file: File,
    path: PathBuf,
    is_file: bool,
    /// The length of its whole lines.
    length: u64,
}

/// What is read of an answer that is there.
#[derive(Deserialize)]
struct Answered {
    id: String,
    custom_id: Value,
}

impl Output {
    /// Opens the file. With `resume` it may have answers; [`Self::begin`] cuts off what a line that has no end has.
    pub fn open(path: &Path, resume: bool) -> Result<(Self, Done)> {
        let name = || path.display().to_string();
        let mut options = OpenOptions::new();
        // What is no file, such as a pipe, can only be written to.
        let is_file = !path.exists() || path.is_file();
        options.create(true).truncate(false).write(true).read(is_file);
        let file = options.open(path).with_context(name)?;
        let mut output = Self {
            file,
            path: path.to_owned(),
            is_file,
            length: 0,
        };
        if !is_file {
            if resume {
                bail!(
                    "{}: it is no file, and has no answers to go on from; leave out --resume",
                    path.display()
                );
            }
            return Ok((output, Done::new()));
        }
        match output.file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!("{}: another getp writes to it", path.display()),
            // Not every file system has locks.
            Err(TryLockError::Error(_)) => {}
        }
        if !resume {
            if output.file.metadata().with_context(name)?.len() > 0 {
                bail!(
                    "{}: it is not empty; go on with --resume, or name another file",
                    path.display()
                );
            }
            return Ok((output, Done::new()));
        }
        let done = output.read()?;
        Ok((output, done))
    }

    /// Goes to where answers are written, once it is known that the file is what it is taken for.
    pub fn begin(&mut self) -> Result<()> {
        if self.is_file {
            let name = || self.path.display().to_string();
            self.file.set_len(self.length).with_context(name)?;
            self.file.seek(SeekFrom::Start(self.length)).with_context(name)?;
        }
        Ok(())
    }

    /// Reads the whole lines.
    fn read(&mut self) -> Result<Done> {
        let mut done = Done::new();
        let mut reader = BufReader::with_capacity(1 << 20, &self.file);
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            let length = reader
                .read_until(b'\n', &mut line)
                .with_context(|| self.path.display().to_string())?;
            if !line.ends_with(b"\n") {
                // A crash leaves the beginning of an answer, and nothing else is cut off.
                let begins = BEGINNING.as_bytes();
                let common = line.len().min(begins.len());
                if line[..common] != begins[..common] {
                    bail!(
                        "{}: line {number} has no end, and is no beginning of an answer of getp's; name another file",
                        self.path.display()
                    );
                }
                break;
            }
            let answered: Option<Answered> = serde_json::from_slice(&line).ok();
            let of = answered
                .as_ref()
                .and_then(|answered| answered.id.strip_prefix(ID)?.parse::<usize>().ok());
            let (Some(answered), Some(of)) = (answered, of) else {
                bail!(
                    "{}: line {number} is no answer of getp's; remove it, or name another file",
                    self.path.display()
                );
            };
            let custom_id = match answered.custom_id {
                Value::String(id) => Some(id),
                _ => None,
            };
            if done.insert(of, custom_id).is_some() {
                bail!(
                    "{}: line {number} is another answer to line {of} of the requests; remove one of them",
                    self.path.display()
                );
            }
            self.length += length as u64;
        }
        Ok(done)
    }

    /// Writes a line. What there is room for no whole line of is taken back.
    pub fn write(&mut self, row: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(row)?;
        line.push(b'\n');
        let written = self.file.write_all(&line);
        if written.is_err() && self.is_file {
            // The failure that is told is the first.
            let _ = self.file.set_len(self.length);
            let _ = self.file.seek(SeekFrom::Start(self.length));
        }
        written.with_context(|| self.path.display().to_string())?;
        self.length += line.len() as u64;
        Ok(())
    }

    /// Has the system write all to the disk.
    pub fn finish(&self) -> Result<()> {
        if self.is_file {
            self.file.sync_data().with_context(|| self.path.display().to_string())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;

    fn error(path: &Path, resume: bool) -> String {
        format!("{:#}", Output::open(path, resume).err().expect("it is refused"))
    }

    #[test]
    fn lines_are_kept_and_half_ones_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("answers.jsonl");
        let (mut output, done) = Output::open(&path, true).unwrap();
        assert!(done.is_empty());
        output.write(&json!({"id": id(3), "custom_id": "c"})).unwrap();
        output.write(&json!({"id": id(1), "custom_id": null})).unwrap();
        assert!(error(&path, true).contains("another getp writes to it"));
        drop(output);
        assert!(error(&path, false).contains("go on with --resume"));
        let whole = fs::read(&path).unwrap();
        for half in ["{", "{\"id\":\"batch_req_2\",\"custom_id\":\"b\"}"] {
            let text = [&whole, half.as_bytes()].concat();
            fs::write(&path, &text).unwrap();
            let (mut output, done) = Output::open(&path, true).unwrap();
            assert_eq!(done, Done::from([(3, Some("c".into())), (1, None)]));
            assert_eq!(fs::read(&path).unwrap(), text);
            output.begin().unwrap();
            assert_eq!(fs::read(&path).unwrap(), whole);
        }
        let (mut output, _) = Output::open(&path, true).unwrap();
        output.begin().unwrap();
        output.write(&json!({"id": id(2), "custom_id": "b"})).unwrap();
        drop(output);
        assert_eq!(Output::open(&path, true).unwrap().1.len(), 3);
    }

    #[test]
    fn what_is_no_answer_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notes.txt");
        for (text, words) in [
            ("a note\n", "line 1 is no answer"),
            ("a note", "is no beginning of an answer"),
            (
                "{\"id\": \"batch_req_x\", \"custom_id\": \"a\"}\n",
                "line 1 is no answer",
            ),
            (
                "{\"id\": \"batch_req_1\", \"custom_id\": \"a\"}\n{\"id\": \"batch_req_1\", \"custom_id\": \"a\"}\n",
                "line 2 is another answer to line 1",
            ),
        ] {
            fs::write(&path, text).unwrap();
            assert!(error(&path, true).contains(words), "{text}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
    }
}
