//! Output for the user: lines on stderr, answers on stdout, a progress bar.
//!
//! Failures to write are ignored or reported in a line: a closed stderr or a full disk is no reason to lose answers.

mod escape;
mod stream;

pub use escape::escaped;
pub use stream::{Stream, quietly};

use crate::error::Result;
use crate::memory::{self, Purpose};
use crate::threads::{self, Thread};
use console::Term;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// How grave a line on stderr is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// What the library does or finds, as expected.
    Information,
    /// What was asked for is done, but not as the user may expect.
    Warning,
    /// Something that was asked for is not done.
    Error,
}

impl Severity {
    /// Writes a line that begins with `getp: `, the word for its severity and the rank, in one write. Control
    /// characters are escaped.
    fn write(self, text: impl Display) {
        let word = match self {
            Self::Information => "",
            Self::Warning => "warning: ",
            Self::Error => "error: ",
        };
        let line = format!("getp: {word}{}{}\n", of_rank(), escaped(&text.to_string()));
        let _ = Stream::Stderr.write_all(line.as_bytes());
    }
}

/// Writes a line of information. See [`Severity`].
pub fn line(text: impl Display) {
    Severity::Information.write(text);
}

/// Writes a warning. See [`Severity`].
pub fn warning(text: impl Display) {
    Severity::Warning.write(text);
}

/// Writes an error. See [`Severity`].
pub fn error(text: impl Display) {
    Severity::Error.write(text);
}

/// What a line's text begins with if this process is one of several.
fn of_rank() -> String {
    match RANK.load(Ordering::Relaxed) {
        usize::MAX => String::new(),
        rank => format!("rank {rank}: "),
    }
}

/// This process's rank, or the largest number.
static RANK: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Makes all lines name this process's rank.
pub fn set_rank(rank: usize) {
    RANK.store(rank, Ordering::Relaxed);
}

/// Lines of one severity, about single requests or tensors. The first few are written, the others only counted, so that
/// a file of a million bad requests does not hide all other lines.
pub struct FewLines {
    severity: Severity,
    /// Text after the number of lines that were not written.
    rest: &'static str,
    said: usize,
    kept_back: usize,
}

impl FewLines {
    /// The most lines that are written.
    pub const MOST: usize = 10;

    /// No lines so far. `rest` follows the number of lines that were not written, for example
    /// `more requests get no answer`.
    pub fn new(severity: Severity, rest: &'static str) -> Self {
        Self {
            severity,
            rest,
            said: 0,
            kept_back: 0,
        }
    }

    /// Writes a line, or counts it.
    pub fn line(&mut self, text: impl Display) {
        if self.said == Self::MOST {
            self.kept_back += 1;
            return;
        }
        self.said += 1;
        self.severity.write(text);
    }

    /// Writes the number of lines that were not written, if any.
    pub fn finish(self) {
        if self.kept_back > 0 {
            self.severity.write(format_args!("{} {}", self.kept_back, self.rest));
        }
    }
}

/// How often the bar is redrawn.
const DRAWS_PER_SECOND: u8 = 20;

