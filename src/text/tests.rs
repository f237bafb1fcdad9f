use super::*;
use proptest::prelude::*;
use std::sync::{Arc, LazyLock};

static TOKENIZER: LazyLock<Arc<TextTokenizer>> = LazyLock::new(|| Arc::new(tokenizer()));

/// A `tokenizer.bin` with pieces of characters, an entry that is no UTF-8, and special tokens.
fn tokenizer() -> TextTokenizer {
    tokenizer_of(8, f32::from, &[(256.0, "é"), (-1e30, "<|end|>")])
}

/// A `tokenizer.bin` of all bytes, with these scores, and of more entries behind them.
pub fn tokenizer_of(longest: u32, score: impl Fn(u8) -> f32, more: &[(f32, &str)]) -> TextTokenizer {
    let entry = |score: f32, bytes: &[u8]| {
        let length = bytes.len() as u32;
        [&score.to_le_bytes(), &length.to_le_bytes(), bytes].concat()
    };
    let mut file = longest.to_le_bytes().to_vec();
    (0..=u8::MAX).for_each(|byte| file.extend(entry(score(byte), &[byte])));
    more.iter()
        .for_each(|&(score, text)| file.extend(entry(score, text.as_bytes())));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.bin");
    std::fs::write(&path, file).unwrap();
    TextTokenizer::open(&path).unwrap()
}

#[test]
fn special_tokens_are_text_unless_the_caller_asks() {
    let tokenizer = &TOKENIZER;
    let text = "é<|end|>".as_bytes();
    let ids = tokenizer.encode(text, Specials::Text).unwrap();
    assert_eq!(ids[0], 256);
    assert_eq!(ids.len(), 8);
    assert_eq!(tokenizer.decode(ids, Specials::Text).unwrap(), text);
    assert_eq!(tokenizer.special("<|end|>"), Some(257));
    assert_eq!(tokenizer.special("é"), None);
    assert_eq!(tokenizer.decode([65, 257, 999], Specials::Text).unwrap(), b"A");
    assert_eq!(tokenizer.decode([65, 257, 999], Specials::Tokens).unwrap(), b"A<|end|>");
    let error = tokenizer.encode(text, Specials::Tokens).unwrap_err().to_string();
    assert!(error.contains("opened of a tokenizer.bin"), "{error}");
}

#[test]
fn a_character_comes_when_it_is_whole() {
    let mut decoder = Decoder::new(TOKENIZER.clone(), Specials::Text);
    let euro = "€".as_bytes().iter().map(|&byte| u32::from(byte)).collect::<Vec<_>>();
    assert_eq!(decoder.next([65, euro[0]]).unwrap(), "A");
    assert_eq!(decoder.next([euro[1]]).unwrap(), "");
    assert_eq!(decoder.next([euro[2], 66]).unwrap(), "€B");
    // A byte that begins a character, and one that does not go on with it.
    assert_eq!(decoder.next([euro[0], 67]).unwrap(), "\u{FFFD}C");
    assert_eq!(decoder.next([euro[0], euro[1]]).unwrap(), "");
    assert_eq!(decoder.end(), "\u{FFFD}");
    assert_eq!(decoder.end(), "");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1000,
        rng_seed: proptest::test_runner::RngSeed::Fixed(33),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Whatever the bytes are and however they come.
    #[test]
    fn pieces_of_a_stream_are_the_whole(
        bytes in prop::collection::vec(prop_oneof![
            any::<u8>(),
            prop::sample::select(vec![0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9, 0xED, 0xA0]),
        ], 0..40),
        cuts in prop::collection::vec(0_usize..5, 0..40),
    ) {
        let mut decoder = Decoder::new(TOKENIZER.clone(), Specials::Text);
        let mut rest = bytes.as_slice();
        let mut text = String::new();
        for cut in cuts {
            let (piece, behind) = rest.split_at(cut.min(rest.len()));
            text += &decoder.next(piece.iter().map(|&byte| u32::from(byte))).unwrap();
            rest = behind;
        }
        text += &decoder.next(rest.iter().map(|&byte| u32::from(byte))).unwrap();
        text += &decoder.end();
        prop_assert_eq!(text, String::from_utf8_lossy(&bytes).into_owned());
    }
}
