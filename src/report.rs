//! What the user sees: lines on stderr, answers on stdout, a progress bar.
//!
//! Nothing here fails or panics: the program's stderr may be closed and its stdout a full disk, and neither is a
//! reason to lose answers.

mod escape;
mod stream;

pub use escape::escaped;
pub use stream::{Stream, quietly};

use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::threads;
use console::Term;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Writes one line on stderr, in one piece, named as ours. What would steer a terminal is shown escaped.
pub fn line(text: impl Display) {
    let line = format!("getp: {}\n", escaped(&text.to_string()));
    let _ = Stream::Stderr.write_all(line.as_bytes());
}

/// Lines of one kind, about single requests or tensors: the first few in full, then only their number, so that a file of
/// a million bad requests does not bury the rest.
pub struct FewLines {
    /// What the lines kept back are, behind their number.
    rest: &'static str,
    said: usize,
    kept_back: usize,
}

impl FewLines {
    /// The most lines written in full.
    pub const MOST: usize = 10;

    /// None so far; `rest` says what those are that are only counted, for example `more requests get no answer`.
    pub fn new(rest: &'static str) -> Self {
        Self {
            rest,
            said: 0,
            kept_back: 0,
        }
    }

    /// Writes one line, or counts it.
    pub fn line(&mut self, text: impl Display) {
        if self.said == Self::MOST {
            self.kept_back += 1;
            return;
        }
        self.said += 1;
        line(text);
    }

    /// Says how many lines were kept back.
    pub fn finish(self) {
        if self.kept_back > 0 {
            line(format_args!("{} {}", self.kept_back, self.rest));
        }
    }
}

/// How often the bar is drawn.
const DRAWS_PER_SECOND: u8 = 20;

/// A bar that counts finished requests and their tokens; nothing if stderr is not a terminal. It vanishes with its
/// last clone.
#[derive(Clone)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar for `requests` requests, if `wanted`.
    pub fn new(wanted: bool, requests: usize) -> Self {
        let visible = wanted && std::io::stderr().is_terminal();
        let target = if visible {
            // As `stderr()` draws, but through our own stream. Nothing is read.
            ProgressDrawTarget::term(
                Term::read_write_pair(std::io::stdin(), Stream::Stderr),
                DRAWS_PER_SECOND,
            )
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(requests as u64), target).with_finish(ProgressFinish::AndClear);
        let template = "{bar:40} {pos}/{len} requests, {elapsed}, {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// Shows one request more, and the tokens so far.
    pub fn finished(&self, tokens: u64) {
        self.bar.inc(1);
        let seconds = self.bar.elapsed().as_secs_f64();
        self.bar.set_message(format!(
            "{tokens} tokens, {:.0} tok/s",
            tokens as f64 / seconds.max(1e-3)
        ));
    }

    /// Does `work` with the bar out of the way.
    pub fn aside<T>(&self, work: impl FnOnce() -> T) -> T {
        self.bar.suspend(work)
    }
}

/// Prints texts in the order of requests from a thread of its own, whatever order they come in, so that a slow
/// terminal does not hold up the steps.
pub struct Printer {
    texts: Arc<Texts>,
    thread: Option<JoinHandle<()>>,
}

/// What the printer's thread is handed.
struct Texts {
    state: Mutex<TextsState>,
    changed: Condvar,
}

struct TextsState {
    /// One a request.
    texts: Vec<Text>,
    /// Nothing more will come.
    complete: bool,
}

enum Text {
    /// Not there yet.
    Missing,
    /// The request's text, or `None` if it has no answer.
    Here(Option<Vec<u8>>),
}

impl Printer {
    /// Starts the thread; it writes the texts of `requests` requests to stdout, and escapes what would steer a terminal if
    /// that is one. Fails if there is no memory to wait for them; a thread that does not start is told in a line.
    pub fn on_stdout(progress: &Progress, requests: usize) -> Result<Self> {
        let is_terminal = std::io::stdout().is_terminal();
        Self::start(Stream::Stdout, is_terminal, progress, requests)
    }

