//! A `.bin` file is refused, or every tensor of it can be read and packed.

#![no_main]

use getp::checkpoint::{BinCheckpoint, CONFIG_BYTES, TensorLayout, config_from_bytes};
use getp_fuzz::read_all;
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;
use tempfile::TempDir;

static DIR: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().unwrap());
/// Far above what a seed has, so that dimensions can grow.
const MAX_FILE_BYTES: usize = 1 << 18;

fuzz_target!(|data: &[u8]| {
    open(data);
    if let Some(file) = filled(data) {
        open(&file);
    }
});

fn open(file: &[u8]) {
    let path = DIR.path().join("model.bin");
    std::fs::write(&path, file).unwrap();
    if let Ok(checkpoint) = BinCheckpoint::open(&path) {
        read_all(&checkpoint);
    }
}

/// The file of as many bytes as its header asks for, which no mutation hits by chance; its values are repeated.
fn filled(data: &[u8]) -> Option<Vec<u8>> {
    let (header, values) = data.split_first_chunk::<CONFIG_BYTES>()?;
    let bytes = TensorLayout::new(config_from_bytes(header).ok()?).ok()?.file_bytes();
    (bytes <= MAX_FILE_BYTES && !values.is_empty()).then(|| {
        let values = values.iter().cycle().copied();
        header.iter().copied().chain(values).take(bytes).collect()
    })
}
