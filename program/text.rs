//! `getp tokenize` and `getp detokenize`.

use std::io::{self, BufRead, Read, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};
use getp::text::{Specials, TextTokenizer};

use crate::model::Place;

#[derive(clap::Args)]
pub struct Tokenize {
    #[command(flatten)]
    place: Place,
    /// Names of special tokens, such as <|start|>, are the tokens; otherwise they are text.
    #[arg(long)]
    specials: bool,
    /// Each line is a text of its own, without its end, and its tokens are a line.
    #[arg(long)]
    lines: bool,
}

#[derive(clap::Args)]
pub struct Detokenize {
    #[command(flatten)]
    place: Place,
    /// Special tokens are their names; otherwise they are nothing.
    #[arg(long)]
    specials: bool,
}

fn specials(are_tokens: bool) -> Specials {
    if are_tokens { Specials::Tokens } else { Specials::Text }
}

/// The tokens of standard input on standard output, in decimal, a blank between two.
pub fn tokenize(args: &Tokenize) -> Result<ExitCode> {
    let tokenizer = args.place.tokenizer()?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    let mut write = |text: &[u8]| -> Result<()> {
        let ids = tokenizer.encode(text, specials(args.specials))?;
        let words: Vec<String> = ids.iter().map(u32::to_string).collect();
        Ok(writeln!(out, "{}", words.join(" "))?)
    };
    let mut input = io::stdin().lock();
    let mut text = Vec::new();
    if args.lines {
        while input.read_until(b'\n', &mut text)? > 0 {
            write(text.strip_suffix(b"\n").unwrap_or(&text))?;
            text.clear();
        }
    } else {
        input.read_to_end(&mut text)?;
        write(&text)?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// The bytes of the tokens on standard input on standard output. Blanks, commas and brackets stand between them, so
/// that a list in JSON can be read, too.
pub fn detokenize(args: &Detokenize) -> Result<ExitCode> {
    let tokenizer = args.place.tokenizer()?;
    let mut input = String::new();
    io::stdin()
        .lock()
        .read_to_string(&mut input)
        .context("standard input")?;
    let bytes = tokenizer.decode(ids(&tokenizer, &input)?, specials(args.specials))?;
    io::stdout().lock().write_all(&bytes)?;
    Ok(ExitCode::SUCCESS)
}

fn ids(tokenizer: &TextTokenizer, input: &str) -> Result<Vec<u32>> {
    let most = tokenizer.vocabulary().vocab_size();
    let words = input.split(|character: char| character.is_ascii_whitespace() || "[],".contains(character));
    let id = |word: &str| {
        let id = word.parse::<u32>().ok().filter(|&id| (id as usize) < most);
        id.with_context(|| format!("{word:?} is no token; use numbers from 0 to {}", most - 1))
    };
    words.filter(|word| !word.is_empty()).map(id).collect()
}
