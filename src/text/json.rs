//! A checkpoint's `tokenizer.json`, which the crate `tokenizers` encodes text with.
//!
//! The file is read straight into the crate's parts. Its own `Tokenizer` reads the merges into a `serde_json::Value`
//! first, which takes as long again. Tokens are decoded by the table of their bytes and not by the crate, which gives
//! characters: a token may end within one.
//!
//! The crate asks for memory without a way to fail. So what it will take is asked for before, and given back.

use std::collections::HashMap;
use std::io::BufReader;
use std::path::Path;

use serde::Deserialize;
use tokenizers::models::bpe::BPE;
use tokenizers::{
    AddedToken, AddedVocabulary, Model, NormalizerWrapper, OffsetType, PreTokenizer, PreTokenizerWrapper,
};

use super::{Kind, Specials};
use crate::descriptors::open_file;
use crate::error::{Error, Result};
use crate::file_kind::{self, GivenAs};
use crate::memory::{self, Purpose};
use crate::tokenizer::{self, Entry};

/// The score of an entry that no merge gives, as the example export_tokenizer writes it.
const SPECIAL_SCORE: f32 = -1e30;
/// Where o200k_harmony, gpt-oss's encoding, has a token by which it is known, and how many ids it has: those behind the
/// tokens that a `tokenizer.json` names are reserved ones.
const O200K_HARMONY: (u32, &str, usize) = (200_012, "<|call|>", 201_088);
/// The most ids of a vocabulary. Far above real ones; it keeps garbage from being taken for a size.
const MOST_IDS: usize = 1 << 24;
/// The most characters of white space in a row. The regular expression that cuts o200k's words keeps a state for each,
/// and gives up at a million without a word of the crate.
const MOST_BLANKS: usize = 500_000;
/// Bytes of memory that reading takes for each byte of the file, and encoding for each byte of a text, at most.
const READING: usize = 12;
const ENCODING: usize = 160;

/// What a `tokenizer.json` holds. Its truncation, padding and post-processor are for training and for a frame that it
/// adds; a text's tokens do not depend on them. Its decoder is not the crate's type, which panics at some that are
/// damaged; of it only the type is looked at.
#[derive(Deserialize)]
struct TokenizerJson {
    #[serde(default)]
    version: Option<String>,
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Option<NormalizerWrapper>,
    #[serde(default)]
    pre_tokenizer: Option<PreTokenizerWrapper>,
    #[serde(default)]
    decoder: serde_json::Value,
    model: BPE,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

/// What is read of the `config.json` beside it.
#[derive(Deserialize)]
struct Config {
    vocab_size: Option<usize>,
}

/// By id: bytes and score, as the program's struct has them.
type Entries = Vec<(Vec<u8>, f32)>;

/// A `tokenizer.json`, read and checked.
pub struct File {
    encoder: Encoder,
    entries: Entries,
    kinds: Vec<Kind>,
}

impl File {
    /// Reads the file.
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let wrong = |why: String| file_kind::explain(path, Error::format(&name, why), GivenAs::Tokenizer);
        let data = tokenizer::read_bytes(path, open_file(path), GivenAs::Tokenizer)?;
        memory::room::<u8>(data.len().saturating_mul(READING), Purpose::Vocabulary)?;
        let written: TokenizerJson = serde_json::from_slice(&data).map_err(|error| wrong(error.to_string()))?;
        drop(data);
        check(&written).map_err(wrong)?;
        let models = open_file(&path.with_file_name("config.json")).ok();
        let models = models.and_then(|config| {
            serde_json::from_reader::<_, Config>(BufReader::new(config))
                .ok()?
                .vocab_size
        });
        let (entries, kinds) = entries(&written, models).map_err(wrong)?;
        let encoder = Encoder::new(written).map_err(wrong)?;
        Ok(Self {
            encoder,
            entries,
            kinds,
        })
    }

    /// The entries, as the program's struct has them: all that the file has, and o200k_harmony's reserved ones.
    pub fn entries(&self) -> Result<Vec<Entry<'_>>> {
        let entries = self.entries.iter().map(|(bytes, score)| (bytes.as_slice(), *score));
        memory::collect(entries, Purpose::Vocabulary)
    }

    /// What the ids are, and what encodes.
    pub(super) fn into_encoder(self) -> (Vec<Kind>, Encoder) {
        (self.kinds, self.encoder)
    }
}

/// Refuses what would give other tokens than the file's maker had, or others each time.
fn check(written: &TokenizerJson) -> Result<(), String> {
    if let Some(version) = written.version.as_ref().filter(|&version| version != "1.0") {
        return Err(format!("version is {version:?}; only \"1.0\" is known"));
    }
    if let Some(dropout) = written.model.dropout.filter(|&dropout| dropout != 0.0) {
        return Err(format!(
            "model.dropout is {dropout}, which is for training; set it to null"
        ));
    }
    match written.decoder["type"].as_str() {
        Some("ByteLevel") => Ok(()),
        _ => Err("its decoder is not of the type ByteLevel, as gpt-oss's is; no other is supported".into()),
    }
}

