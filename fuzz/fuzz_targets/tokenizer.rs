//! A `tokenizer.bin` is refused, or encodes as the contract says.
//!
//! The input is a text, behind its length in one byte, and then the file.

#![no_main]

#[path = "../../tests/common/bpe.rs"]
mod bpe;

use getp::tokenizer::{Tokenizer, read_entries};
use libfuzzer_sys::fuzz_target;

/// The oracle looks at every entry for every pair for every merge.
const MOST_ENTRIES: usize = 600;

fuzz_target!(|data: &[u8]| {
    let Some((&length, rest)) = data.split_first() else {
        return;
    };
    let Some((text, file)) = rest.split_at_checked(length.into()) else {
        return;
    };
    let Ok(tokenizer) = Tokenizer::parse(file) else { return };
    let (max_token_length, entries) = read_entries(file, "tokenizer.bin").expect("it has been parsed");
    assert_eq!(tokenizer.vocab_size(), entries.len());

    let tokens = tokenizer.encode(text, usize::MAX).unwrap();
    for most in [0, 1, tokens.len() / 2] {
        assert_eq!(tokenizer.encode(text, most).unwrap(), tokens[..most.min(tokens.len())]);
    }
    let pieces: Vec<u8> = tokens
        .iter()
        .flat_map(|&token| entries[token as usize].0)
        .copied()
        .collect();
    if text
        .iter()
        .all(|&byte| entries.iter().any(|&(entry, _)| entry == [byte]))
    {
        assert_eq!(pieces, text, "what is cut apart gives the text again");
    }
    for id in 0..entries.len() as u32 {
        tokenizer.decode_piece(id);
    }
    if entries.len() <= MOST_ENTRIES {
        let entries = entries.iter().map(|&(bytes, score)| (bytes.to_vec(), score)).collect();
        assert_eq!(tokens, bpe::oracle(&entries, max_token_length, text));
    }
});
