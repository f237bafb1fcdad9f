//! Writes `tokenizer.bin` of o200k_harmony, the vocabulary of gpt-oss, from the copy the tiktoken-rs crate carries: the
//! same bytes as the evaluation program's `export_tokenizer_bin.py` writes from tiktoken. Or `tokenizer.json`, in the
//! form that the released models' directories have it.
//!
//! `cargo run --example export_tokenizer -- tokenizer.bin`

use anyhow::{Context, Result};
use clap::Parser;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

/// Entries in the file: as many as the models have logits.
pub const VOCAB_SIZE: u32 = 201_088;

/// The id behind the last token of the release's tokenizer.json.
pub const END_OF_NAMES: u32 = 200_019;

/// The first special token, `<|startoftext|>`.
pub const FIRST_NAME: u32 = 199_998;

/// How many special tokens have a name.
pub const NAMES: usize = (END_OF_NAMES - FIRST_NAME) as usize;

/// How o200k cuts text into words, within which bytes are merged.
const WORDS: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// Special tokens and ids without one score below everything a merge may give.
const SPECIAL_SCORE: f32 = -1e30;

/// Writes tokenizer.bin of o200k_harmony, or tokenizer.json.
#[derive(Parser)]
struct Arguments {
    /// The file to write; a tokenizer.json if its name ends in .json.
    out: PathBuf,
    /// Only so many entries, for tiny models. The first 256 are the single bytes, and no merge needs a later entry.
    #[arg(long, default_value_t = VOCAB_SIZE, value_parser = clap::value_parser!(u32).range(256..=VOCAB_SIZE as i64))]
    first: u32,
}

fn main() -> Result<()> {
    let Arguments { out, first } = Arguments::parse();
    let is_json = out.extension().is_some_and(|extension| extension == "json");
    let mut entries = entries()?;
    // The file of the release has no more than the tokens with a name.
    entries.truncate(if is_json { first.min(END_OF_NAMES) } else { first } as usize);
    let file = File::create(&out).with_context(|| format!("cannot create {}", out.display()))?;
    let mut file = BufWriter::new(file);
    let written = match is_json {
        true => write_json(&mut file, &entries),
        false => write(&mut file, &entries),
    };
    written
        .and_then(|()| file.flush())
        .with_context(|| format!("cannot write {}", out.display()))?;
    println!("{}: {} entries", out.display(), entries.len());
    Ok(())
}

/// The entries `(bytes, score)` of o200k_harmony by id. An ordinary token's score is its rank, which is its id.
pub fn entries() -> Result<Vec<(Vec<u8>, f32)>> {
    let bpe = tiktoken_rs::o200k_harmony()?;
    let special = bpe.special_tokens();
    let is_special = |bytes: &[u8]| std::str::from_utf8(bytes).is_ok_and(|text| special.contains(text));
    let score = |id: u32| id as f32;
    let entry = |id: u32| match bpe.decode_bytes(&[id]) {
        // The program keeps C strings, which a NUL byte would end.
        Ok(bytes) if bytes == [0] => (b"<0x00>".to_vec(), score(id)),
        Ok(bytes) if is_special(&bytes) => (bytes, SPECIAL_SCORE),
        Ok(bytes) => (bytes, score(id)),
        Err(_) => (format!("<|reserved_{id}|>").into_bytes(), SPECIAL_SCORE),
    };
    Ok((0..VOCAB_SIZE).map(entry).collect())
}

/// The entries of the tokenizer.json of a model with so many ids: the release's, or of fewer ids the first ones, and
/// behind them the tokens that have a name, from `<|startoftext|>` on.
pub fn entries_of(vocab_size: usize) -> Result<Vec<(Vec<u8>, f32)>> {
    let mut entries = entries()?;
    let named: Vec<_> = entries.drain(FIRST_NAME as usize..).take(NAMES).collect();
    entries.truncate(vocab_size.saturating_sub(NAMES));
    entries.extend(named);
    Ok(entries)
}

