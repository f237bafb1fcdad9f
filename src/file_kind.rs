//! Better errors for a file or directory that is not a model or a vocabulary: recognizes common other kinds.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::Error;

/// What a model can be, for error messages.
pub const MODEL: &str = "a model is the evaluation program's .bin file, or a directory with config.json and its \
                         safetensors files";

/// What a vocabulary can be, for error messages.
pub const TOKENIZER: &str = "a vocabulary is a tokenizer.bin, as the example export_tokenizer writes it";

/// Kinds of files: an offset, the bytes there, and the kind's name.
const KINDS: [(usize, &[u8], &str); 9] = [
    (
        0,
        b"version https://git-lfs",
        "a Git LFS pointer instead of the file itself, which `git lfs pull` fetches",
    ),
    (0, b"GGUF", "a GGUF file"),
    (0, b"PK\x03\x04", "a PyTorch archive"),
    (0, b"\x80\x02\x8a\x0a", "an old PyTorch archive"),
    (8, b"{\"", "a safetensors file"),
    (0, b"{\"", "a JSON file"),
    (0, b"{\n", "a JSON file"),
    (0, b"{ ", "a JSON file"),
    (0, b"\x1f\x8b", "a gzip archive"),
];

/// An error that names the file's kind and what is `wanted` instead; `error` itself if the kind is not recognized.
pub fn explain(path: &Path, error: Error, wanted: &str) -> Error {
    let kind = if path.is_dir() {
        Some("a directory")
    } else {
        kind_of_file(path)
    };
    match kind {
        Some(kind) => Error::format(path.display().to_string(), format!("it is {kind}; {wanted}")),
        None => error,
    }
}

fn kind_of_file(path: &Path) -> Option<&'static str> {
    let mut start = Vec::new();
    File::open(path).ok()?.take(32).read_to_end(&mut start).ok()?;
    let is = |(at, bytes, _): &&(usize, &[u8], &str)| start.get(*at..).is_some_and(|start| start.starts_with(bytes));
    KINDS.iter().find(is).map(|(_, _, kind)| *kind)
}

/// The error for a directory without the file `missing`.
pub fn explain_directory(dir: &Path, missing: &str) -> Error {
    let has = |name: &str| dir.join(name).exists();
    let has_end = |end: &str| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries
            .into_iter()
            .any(|entry| entry.file_name().as_encoded_bytes().ends_with(end.as_bytes()))
    };
    let instead = if has("adapter_config.json") {
        "it holds an adapter, which is no model by itself: merge it into its base model first"
    } else if has("original/config.json") {
        "its directory original can be opened instead"
    } else if has_end(".gguf") {
        "it holds a GGUF file, which is not read: take the release's safetensors files"
    } else if has_end(".pt") || has_end(".pth") || has_end(".bin") {
        "it may hold PyTorch files, which are not read: save the model as safetensors, or name a .bin file itself"
    } else {
        MODEL
    };
    Error::format(
        dir.display().to_string(),
        format!("there is no {missing} in it; {instead}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_by_their_first_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for (bytes, kind) in [
            (
                &b"version https://git-lfs.github.com/spec/v1\noid"[..],
                Some("git lfs pull"),
            ),
            (b"GGUF\x03\0\0\0", Some("a GGUF file")),
            (b"PK\x03\x04rest", Some("a PyTorch archive")),
            (b"\x80\x02\x8a\x0al\xfc", Some("an old PyTorch archive")),
            (b"\x40\0\0\0\0\0\0\0{\"a\":", Some("a safetensors file")),
            (b"{\n  \"version\": \"1.0\"", Some("a JSON file")),
            (b"\x80\x11\x03\0\x40\x0b\0\0\x20\0\0\0", None),
            (b"", None),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let text = explain(&path, Error::Null("nothing else"), TOKENIZER).to_string();
            match kind {
                Some(kind) => assert!(text.contains(kind) && text.contains("tokenizer.bin"), "{text}"),
                None => assert!(text.starts_with("nothing else"), "{text}"),
            }
        }
    }
}
