//! Better errors for a file or directory that is not what it was given as: recognizes what else it may be.

use std::io::Read;
use std::path::Path;

use crate::descriptors::open_file;
use crate::error::Error;

/// What a file was given as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenAs {
    /// The evaluation program's `.bin` file.
    Model,
    /// A safetensors file of a directory.
    Shard,
    /// A directory's `config.json`, or its index.
    Configuration,
    /// A `tokenizer.bin`.
    Vocabulary,
    /// A `tokenizer.json`.
    Tokenizer,
    /// A file of prompts.
    Prompts,
    /// A file of logits.
    Logits,
}

impl GivenAs {
    /// What can be given as it, for error messages.
    fn words(self) -> &'static str {
        match self {
            Self::Model => {
                "a model is the evaluation program's .bin file, or a directory with config.json and safetensors files"
            }
            Self::Shard => "the weights of a directory are safetensors files: fetch this one again",
            Self::Configuration => "it must be a JSON object: fetch it again",
            Self::Vocabulary => {
                "a vocabulary is a tokenizer.bin, as the example export_tokenizer writes it, or the tokenizer.json of \
                 a model's directory"
            }
            Self::Tokenizer => "a tokenizer.json is a JSON object: fetch it again",
            Self::Prompts => "prompts are a text: how many there are, then a line for each",
            Self::Logits => "logits are what GETP_LOGITS writes, or lines of numbers",
        }
    }

    /// What it is called, for error messages.
    fn noun(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Shard => "safetensors file",
            Self::Configuration => "JSON object",
            Self::Vocabulary => "vocabulary",
            Self::Tokenizer => "tokenizer.json",
            Self::Prompts => "file of prompts",
            Self::Logits => "file of logits",
        }
    }

    /// Whether files of this kind are what is wanted.
    fn is(self, kind: &str) -> bool {
        match self {
            Self::Model => kind == PROGRAM_MODEL,
            Self::Shard => kind == SAFETENSORS,
            Self::Configuration | Self::Tokenizer => kind == JSON,
            Self::Vocabulary => kind == VOCABULARY,
            Self::Prompts => kind == TEXT,
            Self::Logits => kind == LOGITS || kind == TEXT,
        }
    }
}

const PROGRAM_MODEL: &str = "a model of the evaluation program (.bin)";
const VOCABULARY: &str = "a vocabulary (tokenizer.bin)";
const LOGITS: &str = "a file of logits";
const SAFETENSORS: &str = "a safetensors file";
const METAL: &str = "the release's model for Metal, which is not read: take the release's safetensors files, in its \
                     main directory or in original";
const PYTORCH: &str = "a PyTorch archive";
const ZIP: &str = "a zip archive";
const JSON: &str = "a JSON file";
const HTML: &str = "a web page, which a server may have sent instead of the file";
const TEXT: &str = "a text";

/// Bytes of a file's start that are looked at: a tar archive's mark begins at 257.
const START_BYTES: u64 = 512;

/// Kinds of files that begin with fixed bytes: an offset, the bytes there, and the kind's name.
const SIGNATURES: [(usize, &[u8], &str); 16] = [
    (
        0,
        b"version https://git-lfs",
        "a Git LFS pointer instead of the file itself, which `git lfs pull` fetches",
    ),
    (0, b"GPT-OSS v", METAL),
    (0, b"GETPLOG", LOGITS),
    (0, b"GGUF", "a GGUF file"),
    (0, b"PK\x03\x04", ZIP),
    (0, b"PK\x05\x06", ZIP),
    (0, b"\x80\x02\x8a\x0a", "an old PyTorch archive"),
    (8, b"{\"", SAFETENSORS),
    (0, b"\x1f\x8b", "a gzip archive"),
    (0, b"BZh", "a bzip2 archive"),
    (0, b"\xfd7zXZ\0", "an xz archive"),
    (0, b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"\x7fELF", "a program or a library (ELF)"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"\x89HDF\r\n", "an HDF5 file"),
];

