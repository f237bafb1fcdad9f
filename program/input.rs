//! The lines of a file of requests.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use crate::output::Done;

/// The most bytes of a line.
const MOST_BYTES: u64 = 1 << 28;

/// A line that is not blank.
pub struct Line {
    /// Its number in the file, from 1 on.
    pub number: usize,
    /// `None`: it is too long to be read.
    pub text: Option<Vec<u8>>,
}

/// What is said of a line that is too long.
pub fn too_long() -> String {
    format!("the line has more than {MOST_BYTES} bytes")
}

/// The lines of a file that are not blank.
pub struct Lines {
    reader: BufReader<File>,
    number: usize,
}

impl Lines {
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        let kind = file.metadata().with_context(|| path.display().to_string())?;
        if !kind.is_file() {
            bail!(
                "{}: it is no file; write the requests to one, since it is read twice",
                path.display()
            );
        }
        Ok(Self {
            reader: BufReader::with_capacity(1 << 20, file),
            number: 0,
        })
    }

    /// The next line; `None` at the end of the file.
    pub fn next(&mut self) -> std::io::Result<Option<Line>> {
        loop {
            let mut text = Vec::new();
            if self.piece(&mut text)? == 0 {
                return Ok(None);
            }
            self.number += 1;
            let mut is_whole = true;
            let mut rest = Vec::new();
            while text.len() as u64 == MOST_BYTES && rest.last().or(text.last()) != Some(&b'\n') {
                is_whole = false;
                rest.clear();
                if self.piece(&mut rest)? == 0 {
                    break;
                }
            }
            if self.number == 1 && text.starts_with(b"\xEF\xBB\xBF") {
                text.drain(..3);
            }
            if !text.trim_ascii().is_empty() {
                return Ok(Some(Line {
                    number: self.number,
                    text: is_whole.then_some(text),
                }));
            }
        }
    }

    fn piece(&mut self, text: &mut Vec<u8>) -> std::io::Result<usize> {
        self.reader.by_ref().take(MOST_BYTES).read_until(b'\n', text)
    }
}

/// What is known of a file before its requests are read.
#[derive(Debug, Default)]
pub struct Survey {
    /// Lines that are not blank.
    pub lines: usize,
    /// Lines with a custom_id that one before them has, and the first such line.
    pub again: HashMap<usize, usize>,
}

/// The part of a request that tells it from others.
#[derive(Deserialize)]
struct Known {
    custom_id: Option<Value>,
}

/// Counts the lines, finds those whose custom_id is not their own, and makes sure that the answers that there are
/// belong to them.
pub fn survey(path: &Path, done: &Done, answers: &Path) -> Result<Survey> {
    let mut lines = Lines::open(path)?;
    let mut survey = Survey::default();
    let mut first = HashMap::new();
    let mut answered = 0;
    while let Some(line) = lines.next().with_context(|| path.display().to_string())? {
        survey.lines += 1;
        let text = line.text.unwrap_or_default();
        let known = serde_json::from_slice::<Known>(&text).ok();
        let id = match known.and_then(|known| known.custom_id) {
            Some(Value::String(id)) => Some(id),
            _ => None,
        };
        if let Some(of) = done.get(&line.number) {
            answered += 1;
            if *of != id {
                let shown = |id: &Option<String>| id.as_ref().map_or("none".into(), |id| format!("{id:?}"));
                bail!(
                    "{} has an answer to line {} with the custom_id {}, and in {} that line's is {}; go on with the \
                     requests that it was made of, or name another file",
                    answers.display(),
                    line.number,
                    shown(of),
                    path.display(),
                    shown(&id)
                );
            }
        }
        if let Some(id) = id
            && let Some(before) = first.get(&id).copied().or_else(|| {
                first.insert(id, line.number);
                None
            })
        {
            survey.again.insert(line.number, before);
        }
    }
    if answered < done.len() {
        bail!(
            "{} has answers to {} lines that {} does not have; go on with the requests that it was made of, or name \
             another file",
            answers.display(),
            done.len() - answered,
            path.display()
        );
    }
    Ok(survey)
}