/// Writes the entries as `tokenizer.bin`: int32 length of the longest ordinary token, then for each entry float32
/// score, int32 length and the bytes, all little endian.
pub fn write(out: &mut impl Write, entries: &[(Vec<u8>, f32)]) -> std::io::Result<()> {
    let ordinary = entries.iter().filter(|(_, score)| *score > SPECIAL_SCORE);
    let longest = ordinary.map(|(bytes, _)| bytes.len()).max().unwrap_or(0);
    out.write_all(&(longest as i32).to_le_bytes())?;
    for (bytes, score) in entries {
        out.write_all(&score.to_le_bytes())?;
        out.write_all(&(bytes.len() as i32).to_le_bytes())?;
        out.write_all(bytes)?;
    }
    Ok(())
}

/// A `tokenizer.json`, in the form of the released models'.
#[derive(Serialize)]
struct Json {
    version: &'static str,
    truncation: (),
    padding: (),
    added_tokens: Vec<Added>,
    normalizer: (),
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: Model,
}

#[derive(Serialize)]
struct Added {
    id: usize,
    content: String,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Serialize)]
struct Model {
    r#type: &'static str,
    dropout: (),
    unk_token: (),
    continuing_subword_prefix: (),
    end_of_word_suffix: (),
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    #[serde(serialize_with = "in_order")]
    vocab: Vec<(String, usize)>,
    merges: Vec<[String; 2]>,
}

fn in_order<S: Serializer>(vocabulary: &[(String, usize)], to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(vocabulary.iter().map(|(token, id)| (token, id)))
}

/// Writes the entries as `tokenizer.json`: bytes as characters, each pair of tokens that makes another one as a merge,
/// in the order of what they make, and the special tokens added behind them.
pub fn write_json(out: &mut impl Write, entries: &[(Vec<u8>, f32)]) -> std::io::Result<()> {
    let mut added_tokens = Vec::new();
    let mut ordinary: Vec<&[u8]> = Vec::new();
    for (id, (bytes, score)) in entries.iter().enumerate() {
        if *score > SPECIAL_SCORE {
            ordinary.push(if bytes == b"<0x00>" { &[0][..] } else { bytes });
            continue;
        }
        let name = String::from_utf8_lossy(bytes).into_owned();
        added_tokens.push(Added {
            id,
            // o200k_harmony has another name for it, too.
            content: if id == 200_018 { "<|endofprompt|>".into() } else { name },
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: false,
            special: true,
        });
    }
    // Ordinary tokens have the first ids.
    let ids: HashMap<&[u8], usize> = ordinary.iter().copied().zip(0..).collect();
    let mut merges = Vec::new();
    for (id, bytes) in ordinary.iter().enumerate() {
        let pairs = (1..bytes.len()).map(|at| bytes.split_at(at));
        merges.extend(pairs.filter_map(|(left, right)| Some((id, *ids.get(left)?, *ids.get(right)?))));
    }
    merges.sort_unstable();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let words = json!({"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": false});
    let file = Json {
        version: "1.0",
        truncation: (),
        padding: (),
        added_tokens,
        normalizer: (),
        pre_tokenizer: json!({"type": "Sequence", "pretokenizers": [words, byte_level]}),
        post_processor: byte_level.clone(),
        decoder: byte_level,
        model: Model {
            r#type: "BPE",
            dropout: (),
            unk_token: (),
            continuing_subword_prefix: (),
            end_of_word_suffix: (),
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: false,
            vocab: ordinary.iter().map(|bytes| characters(bytes)).zip(0..).collect(),
            merges: merges
                .into_iter()
                .map(|(_, left, right)| [characters(ordinary[left]), characters(ordinary[right])])
                .collect(),
        },
    };
    Ok(serde_json::to_writer_pretty(out, &file)?)
}

/// A token as a byte-level vocabulary writes it: printable bytes are themselves, the others the characters from 256 on.
fn characters(bytes: &[u8]) -> String {
    let is_printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let character = |byte: &u8| match is_printable(byte) {
        true => char::from(*byte),
        false => {
            let before = (0..*byte).filter(|other| !is_printable(other)).count();
            char::from_u32(256 + before as u32).unwrap_or_default()
        }
    };
    bytes.iter().map(character).collect()
}