/// An error that names what the file is instead of what is `given_as`. If it is that, or nothing known, the error says
/// why it cannot be read, too, as `error` does.
pub fn explain(path: &Path, error: Error, given_as: GivenAs) -> Error {
    if matches!(error, Error::OutOfMemory { .. }) || matches!(&error, Error::Io { .. } if !path.is_dir()) {
        return error;
    }
    let name = path.display().to_string();
    let is_model = matches!(error, Error::Config { .. });
    let kind = if path.is_dir() {
        Some("a directory")
    } else {
        kind_of(path)
    };
    let why = match kind {
        // A message that does not begin with the file's name speaks of it.
        Some(kind) if given_as.is(kind) => match error.to_string() {
            why if why.starts_with(&name) => return error,
            why if is_model => return Error::unsupported(name, why),
            why => why,
        },
        Some(kind) => format!("it is {kind}; {}", given_as.words()),
        None => {
            let why = error.to_string();
            let why = why
                .strip_prefix(&name)
                .map_or(&why[..], |why| why.trim_start_matches([':', ' ']));
            format!(
                "it is no {}, or a damaged one ({why}); {}",
                given_as.noun(),
                given_as.words()
            )
        }
    };
    Error::format(name, why)
}

/// Whether the file seems to be JSON, by its start.
pub fn is_json(path: &Path) -> bool {
    kind_of(path) == Some(JSON)
}

/// What the file seems to be, by its start.
fn kind_of(path: &Path) -> Option<&'static str> {
    // What came through a pipe is gone.
    let mut start = Vec::new();
    open_file(path).ok()?.take(START_BYTES).read_to_end(&mut start).ok()?;
    if start.is_empty() {
        return Some("an empty file");
    }
    let is = |(at, bytes, _): &&(usize, &[u8], &str)| start.get(*at..).is_some_and(|start| start.starts_with(bytes));
    match SIGNATURES.iter().find(is).map(|(_, _, kind)| *kind) {
        // What PyTorch saves holds a pickle first, `NAME/data.pkl`.
        Some(ZIP) if start.windows(8).any(|name| name == b"data.pkl") => Some(PYTORCH),
        Some(kind) => Some(kind),
        None if is_pickle(&start) => Some("a Python pickle"),
        None if is_program_model(&start) => Some(PROGRAM_MODEL),
        None if is_vocabulary(&start) => Some(VOCABULARY),
        None => kind_of_text(&start),
    }
}

/// Whether a pickle of protocol 2 to 5 begins so: its mark, then what makes an object. The small numbers of a model's
/// or a vocabulary's header have a zero there, or nearly.
fn is_pickle(start: &[u8]) -> bool {
    matches!(start, [0x80, 2..=5, operation, ..] if *operation >= b'(')
}

/// Whether the words are the header of a model that a program may have written: eleven sizes above zero, and what the
/// rotary embedding and the experts need.
fn is_program_model(start: &[u8]) -> bool {
    const MOST: u32 = 1 << 24;
    let Some(header) = start.first_chunk::<60>() else {
        return false;
    };
    let words: Vec<u32> = header
        .as_chunks()
        .0
        .iter()
        .map(|&word| u32::from_le_bytes(word))
        .collect();
    let in_range = |word: usize, least: f32| (least..1e9).contains(&f32::from_bits(words[word]));
    let sizes = words[..11].iter().filter(|&&size| 0 < size && size <= MOST).count();
    // One wrong size is an error that its name says more about.
    sizes >= 10 && in_range(11, 1.0) && in_range(12, 0.1) && in_range(14, 0.0)
}

/// Whether entries of a vocabulary follow one another: none longer than the longest, each with a score.
fn is_vocabulary(start: &[u8]) -> bool {
    const LONGEST: u32 = 1 << 16;
    let word = |at: usize| Some(u32::from_le_bytes(*start.get(at..)?.first_chunk()?));
    let Some(longest) = word(0).filter(|longest| (1..=LONGEST).contains(longest)) else {
        return false;
    };
    let (mut at, mut entries) = (4, 0);
    while let (Some(score), Some(length)) = (word(at), word(at + 4)) {
        // Special tokens are not among the results of merges, and may be longer.
        if f32::from_bits(score).is_nan() || length > longest.max(64) {
            return false;
        }
        (at, entries) = (at + 8 + length as usize, entries + 1);
    }
    entries > 0
}