/// The entries by id, and what each of them is. Of reserved ones there are none that the model has no logits for, if
/// `models` says how many it has.
fn entries(written: &TokenizerJson, models: Option<usize>) -> Result<(Entries, Vec<Kind>), String> {
    let vocabulary = written.model.get_vocab();
    let ids = vocabulary
        .values()
        .copied()
        .chain(written.added_tokens.iter().map(|added| added.id));
    let own = ids.max().map_or(0, |id| id as usize + 1);
    if own == 0 || own > MOST_IDS {
        return Err(format!("it has {own} ids; there must be one, and at most {MOST_IDS}"));
    }
    let (call, name, all) = O200K_HARMONY;
    let is_harmony = |added: &Added| added.id == call && added.token.content == name;
    let reserved_end = match written.added_tokens.iter().any(is_harmony) {
        true => models.unwrap_or(all).min(all),
        false => 0,
    };
    let reserved = |id| (format!("<|reserved_{id}|>").into_bytes(), SPECIAL_SCORE);
    let mut entries: Vec<_> = (0..own.max(reserved_end)).map(reserved).collect();
    let mut kinds = vec![Kind::Nothing; entries.len()];
    let bytes = bytes_of_characters();
    for (token, id) in vocabulary {
        let unknown = |character| format!("token {id} has the character {character:?}, which stands for no byte");
        let token = token
            .chars()
            .map(|character| bytes.get(&character).copied().ok_or_else(|| unknown(character)));
        let token = token.collect::<Result<Vec<u8>, String>>()?;
        if tokenizer::named_byte(&token).is_some() {
            return Err(format!(
                "token {id} is {:?}, which here is the name of a byte",
                token.escape_ascii().to_string()
            ));
        }
        kinds[id as usize] = Kind::Ordinary;
        // The program keeps C strings, which a NUL would end, and writes such a byte by its name.
        let token = if token == [0] { b"<0x00>".to_vec() } else { token };
        entries[id as usize] = (token, id as f32);
    }
    for Added { id, token } in &written.added_tokens {
        kinds[*id as usize] = if token.special { Kind::Special } else { Kind::Ordinary };
        entries[*id as usize] = (token.content.clone().into_bytes(), SPECIAL_SCORE);
    }
    Ok((entries, kinds))
}

/// The byte that each character of a byte-level vocabulary stands for: printable ones for themselves, the others in
/// their order for the characters from 256 on.
fn bytes_of_characters() -> HashMap<char, u8> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let themselves = (0..=u8::MAX).filter(printable).map(|byte| (char::from(byte), byte));
    let others = (0..=u8::MAX).filter(|byte| !printable(byte));
    themselves.chain(('\u{100}'..).zip(others)).collect()
}

/// Encodes text as the model was trained.
pub struct Encoder {
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    model: BPE,
    /// Finds added tokens in a text, special ones among them.
    with_specials: AddedVocabulary,
    /// The same without special ones.
    without_specials: AddedVocabulary,
}

impl Encoder {
    fn new(written: TokenizerJson) -> Result<Self, String> {
        let TokenizerJson {
            added_tokens,
            normalizer,
            pre_tokenizer,
            model,
            ..
        } = written;
        let (ids, tokens): (Vec<u32>, Vec<AddedToken>) = added_tokens.into_iter().map(|a| (a.id, a.token)).unzip();
        let mut with_specials = AddedVocabulary::new();
        with_specials.add_tokens(&tokens, &model, normalizer.as_ref());
        // The crate numbers them by itself.
        let other = |(id, token): &(&u32, &AddedToken)| with_specials.token_to_id(&token.content, &model) != Some(**id);
        if let Some((id, token)) = ids.iter().zip(&tokens).find(other) {
            let why = "added tokens are to follow the vocabulary one by one";
            return Err(format!("the added token {:?} has the id {id}; {why}", token.content));
        }
        let mut without_specials = with_specials.clone();
        without_specials.set_encode_special_tokens(true);
        Ok(Self {
            normalizer,
            pre_tokenizer,
            model,
            with_specials,
            without_specials,
        })
    }

    /// The tokens of a text, which must be UTF-8.
    pub fn encode(&self, text: &[u8], specials: Specials) -> Result<Vec<u32>> {
        let text = std::str::from_utf8(text).map_err(|error| {
            let why = format!(
                "it is not UTF-8 at byte {}; convert it, or leave that out",
                error.valid_up_to()
            );
            Error::format("text", why)
        })?;
        let blanks = text.split(|character: char| !character.is_whitespace());
        if blanks.map(|run| run.chars().count()).any(|count| count > MOST_BLANKS) {
            let why = format!("it has more than {MOST_BLANKS} characters of white space in a row; leave some out");
            return Err(Error::format("text", why));
        }
        memory::room::<u8>(text.len().saturating_mul(ENCODING), Purpose::Requests)?;
        let added = match specials {
            Specials::Text => &self.without_specials,
            Specials::Tokens => &self.with_specials,
        };
        self.ids(text, added)
            .map_err(|error| Error::format("text", format!("it cannot be encoded: {error}")))
    }

    fn ids(&self, text: &str, added: &AddedVocabulary) -> tokenizers::Result<Vec<u32>> {
        let mut pieces = added.extract_and_normalize(self.normalizer.as_ref(), text);
        if let Some(pre_tokenizer) = &self.pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        pieces.tokenize(|piece| self.model.tokenize(piece.get()))?;
        Ok(pieces.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
    }
}
