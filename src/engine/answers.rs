//! Where answers go: into the program's rows, and, decoded, to stdout.

use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::options::{Options, Print};
use crate::report::{self, FewLines, Kind, Printer, Progress};
use crate::requests::Requests;
use crate::scheduler::{END_TOKENS, Finished};
use crate::tokenizer::Tokenizer;
use std::fmt::Display;

/// What the user should know of a request before it is queued.
pub enum Remark {
    /// It is answered from this many tokens of its prompt.
    Cut(usize),
    /// It gets no answer.
    Refused(Error),
    /// The same: its prompt takes up all steps. The program prints the prompt.
    Full(Error),
}

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
    /// Answers of `requests`, printed as `options` say.
    pub fn new(tokenizer: &'a Tokenizer, requests: &'a mut Requests<'r>, options: &Options) -> Result<Self> {
        let progress = Progress::new(options.progress, requests.len());
        let wanted = options.print != Print::Nothing;
        let printer = || Printer::on_stdout(&progress, requests.len());
        Ok(Self {
            tokenizer,
            print: options.print,
            printer: wanted.then(printer).transpose()?,
            requests,
            progress,
            refused: FewLines::new(Kind::Error, "more requests get no answer"),
            cut: FewLines::new(Kind::Warning, "more prompts are cut"),
            tokens: 0,
        })
    }

    /// Prints a remark on a request, whose row stays empty if it is refused.
    pub fn say(&mut self, request: usize, remark: Remark) {
        match remark {
            Remark::Cut(tokens) => self.say_cut(request, tokens),
            Remark::Refused(why) => self.refuse(request, &why),
            Remark::Full(why) => self.leave_empty(request, &why, true),
        }
    }

    /// Leaves a request's row empty and prints `why`, which names the request.
    pub fn refuse(&mut self, request: usize, why: &dyn Display) {
        self.leave_empty(request, why, false);
    }

    fn leave_empty(&mut self, request: usize, why: &dyn Display, prints: bool) {
        self.progress.aside(|| self.refused.line(why));
        let text = || prints.then(|| self.text(request, &[])).transpose();
        self.hand_over(request, text);
        self.progress.finished(self.tokens);
    }

    /// Prints that a request is answered from the first `tokens` tokens of its prompt.
    fn say_cut(&mut self, request: usize, tokens: usize) {
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
        self.hand_over(answer.request, || self.text(answer.request, &answer.tokens).map(Some));
        self.progress.finished(self.tokens);
    }

    /// Waits for the printer and counts the tokens stored.
    pub fn finish(self) -> u64 {
        self.cut.finish();
        self.refused.finish();
        self.tokens
    }

    /// Text for which there is no memory is not printed; the answer itself is kept.
    fn hand_over(&self, request: usize, text: impl FnOnce() -> Result<Option<Vec<u8>>>) {
        if let Some(printer) = &self.printer {
            let text = text().unwrap_or_else(|why| {
                let not_printed = || report::error(format_args!("request {request} is not printed: {why}"));
                self.progress.aside(not_printed);
                None
            });
            printer.print(request, text);
        }
    }

    /// What is printed of a request: its prompt or its number, and its answer without the end token. There is room for
    /// a newline.
    fn text(&self, request: usize, answer: &[u32]) -> Result<Vec<u8>> {
        let mut text = Vec::new();
        match self.print {
            Print::Nothing => {}
            Print::Text => memory::append(&mut text, self.requests.prompt(request), Purpose::Print)?,
            Print::Answer => text.extend_from_slice(format!("[{request}] ").as_bytes()),
        }
        for &token in answer.iter().filter(|token| !END_TOKENS.contains(token)) {
            memory::append(&mut text, self.tokenizer.decode_piece(token), Purpose::Print)?;
        }
        memory::reserve(&mut text, 1, Purpose::Print)?;
        Ok(text)
    }
}
