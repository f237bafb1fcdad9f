//! Where answers go: into the program's rows, and, decoded, to stdout.

use crate::options::{Options, Print};
use crate::report::{FewLines, Printer, Progress};
use crate::requests::Requests;
use crate::scheduler::{END_TOKENS, Finished};
use crate::tokenizer::Tokenizer;
use std::fmt::Display;

/// Takes each request's answer, or the reason it has none.
pub struct Answers<'a, 'r> {
    tokenizer: &'a Tokenizer,
    requests: &'a mut Requests<'r>,
    print: Print,
    printer: Option<Printer>,
    progress: Progress,
    refused: FewLines,
    cut: FewLines,
    tokens: u64,
}

impl<'a, 'r> Answers<'a, 'r> {
    /// Answers of `requests`, shown as `options` ask.
    pub fn new(tokenizer: &'a Tokenizer, requests: &'a mut Requests<'r>, options: &Options) -> Self {
        let progress = Progress::new(options.progress, requests.len());
        let wanted = options.print != Print::Nothing;
        Self {
            tokenizer,
            print: options.print,
            printer: wanted.then(|| Printer::on_stdout(&progress)),
            requests,
            progress,
            refused: FewLines::new("more requests get no answer"),
            cut: FewLines::new("more prompts are cut"),
            tokens: 0,
        }
    }

    /// Positions each request may be fed.
    pub fn steps(&self) -> usize {
        self.requests.steps()
    }

    /// Leaves a request's row empty and says why; `why` names it.
    pub fn refuse(&mut self, request: usize, why: &dyn Display) {
        self.progress.aside(|| self.refused.line(why));
        self.hand_over(request, || None);
        self.progress.finished(self.tokens);
    }

    /// Says that a request is answered from the first `tokens` of its prompt.
    pub fn say_cut(&mut self, request: usize, tokens: usize) {
        let text = format_args!(
            "request {request}: its prompt has more than {tokens} tokens, the model's initial_context_length, and is cut \
             there, as the program does it; GETP_STRICT=1 refuses it"
        );
        self.progress.aside(|| self.cut.line(text));
    }

    /// Stores an answer and hands its text to the printer.
    pub fn store(&mut self, answer: Finished) {
        self.requests.store(answer.request, &answer.tokens);
        self.tokens += answer.tokens.len() as u64;
        self.hand_over(answer.request, || Some(self.text(&answer)));
        self.progress.finished(self.tokens);
    }

    /// Waits for the printer and counts the tokens stored.
    pub fn finish(self) -> u64 {
        self.cut.finish();
        self.refused.finish();
        self.tokens
    }

    fn hand_over(&self, request: usize, text: impl FnOnce() -> Option<Vec<u8>>) {
        if let Some(printer) = &self.printer {
            printer.print(request, text());
        }
    }

    /// What is printed of a request: its prompt or its number, and its answer without the end token, which is no text.
    fn text(&self, answer: &Finished) -> Vec<u8> {
        let mut text = match self.print {
            Print::Nothing => return Vec::new(),
            Print::Text => self.requests.prompt(answer.request).to_vec(),
            Print::Answer => format!("[{}] ", answer.request).into_bytes(),
        };
        let pieces = answer.tokens.iter().filter(|token| !END_TOKENS.contains(token));
        text.extend(pieces.flat_map(|&token| self.tokenizer.decode_piece(token)));
        text
    }
}