/// The kind of a file that begins with text.
fn kind_of_text(start: &[u8]) -> Option<&'static str> {
    let start = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start);
    let text = match std::str::from_utf8(start) {
        Ok(text) => text,
        // The last character may be cut.
        Err(error) if error.error_len().is_none() => std::str::from_utf8(&start[..error.valid_up_to()]).ok()?,
        Err(_) => return None,
    };
    // What is shorter may be the beginning of a number.
    if text.len() < 4 || text.chars().any(|c| c.is_control() && !c.is_ascii_whitespace()) {
        return None;
    }
    let text = text.trim_ascii_start();
    let begins = |with: &str| {
        text.get(..with.len())
            .is_some_and(|begin| begin.eq_ignore_ascii_case(with))
    };
    let inside = text.strip_prefix(['{', '[']).map(str::trim_ascii_start);
    Some(match inside {
        _ if ["<!doctype html", "<html", "<?xml"].into_iter().any(begins) => HTML,
        Some(inside) if inside.is_empty() || inside.starts_with(['"', '{', '}', '[', ']']) => JSON,
        _ => TEXT,
    })
}

/// The error for a directory without the file `missing`.
pub fn explain_directory(dir: &Path, missing: &str) -> Error {
    let has = |name: &str| dir.join(name).exists();
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut files: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    files.sort();
    let ends = |ends: &[&str]| files.iter().find(|file| ends.iter().any(|end| file.ends_with(end)));
    let instead = if has("adapter_config.json") {
        "it holds an adapter, which is no model by itself: merge it into its base model first".into()
    } else if has("original/config.json") {
        "its directory original can be opened instead".into()
    } else if ends(&[".gguf"]).is_some() {
        "it holds a GGUF file, which is not read: take the release's safetensors files".into()
    } else if let Some(file) = ends(&[".bin", ".pt", ".pth"]) {
        match kind_of(&dir.join(file)) {
            Some(PROGRAM_MODEL) => format!("name its file {file} itself"),
            Some(METAL) => format!("its file {file} is {METAL}"),
            Some(kind) => format!("its file {file} is {kind}, which is not read: save the model as safetensors"),
            None => GivenAs::Model.words().into(),
        }
    } else {
        GivenAs::Model.words().into()
    };
    Error::format(
        dir.display().to_string(),
        format!("there is no {missing} in it; {instead}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of each kind, and words of the kind's name.
    fn kinds() -> Vec<(Vec<u8>, &'static str)> {
        let mut model = [50_u32, 64, 3, 2, 96, 2, 8, 4, 2, 256, 4096]
            .map(u32::to_le_bytes)
            .concat();
        model.extend([150_000_f32, 32.0].map(f32::to_le_bytes).concat());
        model.extend(128_u32.to_le_bytes());
        model.extend([7_f32, 0.1, 0.2].map(f32::to_le_bytes).concat());
        let entry = |score: f32, text: &[u8]| [&score.to_le_bytes(), &(text.len() as u32).to_le_bytes(), text].concat();
        let vocabulary = [
            &3_u32.to_le_bytes()[..],
            &entry(0.0, b"!"),
            &entry(-1e30, b"<|startoftext|>"),
        ]
        .concat();
        let mut tar = vec![0; 512];
        tar[..8].copy_from_slice(b"model.pt");
        tar[257..262].copy_from_slice(b"ustar");
        let mut kinds: Vec<(Vec<u8>, &str)> = vec![
            (model, PROGRAM_MODEL),
            (vocabulary, VOCABULARY),
            (tar, "a tar archive"),
            (b"PK\x03\x04\0\0\x08\x08\0\0archive/data.pkl".into(), PYTORCH),
            (b"PK\x03\x04\0\0\x08\x08\0\0weights.npy".into(), ZIP),
        ];
        let others: [(&[u8], &str); 26] = [
            (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
            (b"GPT-OSS v1.0\0\0\0\0\0\0\0\0", "for Metal"),
            (b"GETPLOG1\x32\0\0\0\0\0\0\0", LOGITS),
            (b"GGUF\x03\0\0\0", "a GGUF file"),
            (b"PK\x05\x06\0\0", ZIP),
            (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "an old PyTorch archive"),
            (b"\x80\x04\x95\x10\0\0\0\0\0\0\0}\x94.", "a Python pickle"),
            (b"\x80\x02}q\x00X\x04\0\0\0", "a Python pickle"),
            (b"\x40\0\0\0\0\0\0\0{\"a\":", SAFETENSORS),
            (b"\x1f\x8b\x08\0\0\0\0\0", "a gzip archive"),
            (b"BZh91AY&SY", "a bzip2 archive"),
            (b"\xfd7zXZ\0\0\x04", "an xz archive"),
            (b"\x28\xb5\x2f\xfd\x04\0", "a zstd archive"),
            (b"\x7fELF\x02\x01\x01\0", "(ELF)"),
            (b"\x93NUMPY\x01\0v\0", "a NumPy array"),
            (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
            (b"{\n  \"version\": \"1.0\"", JSON),
            (b"{\r\n\t\"error\": \"gone\"}", JSON),
            (b"\xef\xbb\xbf{\"a\": 1}", JSON),
            (b"[{\"prompt\": \"hi\"}]", JSON),
            (b"\n <!DOCTYPE HTML><html>", HTML),
            (b"<?xml version=\"1.0\"?><Error>", HTML),
            (b"IQ== 0\nIg== 1\n", TEXT),
            (b"3\none\ntwo\nthree\n", TEXT),
            ("naïve text, cut within a characte\u{e9}".as_bytes(), TEXT),
            (b"", "an empty file"),
        ];
        kinds.extend(others.map(|(bytes, kind)| (bytes.to_vec(), kind)));
        kinds
    }

    #[test]
    fn files_are_told_by_their_first_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let wanted = [
            (GivenAs::Model, ".bin file, or a directory"),
            (GivenAs::Shard, "fetch this one again"),
            (GivenAs::Configuration, "JSON object"),
            (GivenAs::Vocabulary, "a vocabulary is a tokenizer.bin"),
            (GivenAs::Tokenizer, "a tokenizer.json is a JSON object"),
            (GivenAs::Prompts, "prompts are a text"),
            (GivenAs::Logits, "what GETP_LOGITS writes"),
        ];
        for (bytes, kind) in kinds() {
            std::fs::write(&path, &bytes).unwrap();
            for (wanted, words) in wanted {
                let text = explain(&path, Error::Overflow("w_mlp1"), wanted).to_string();
                assert!(text.starts_with(&format!("{}: ", path.display())), "{text}");
                if wanted.is(kind) {
                    assert!(text.contains("w_mlp1 overflows") && !text.contains(words), "{text}");
                } else {
                    assert!(
                        text.contains("it is ") && text.contains(kind) && text.contains(words),
                        "{text}"
                    );
                }
            }
        }
    }

    /// The error of a file that is nothing known says so, and not only a number that was derived from it.
    #[test]
    fn other_files_are_not_guessed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut noise = 1_u32;
        let mut random = || {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (noise >> 24) as u8
        };
        let noise: Vec<u8> = (0..600).map(|_| random()).collect();
        for bytes in [
            &noise[..],
            &[0; 600],
            &[0xff; 600],
            &[50, 0, 0],
            b"\x80\x02\0\0\x40\0\0\0",
        ] {
            std::fs::write(&path, bytes).unwrap();
            let text = explain(&path, Error::Overflow("w_mlp1"), GivenAs::Model).to_string();
            assert!(
                text.contains("file: it is no model, or a damaged one (w_mlp1 overflows"),
                "{text}"
            );
        }
        let error = || Error::io(&path, std::io::Error::other("unreadable"));
        let text = explain(&path, error(), GivenAs::Model).to_string();
        assert_eq!(text, error().to_string());
    }

    #[test]
    fn directories_say_what_they_hold() {
        let dir = tempfile::tempdir().unwrap();
        let kinds = kinds();
        let text = |bytes: &[u8]| {
            std::fs::write(dir.path().join("model.bin"), bytes).unwrap();
            explain_directory(dir.path(), "config.json").to_string()
        };
        assert!(text(&kinds[0].0).contains("name its file model.bin itself"));
        assert!(text(b"GPT-OSS v1.0\0\0\0\0").contains("its file model.bin is the release's model for Metal"));
        assert!(text(&kinds[3].0).contains("model.bin is a PyTorch archive, which is not read: save the model as"));
        assert!(text(&[0xff; 9]).contains("a model is the evaluation program's .bin file"));
    }
}
