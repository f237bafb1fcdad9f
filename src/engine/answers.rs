//! Where answers go: into the program's rows, and, decoded, to stdout.

use super::Prompt;
use crate::cluster::launcher;
use crate::error::{Error, Result};
use crate::memory::{self, Purpose};
use crate::options::{Options, Print};
use crate::report::{self, FewLines, Printer, Progress, Severity};
use crate::request::{Answer, EndTokens};
use crate::requests::Requests;
use crate::tokenizer::Tokenizer;
use std::fmt::Display;

/// What the user should know of a request before it is queued.
pub enum Remark {
    /// It is answered from this many tokens of its prompt.
    Cut(usize),
    /// It gets no answer.
    Refused(Error),
}

/// What was stored.
#[derive(Default)]
pub struct StoredAnswers {
    /// Tokens of all answers.
    pub tokens: u64,
    /// The state of request 0's random number generator after its answer, if it has one.
    pub first_state: Option<u64>,
}

/// Takes each request's answer, or the reason it has none.
pub struct Answers<'a, 'r> {
    tokenizer: &'a Tokenizer,
    requests: &'a mut Requests<'r>,
    print: Print,
    printer: Option<Printer>,
    /// See [`fed_otherwise`].
    instead: Vec<(usize, Vec<u8>)>,
    progress: Progress,
    refused: FewLines,
    cut: FewLines,
    tokens: u64,
    /// The state of request 0's random number generator after its answer, once that is there.
    first_state: Option<u64>,
}

impl<'a, 'r> Answers<'a, 'r> {
    /// Answers of `requests`, whose tokens are `prompts` and which have up to `max_positions` positions, printed as
    /// `options` say.
    pub fn new(
        tokenizer: &'a Tokenizer,
        requests: &'a mut Requests<'r>,
        prompts: &[Result<Prompt>],
        max_positions: usize,
        options: &Options,
    ) -> Result<Self> {
        let progress = Progress::new(options.progress, requests.len());
        let wanted = options.print != Print::Nothing;
        let is_launched = launcher::is_launched(|name| std::env::var_os(name).is_some());
        let printer = || Printer::on_stdout(&progress, requests.len(), is_launched);
        Ok(Self {
            instead: match options.print {
                Print::Text => fed_otherwise(tokenizer, prompts, max_positions)?,
                Print::Answer | Print::Nothing => Vec::new(),
            },
            tokenizer,
            print: options.print,
            printer: wanted.then(printer).transpose()?,
            requests,
            progress,
            refused: FewLines::new(Severity::Error, "more requests get no answer"),
            cut: FewLines::new(Severity::Warning, "more prompts are cut"),
            tokens: 0,
            first_state: None,
        })
    }

    /// Prints a remark on a request, whose row stays empty if it is refused.
    pub fn say(&mut self, request: usize, remark: Remark) {
        match remark {
            Remark::Cut(tokens) => self.say_cut(request, tokens),
            Remark::Refused(why) => self.refuse(request, &why),
        }
    }

    /// Leaves a request's row empty and prints `why`, which names the request.
    pub fn refuse(&mut self, request: usize, why: &dyn Display) {
        self.progress.aside(|| self.refused.line(why));
        self.hand_over(request, &[]);
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
    pub fn store(&mut self, answer: Answer) {
        if answer.number == 0 {
            self.first_state = Some(answer.rng_state);
        }
        self.requests.store(answer.number, &answer.tokens);
        self.tokens += answer.tokens.len() as u64;
        self.hand_over(answer.number, &answer.tokens);
        self.progress.finished(self.tokens);
    }

    /// Waits for the printer; gives what was stored.
    pub fn finish(self) -> StoredAnswers {
        self.cut.finish();
        self.refused.finish();
        StoredAnswers {
            tokens: self.tokens,
            first_state: self.first_state,
        }
    }

    /// Text for which there is no memory is not printed; the answer itself is kept.
    fn hand_over(&self, request: usize, answer: &[u32]) {
        if let Some(printer) = &self.printer {
            let text = self.text(request, answer).map(Some).unwrap_or_else(|why| {
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
        let answer = answer.iter().filter(|token| !EndTokens::RELEASED.contains(token));
        match self.print {
            Print::Nothing => {}
            Print::Text => {
                memory::append(&mut text, self.prompt(request), Purpose::Print)?;
                for &token in answer {
                    append_as_c_string(&mut text, self.tokenizer.decode_piece(token))?;
                }
            }
            Print::Answer => {
                text.extend_from_slice(format!("[{request}] ").as_bytes());
                for &token in answer {
                    memory::append(&mut text, self.tokenizer.decode_piece(token), Purpose::Print)?;
                }
            }
        }
        memory::reserve(&mut text, 1, Purpose::Print)?;
        Ok(text)
    }

    /// A request's prompt as the program prints it.
    fn prompt(&self, request: usize) -> &[u8] {
        match self.instead.binary_search_by_key(&request, |(request, _)| *request) {
            Ok(at) => &self.instead[at].1,
            Err(_) => self.requests.prompt(request),
        }
    }
}

/// The program prints the tokens that it feeds, and the one that it would have fed next. What that is where it is not
/// the whole prompt, in the order of requests: of a prompt that is cut or has more tokens than positions, and of bytes
/// that the vocabulary lacks.
fn fed_otherwise(
    tokenizer: &Tokenizer,
    prompts: &[Result<Prompt>],
    max_positions: usize,
) -> Result<Vec<(usize, Vec<u8>)>> {
    let mut otherwise = Vec::new();
    let is_whole = tokenizer.has_all_bytes();
    for (request, prompt) in prompts.iter().enumerate() {
        let Ok(prompt) = prompt else { continue };
        let fed = &prompt.tokens[..prompt.tokens.len().min(max_positions + 1)];
        if is_whole && !prompt.is_cut && fed.len() == prompt.tokens.len() {
            continue;
        }
        let mut text = Vec::new();
        for &token in fed {
            append_as_c_string(&mut text, tokenizer.decode_piece(token))?;
        }
        memory::push(&mut otherwise, (request, text), Purpose::Print)?;
    }
    Ok(otherwise)
}

/// Appends `piece` up to its first NUL, which is what the program prints of it.
fn append_as_c_string(text: &mut Vec<u8>, piece: &[u8]) -> Result<()> {
    let end = piece.iter().position(|&byte| byte == 0).unwrap_or(piece.len());
    memory::append(text, &piece[..end], Purpose::Print)
}
