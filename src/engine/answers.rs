//! Where answers go: into the program's rows, and, decoded, to stdout.

use crate::options::Options;
use crate::report::{Printer, Progress, RequestLines};
use crate::requests::Requests;
use crate::scheduler::{END_TOKENS, Finished};
use crate::tokenizer::Tokenizer;
use std::fmt::Display;

/// Takes each request's answer, or the reason it has none.
pub struct Answers<'a, 'r> {
    tokenizer: &'a Tokenizer,
    requests: &'a mut Requests<'r>,
    printer: Option<Printer>,
    progress: Progress,
    refused: RequestLines,
    tokens: u64,
}

impl<'a, 'r> Answers<'a, 'r> {
    /// Answers of `requests`, shown as `options` ask.
    pub fn new(tokenizer: &'a Tokenizer, requests: &'a mut Requests<'r>, options: &Options) -> Self {
        let progress = Progress::new(options.progress, requests.len());
        Self {
            tokenizer,
            printer: options.print.then(|| Printer::start(std::io::stdout(), &progress)),
            requests,
            progress,
            refused: RequestLines::default(),
            tokens: 0,
        }
    }

    /// Positions each request may be fed.
    pub fn steps(&self) -> usize {
        self.requests.steps()
    }

    /// Leaves a request's row empty and says why; `why` names it.
    pub fn refuse(&mut self, request: usize, why: &dyn Display) {
        self.progress.aside(|| self.refused.refused(why));
        self.print(request, || None);
        self.progress.finished(self.tokens);
    }

    /// Stores an answer and hands its text to the printer.
    pub fn store(&mut self, answer: Finished) {
        self.requests.store(answer.request, &answer.tokens);
        self.tokens += answer.tokens.len() as u64;
        self.print(answer.request, || Some(text(self.tokenizer, &answer.tokens)));
        self.progress.finished(self.tokens);
    }

    /// Waits for the printer and counts the tokens stored.
    pub fn finish(self) -> u64 {
        self.refused.finish();
        self.tokens
    }

    fn print(&self, request: usize, text: impl FnOnce() -> Option<Vec<u8>>) {
        if let Some(printer) = &self.printer {
            printer.answer(request, text());
        }
    }
}

/// An answer's bytes, without the end token, which is no text.
fn text(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<u8> {
    let pieces = tokens.iter().filter(|token| !END_TOKENS.contains(token));
    pieces
        .flat_map(|&token| tokenizer.decode_piece(token))
        .copied()
        .collect()
}