/// A progress bar of finished requests and their tokens; invisible if stderr is not a terminal. It is cleared when the
/// last clone is dropped.
#[derive(Clone)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar for `requests` requests, if `wanted`.
    pub fn new(wanted: bool, requests: usize) -> Self {
        let visible = wanted && std::io::stderr().is_terminal();
        let target = if visible {
            // Like `ProgressDrawTarget::stderr()`, but writes through `Stream`. Nothing is read from stdin.
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

    /// Counts one more finished request, and shows the number of tokens so far.
    pub fn finished(&self, tokens: u64) {
        self.bar.inc(1);
        let seconds = self.bar.elapsed().as_secs_f64();
        self.bar.set_message(format!(
            "{tokens} tokens, {:.0} tok/s",
            tokens as f64 / seconds.max(1e-3)
        ));
    }

    /// Calls `work`, which writes to the terminal, with the bar hidden.
    pub fn aside<T>(&self, work: impl FnOnce() -> T) -> T {
        self.bar.suspend(work)
    }
}

/// Prints the requests' texts in the order of requests, in whatever order they arrive. It has a thread of its own, so
/// that a slow terminal does not delay the steps.
pub struct Printer {
    texts: Arc<Texts>,
    thread: Option<Thread<()>>,
}

/// The texts, shared with the printer's thread.
struct Texts {
    state: Mutex<TextsState>,
    changed: Condvar,
}

struct TextsState {
    /// One for each request.
    texts: Vec<Text>,
    /// Whether no more texts will arrive.
    complete: bool,
}

enum Text {
    /// Not arrived yet, or printed.
    Missing,
    /// The request's text, or `None` if it has no answer.
    Here(Option<Vec<u8>>),
}

impl Printer {
    /// Starts the thread, which writes the texts of `requests` requests to stdout; if that is a terminal, control
    /// characters are escaped. What a launcher forwards (`is_launched`) may end in a file, whatever it comes through,
    /// so there only the terminal that the process was started from counts. Fails if there is no memory for the table
    /// of texts. If the thread does not start, a line says so, and nothing is printed.
    pub fn on_stdout(progress: &Progress, requests: usize, is_launched: bool) -> Result<Self> {
        let out = Stream::Stdout;
        let is_terminal = std::io::stdout().is_terminal() && (!is_launched || out.is_controlling_terminal());
        Self::start(out, is_terminal, progress, requests)
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
        let thread = threads::spawn("getp-print", print);
        if let Err(error) = &thread {
            self::error(format_args!("answers are not printed: {error}"));
        }
        Ok(Self {
            texts,
            thread: thread.ok(),
        })
    }

    /// Passes a request's text, or `None` if it has no answer, to the thread. To be called once for each request:
    /// requests after a missing one are printed only when the printer is dropped.
    pub fn print(&self, request: usize, text: Option<Vec<u8>>) {
        // Without a thread nothing would free the text.
        if self.thread.is_some() {
            self.texts.lock().texts[request] = Text::Here(text);
            self.texts.changed.notify_one();
        }
    }
}

impl Drop for Printer {
    /// Waits until all texts are printed.
    fn drop(&mut self) {
        self.texts.lock().complete = true;
        self.texts.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Texts {
    /// Waits for a request's text; `None` if it has no answer, or if no more texts will arrive.
    fn wait(&self, request: usize) -> Option<Vec<u8>> {
        let missing = |state: &mut TextsState| !state.complete && matches!(state.texts[request], Text::Missing);
        let state = self.changed.wait_while(self.lock(), missing);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut state.texts[request], Text::Missing) {
            Text::Here(text) => text,
            Text::Missing => None,
        }
    }

    /// Locks, even if a thread panicked with the lock held: no change is left half made.
    fn lock(&self) -> MutexGuard<'_, TextsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn print_in_order(texts: &Texts, mut write: impl FnMut(&[u8]) -> std::io::Result<()>) {
    let requests = texts.lock().texts.len();
    for mut text in (0..requests).filter_map(|request| texts.wait(request)) {
        text.push(b'\n');
        if let Err(error) = write(&text) {
            self::error(format_args!("answers are not printed any more: {error}"));
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

    /// A full disk, and how often somebody has tried to write there.
    struct Full(std::fs::File, Arc<AtomicUsize>);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.1.fetch_add(1, Ordering::SeqCst);
            self.0.write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// The printer gives up at the first text. It takes the others all the same, and ends.
    #[test]
    fn a_full_disk_stops_the_printing_alone() {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let writes = Arc::new(AtomicUsize::new(0));
        let printer = Printer::start(Full(full, writes.clone()), false, &Progress::new(false, 3), 3).unwrap();
        for request in [0, 2, 1] {
            printer.print(request, Some(b"a".to_vec()));
        }
        drop(printer);
        assert_eq!(writes.load(Ordering::SeqCst), 1);
    }
}
