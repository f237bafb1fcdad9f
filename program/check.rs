//! `getp check`: what a model's files are taken for, and which cards it fits.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use getp::backend::gpu::group::fit::{ENOUGH, cards, room};
use getp::checkpoint::{self, Checkpoint, SafetensorsCheckpoint, TensorId, describe};
use getp::config::ModelConfig;
use getp::text::TextTokenizer;

#[derive(clap::Args)]
pub struct Check {
    /// The model's directory, or its .bin file.
    model: PathBuf,
}

/// The most devices that are tried for a group.
const MOST_DEVICES: usize = 8;

/// Says what everything is; fails where the model, or its tokenizer, cannot be opened.
pub fn check(args: &Check) -> Result<ExitCode> {
    let mut out = io::stdout().lock();
    let model: Result<Arc<dyn Checkpoint>> = match args.model.is_dir() {
        true => directory(&args.model, &mut out),
        false => checkpoint::open(&args.model).map_err(Into::into),
    };
    let model = model?;
    say_model(&*model, &mut out)?;
    if args.model.is_dir() {
        say_tokenizer(&args.model, model.config(), &mut out)?;
    }
    say_cards(model.config(), &mut out)?;
    Ok(ExitCode::SUCCESS)
}

/// Says what its files and fields are taken for.
fn directory(dir: &Path, out: &mut impl Write) -> Result<Arc<dyn Checkpoint>> {
    let opened = SafetensorsCheckpoint::open(dir);
    say(out, "files", &describe::files(dir, opened.as_ref().ok())?)?;
    for (file, fields) in describe::configurations(dir)? {
        say(out, file, &fields)?;
    }
    Ok(Arc::new(opened?))
}

fn say(out: &mut impl Write, heading: &str, lines: &[describe::Taken]) -> io::Result<()> {
    writeln!(out, "{heading}")?;
    let width = lines.iter().map(|line| line.what.chars().count()).max().unwrap_or(0);
    for describe::Taken { what, r#as } in lines {
        writeln!(out, "  {what:width$}  {as}", as = r#as)?;
    }
    writeln!(out)
}

fn say_model(model: &dyn Checkpoint, out: &mut impl Write) -> Result<()> {
    let config = model.config();
    let mut bytes = 0;
    for id in TensorId::all(config) {
        bytes += model.tensor(id)?.len_bytes();
    }
    writeln!(
        out,
        "the model: {} layers, {} experts of which {} compute a token, {} logits, context {}; {:.2} GB of weights",
        config.n_layers,
        config.n_experts,
        config.experts_per_token,
        config.vocab_size,
        config.context_length.unwrap_or(config.seq_len),
        bytes as f64 * 1e-9
    )?;
    let generation = model.generation();
    let how = match generation.temperature {
        0.0 => "the most probable token".to_owned(),
        temperature => format!("temperature {temperature}, top-p {}", generation.topp),
    };
    writeln!(
        out,
        "answers, unless a request says otherwise: {how}; they end with one of {:?}, or {}",
        generation.ends,
        generation.max_tokens.map_or_else(
            || "where there is no more room".into(),
            |most| format!("after {most} tokens")
        )
    )?;
    Ok(())
}

fn say_tokenizer(dir: &Path, config: &ModelConfig, out: &mut impl Write) -> Result<()> {
    let tokens = TextTokenizer::open(dir)?.vocabulary().vocab_size();
    writeln!(out, "the tokenizer: {tokens} tokens of {}", config.vocab_size)?;
    Ok(())
}

/// The smallest groups of cards that it fits.
fn say_cards(config: &ModelConfig, out: &mut impl Write) -> Result<()> {
    writeln!(
        out,
        "\ncards, and sequences of {} positions for which there is room",
        config.seq_len
    )?;
    for (card, family) in cards() {
        let mut rooms = Vec::new();
        for devices in 1..=MOST_DEVICES {
            let room = room(&card, family, config, devices);
            if room > 0 {
                rooms.push(match devices {
                    1 => format!("one {room}"),
                    several => format!("a group of {several} {room}"),
                });
            }
            if room >= ENOUGH {
                break;
            }
        }
        let rooms = match rooms.is_empty() {
            true => format!("does not fit {MOST_DEVICES}"),
            false => rooms.join(", "),
        };
        writeln!(out, "  {:15} {:3} GB  {rooms}", card.name, card.gb)?;
    }
    Ok(())
}