    fn start(
        mut out: impl Write + Send + 'static,
        is_terminal: bool,
        progress: &Progress,
        requests: usize,
    ) -> Result<Self> {
        let texts = memory::collect((0..requests).map(|_| Text::Missing), Purpose::Print)?;
        let texts = Arc::new(Texts {
            state: Mutex::new(TextsState { texts, complete: false }),
            changed: Condvar::new(),
        });
        let theirs = Arc::clone(&texts);
        let progress = progress.clone();
        let mut write = move |text: &[u8]| {
            let shown = is_terminal.then(|| escape::for_terminal(text)).transpose();
            let shown = shown.map_err(std::io::Error::other)?;
            let text = shown.as_deref().unwrap_or(text);
            progress.aside(|| out.write_all(text).and_then(|()| out.flush()))
        };
        let print = move || print_in_order(&theirs, &mut write);
        let thread = threads::spawn("getp-print".into(), print);
        if let Err(error) = &thread {
            line(format_args!("answers are not printed: {error}"));
        }
        Ok(Self {
            texts,
            thread: thread.ok(),
        })
    }

    /// Hands over a request's text, or `None` if it has no answer. Every request is to be handed over once: those
    /// behind a missing one are printed at the end.
    pub fn print(&self, request: usize, text: Option<Vec<u8>>) {
        // Without a thread there is nobody to take it.
        if self.thread.is_some() {
            self.texts.lock().texts[request] = Text::Here(text);
            self.texts.changed.notify_one();
        }
    }
}

impl Drop for Printer {
    /// Waits until all is printed.
    fn drop(&mut self) {
        self.texts.lock().complete = true;
        self.texts.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Texts {
    /// Waits for a request's text; `None` if it has none, or none came.
    fn wait(&self, request: usize) -> Option<Vec<u8>> {
        let missing = |state: &mut TextsState| !state.complete && matches!(state.texts[request], Text::Missing);
        let state = self.changed.wait_while(self.lock(), missing);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut state.texts[request], Text::Missing) {
            Text::Here(text) => text,
            Text::Missing => None,
        }
    }

    /// Locks, also after a panic: every change is whole.
    fn lock(&self) -> MutexGuard<'_, TextsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn print_in_order(texts: &Texts, mut write: impl FnMut(&[u8]) -> std::io::Result<()>) {
    let requests = texts.lock().texts.len();
    for mut text in (0..requests).filter_map(|request| texts.wait(request)) {
        text.push(b'\n');
        if let Err(error) = write(&text) {
            line(format_args!("answers are not printed any more: {error}"));
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn printed(answers: &[(usize, Option<&str>)]) -> Vec<u8> {
        printed_on(false, answers)
    }

    fn printed_on(is_terminal: bool, answers: &[(usize, Option<&str>)]) -> Vec<u8> {
        let sink = Sink::default();
        let requests = 1 + answers.iter().map(|(request, _)| request).max().unwrap();
        let printer = Printer::start(sink.clone(), is_terminal, &Progress::new(false, requests), requests).unwrap();
        for (request, text) in answers {
            printer.print(*request, text.map(|t| t.as_bytes().to_vec()));
        }
        drop(printer);
        let bytes = sink.0.lock().unwrap();
        bytes.clone()
    }

    #[test]
    fn texts_are_printed_in_the_order_of_requests() {
        let text = printed(&[
            (2, Some("c")),
            (0, Some("a\nb")),
            (3, None),
            (4, Some("")),
            (1, Some("\u{e9}")),
        ]);
        assert_eq!(text, "a\nb\n\u{e9}\nc\n\n".as_bytes());
    }

    #[test]
    fn texts_behind_a_missing_one_are_printed_at_the_end() {
        assert_eq!(printed(&[(2, Some("c")), (1, Some("b"))]), b"b\nc\n");
    }

    #[test]
    fn a_terminal_is_not_steered() {
        let answers = [(0, Some("a\n\tb\u{1b}[2Jc"))];
        assert_eq!(printed(&answers), b"a\n\tb\x1b[2Jc\n");
        assert_eq!(printed_on(true, &answers), b"a\n\tb\\u{1b}[2Jc\n");
    }

    #[test]
    fn a_full_disk_stops_the_printing_alone() {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let printer = Printer::start(full, false, &Progress::new(false, 2), 2).unwrap();
        printer.print(0, Some(b"a".to_vec()));
        printer.print(1, Some(b"b".to_vec()));
    }
}
