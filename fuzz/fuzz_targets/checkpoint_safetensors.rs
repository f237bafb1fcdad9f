//! A Hugging Face directory is refused, or every tensor of it can be read and packed.
//!
//! The input is `config.json` and the index, each behind its length in two bytes, little endian, and then
//! `model.safetensors`. An empty index is none.

#![no_main]

use getp::checkpoint::SafetensorsCheckpoint;
use getp_fuzz::read_all;
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;
use tempfile::TempDir;

static DIR: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().unwrap());

fuzz_target!(|data: &[u8]| {
    let Some((config, rest)) = split_file(data) else { return };
    let Some((index, model)) = split_file(rest) else { return };
    let dir = DIR.path();
    let index_path = dir.join("model.safetensors.index.json");
    std::fs::write(dir.join("config.json"), config).unwrap();
    std::fs::write(dir.join("model.safetensors"), model).unwrap();
    if index.is_empty() {
        let _ = std::fs::remove_file(index_path); // there is none if the input before had none
    } else {
        std::fs::write(index_path, index).unwrap();
    }
    if let Ok(checkpoint) = SafetensorsCheckpoint::open(dir) {
        read_all(&checkpoint);
    }
});

fn split_file(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = data.split_first_chunk()?;
    rest.split_at_checked(u16::from_le_bytes(*length).into())
}
