//! `getp`, the program: files of requests in, files of answers out, on the library's engine.

mod answer;
mod batch;
mod body;
mod check;
mod forms;
mod input;
mod interrupt;
mod model;
mod output;
mod reply;
mod stops;
mod structured;
mod text;

use std::io;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use getp::report;

/// Runs OpenAI's gpt-oss in offline batches.
///
/// Devices and limits are chosen by the library's GETP_* variables, such as GETP_DEVICE.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answers the requests of a file in the form of OpenAI's batches.
    Batch(batch::Batch),
    /// Writes the log-probabilities of given continuations.
    Score(batch::Score),
    /// Says what a model's files and fields are taken for, and which cards it fits.
    Check(check::Check),
    /// Prints the tokens of the text on standard input.
    Tokenize(text::Tokenize),
    /// Prints the text of the tokens on standard input.
    Detokenize(text::Detokenize),
}

fn main() -> ExitCode {
    let ended = match Args::parse().command {
        Command::Batch(args) => batch::batch(&args),
        Command::Score(args) => batch::score(&args),
        Command::Check(args) => check::check(&args),
        Command::Tokenize(args) => text::tokenize(&args),
        Command::Detokenize(args) => text::detokenize(&args),
    };
    ended.unwrap_or_else(|why| {
        // Who reads what is printed has seen enough.
        let io = why.root_cause().downcast_ref::<io::Error>();
        if io.is_none_or(|io| io.kind() != io::ErrorKind::BrokenPipe) {
            report::error(told(&why));
        }
        ExitCode::FAILURE
    })
}

/// An error and what it comes from, as far as it does not say so itself.
fn told(why: &anyhow::Error) -> String {
    why.chain().fold(String::new(), |told, cause| {
        let cause = cause.to_string();
        match (told.is_empty(), told.ends_with(&cause)) {
            (true, _) => cause,
            (false, true) => told,
            (false, false) => format!("{told}: {cause}"),
        }
    })
}
