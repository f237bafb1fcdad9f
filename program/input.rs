//! The lines of a file of requests.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use getp::descriptors::open_file;
use getp::harmony::Json;
use serde::Deserialize;

use crate::output::Done;

/// A line has fewer bytes, its end included.
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
    format!("the line has {MOST_BYTES} bytes or more")
}

/// The lines of a file that are not blank.
pub struct Lines {
    reader: BufReader<File>,
    number: usize,
    most: u64,
}

impl Lines {
    pub fn open(path: &Path) -> Result<Self> {
        let file = open_file(path).map_err(|why| {
            let hint = match why.kind() {
                ErrorKind::InvalidInput => "; write the requests to one, since it is read twice",
                _ => "",
            };
            anyhow!("{}: {why}{hint}", path.display())
        })?;
        Ok(Self {
            reader: BufReader::with_capacity(1 << 20, file),
            number: 0,
            most: MOST_BYTES,
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
            while text.len() as u64 == self.most && rest.last().or(text.last()) != Some(&b'\n') {
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
        self.reader.by_ref().take(self.most).read_until(b'\n', text)
    }
}

/// What is known of a file before its requests are read.
#[derive(Debug, Default)]
pub struct Survey {
    /// Lines that are not blank.
    pub lines: usize,
    /// Lines with a custom_id that one before them has, and the first such line.
    pub again: HashMap<usize, usize>,
    /// Whether a line may ask for answers of a given form.
    pub has_forms: bool,
}

/// Whether a line's answer may be asked to have a form.
fn has_form(line: &Json) -> bool {
    let body = line.given("body");
    ["response_format", "structured_outputs"]
        .iter()
        .any(|field| body.and_then(|body| body.given(field)).is_some())
}

/// What tells a request from others. It is read here as where the request is answered, so that a line that is none has
/// the same there and when the run is gone on with. A text elsewhere in the line may have half of a character that
/// takes two escapes, which is no text but no reason to hide whose line it is. `json`: the line, if it can be read.
pub fn custom_id(line: &[u8], json: Option<&Json>) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        custom_id: String,
    }
    match json {
        Some(json) => json.given("custom_id")?.text().map(str::to_owned),
        None => Some(serde_json::from_slice::<Named>(line).ok()?.custom_id),
    }
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
        let json: Option<Json> = serde_json::from_slice(&text).ok();
        survey.has_forms |= json.as_ref().is_some_and(has_form);
        let id = custom_id(&text, json.as_ref());
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::process::Command;

    fn lines(text: &[u8], most: u64) -> Vec<(usize, Option<String>)> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("requests.jsonl");
        fs::write(&path, text).unwrap();
        let mut lines = Lines::open(&path).unwrap();
        lines.most = most;
        let next = || lines.next().unwrap();
        let text = |text: Vec<u8>| String::from_utf8(text).unwrap();
        std::iter::from_fn(next)
            .map(|line| (line.number, line.text.map(text)))
            .collect()
    }

    #[test]
    fn blank_lines_are_counted_and_left_out() {
        let some = |number, text: &str| (number, Some(text.to_owned()));
        assert_eq!(lines(b"", 9), []);
        assert_eq!(lines(b"\n \t\r\n", 9), []);
        assert_eq!(lines(b"\xEF\xBB\xBFa\r\n\nb", 9), [some(1, "a\r\n"), some(3, "b")]);
    }

    #[test]
    fn a_line_that_is_too_long_ends_nothing() {
        let some = |number, text: &str| (number, Some(text.to_owned()));
        for text in ["abcd\n", "abcdefg\n", "abcdefgh\n", "abcdefghijkl\n"] {
            let expected = [some(1, "abc\n"), (2, None), some(3, "z")];
            assert_eq!(lines(format!("abc\n{text}z").as_bytes(), 4), expected, "{text}");
        }
        assert_eq!(lines(b"abcdef", 4), [(1, None)]);
        assert_eq!(lines(b"abcd", 4), [(1, None)]);
    }

    #[test]
    fn what_is_no_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for path in [Path::new("/dev/null"), &pipe] {
            let error = Lines::open(path).err().unwrap().to_string();
            assert!(error.contains("it is no file; write the requests to one"), "{error}");
        }
        let error = Lines::open(&dir.path().join("none")).err().unwrap().to_string();
        assert!(
            error.contains("No such file") && !error.contains("write the requests"),
            "{error}"
        );
    }
}
