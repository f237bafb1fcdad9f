//! Writes `tokenizer.bin` of o200k_harmony, the vocabulary of gpt-oss, from the copy the tiktoken-rs crate carries: the
//! same bytes as the evaluation program's `export_tokenizer_bin.py` writes from tiktoken.
//!
//! `cargo run --example export_tokenizer -- tokenizer.bin`

use anyhow::{Context, Result};
use clap::Parser;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

/// Entries in the file: as many as the models have logits.
pub const VOCAB_SIZE: u32 = 201_088;

/// Special tokens and ids without one score below everything a merge may give.
const SPECIAL_SCORE: f32 = -1e30;

/// Writes tokenizer.bin of o200k_harmony.
#[derive(Parser)]
struct Arguments {
    /// The file to write.
    out: PathBuf,
    /// Only so many entries, for tiny models. The first 256 are the single bytes, and no merge needs a later entry.
    #[arg(long, default_value_t = VOCAB_SIZE, value_parser = clap::value_parser!(u32).range(256..=VOCAB_SIZE as i64))]
    first: u32,
}

fn main() -> Result<()> {
    let Arguments { out, first } = Arguments::parse();
    let mut entries = entries()?;
    entries.truncate(first as usize);
    let file = File::create(&out).with_context(|| format!("cannot create {}", out.display()))?;
    let mut file = BufWriter::new(file);
    write(&mut file, &entries)
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
