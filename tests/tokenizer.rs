//! The tokenizer: compared with a plain implementation of the eval program's rule and with tiktoken, and timed.

#[path = "common/bpe.rs"]
mod bpe;
#[allow(dead_code)] // its command line is not used here
#[path = "../examples/export_tokenizer.rs"]
mod export_tokenizer;

use bpe::{Entries, oracle};
use getp::tokenizer::Tokenizer;
use proptest::prelude::*;
use std::time::{Duration, Instant};

/// Long enough for the prompts that the contract speaks of.
const PROMPT_BYTES: usize = 100_000;
/// A quadratic algorithm takes far longer in every build profile.
const PROMPT_TIME: Duration = Duration::from_secs(1);

/// o200k has the 256 bytes in the order of GPT-2, in which NUL comes behind the 188 printable ones.
const NUL_ID: u32 = 188;

/// Bytes of a small alphabet, so that many tokens match: letters, a digit, NUL and a byte that is not UTF-8.
fn byte() -> impl Strategy<Value = u8> {
    prop_oneof![6 => Just(b'a'), 4 => Just(b'b'), 2 => Just(b'c'), 1 => Just(b'7'), 1 => Just(0), 1 => Just(0xFF)]
}

fn vocabulary() -> impl Strategy<Value = Entries> {
    let score = prop_oneof![8 => Just(-1.0_f32), 1 => Just(-1e30), 1 => Just(f32::NAN)];
    let bytes = prop_oneof![
        1 => prop::collection::vec(byte(), 0..2),
        4 => prop::collection::vec(byte(), 2..4),
        2 => prop::collection::vec(byte(), 4..9),
    ];
    prop::collection::vec((bytes, score), 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        rng_seed: proptest::test_runner::RngSeed::Fixed(20),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn encoding_follows_the_oracle(
        entries in vocabulary(),
        max_token_length in 0_usize..10,
        text in prop::collection::vec(byte(), 0..60),
        max_tokens in prop_oneof![3 => Just(usize::MAX), 1 => 0_usize..30],
    ) {
        let tokenizer = Tokenizer::new(entries.iter().map(|(b, s)| (b, *s)), max_token_length).unwrap();
        let mut expected = oracle(&entries, max_token_length, &text);
        expected.truncate(max_tokens);
        prop_assert_eq!(tokenizer.encode(&text, max_tokens).unwrap(), expected);
    }

    #[test]
    fn a_vocabulary_survives_its_file(entries in vocabulary(), text in prop::collection::vec(byte(), 0..40)) {
        prop_assume!(!entries.is_empty());
        let mut file = Vec::new();
        export_tokenizer::write(&mut file, &entries).unwrap();
        let tokenizer = Tokenizer::parse(&file).unwrap();
        prop_assert_eq!(tokenizer.vocab_size(), entries.len());
        for (id, (bytes, _)) in entries.iter().enumerate() {
            prop_assert_eq!(tokenizer.decode_piece(id as u32), bytes);
        }
        prop_assert_eq!(tokenizer.encode(&text, 99).unwrap(), oracle(&entries, tokenizer.max_token_length(), &text));
    }

    #[test]
    fn garbage_is_parsed_or_refused(
        data in prop::collection::vec(prop_oneof![3 => Just(0_u8), 1 => any::<u8>()], 0..80)
    ) {
        if let Ok(tokenizer) = Tokenizer::parse(&data) {
            prop_assert!(tokenizer.vocab_size() * 8 <= data.len());
            tokenizer.encode(&data, 99).unwrap();
        }
    }
}

/// Powers of two of one letter: merges cascade as far as they can.
fn powers_of_a() -> Entries {
    (0..=13).map(|power| (vec![b'a'; 1 << power], -1.0)).collect()
}

/// A letter and tokens that extend it byte by byte: the longest tokens are searched most often.
fn growing_on_b() -> Entries {
    let grown = (0..1000).map(|length| [b"b".to_vec(), vec![b'a'; length]].concat());
    [b"a".to_vec()]
        .into_iter()
        .chain(grown)
        .map(|bytes| (bytes, -1.0))
        .collect()
}

fn timed_encode(tokenizer: &Tokenizer, text: &[u8]) -> Vec<u32> {
    let start = Instant::now();
    let tokens = tokenizer.encode(text, usize::MAX).unwrap();
    let elapsed = start.elapsed();
    println!("{} bytes, {} tokens, {elapsed:?}", text.len(), tokens.len());
    assert!(elapsed < PROMPT_TIME, "{} bytes took {elapsed:?}", text.len());
    tokens
}

#[test]
fn long_pieces_of_long_tokens_are_encoded_in_time() {
    let one_letter = vec![b'a'; PROMPT_BYTES];
    let growing = [b"b".to_vec(), vec![b'a'; 999]].concat().repeat(PROMPT_BYTES / 1000);
    for (entries, text) in [(powers_of_a(), one_letter), (growing_on_b(), growing)] {
        let tokenizer = Tokenizer::new(entries.clone(), usize::MAX).unwrap();
        let tokens = timed_encode(&tokenizer, &text);
        let decoded: Vec<u8> = tokens
            .iter()
            .flat_map(|&t| tokenizer.decode_piece(t))
            .copied()
            .collect();
        assert_eq!(decoded, text);
        assert_eq!(
            tokenizer.encode(&text[..300], 999).unwrap(),
            oracle(&entries, usize::MAX, &text[..300])
        );
    }
}

/// o200k_harmony as it is exported, and tiktoken itself. The two agree where tiktoken's cutting into words does not
/// matter: where no merge of a low id crosses a border between words.
#[test]
fn o200k_harmony_encodes_as_tiktoken_does_and_in_time() {
    let mut file = Vec::new();
    export_tokenizer::write(&mut file, &export_tokenizer::entries().unwrap()).unwrap();
    // The file that the evaluation program's export_tokenizer_bin.py writes with tiktoken 0.14.
    assert_eq!((file.len(), fnv1a(&file)), (3_027_019, 0x7e83_3513_d422_bddf));
    let tokenizer = Tokenizer::parse(&file).unwrap();
    let tiktoken = tiktoken_rs::o200k_harmony().unwrap();
    the_export_has_its_specials(&tokenizer);
    every_ordinary_token_encodes_to_itself(&tokenizer);
    for text in [
        "hello",
        " hello",
        " tokenization",
        " antidisestablishmentarianism",
        "Internationalization",
        "The quick brown fox jumps over the lazy dog.",
        "What is the capital of France?",
        " In 1969, 600 million people watched 1234567 things",
        "Größe, naïve café, 東京",
        "\u{1F600}",
    ] {
        assert_eq!(
            tokenizer.encode(text.as_bytes(), 999).unwrap(),
            tiktoken.encode_ordinary(text),
            "{text:?}"
        );
    }
    let prose = "The quick brown fox jumps over the lazy dog, and then it sleeps.\n".repeat(PROMPT_BYTES / 65);
    for text in [prose.as_bytes(), &vec![b'a'; PROMPT_BYTES], &vec![b' '; PROMPT_BYTES]] {
        timed_encode(&tokenizer, text);
    }
}

/// The 64-bit hash of Fowler, Noll and Vo (1a).
fn fnv1a(bytes: &[u8]) -> u64 {
    let mix = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, mix)
}

fn the_export_has_its_specials(tokenizer: &Tokenizer) {
    assert_eq!(tokenizer.vocab_size(), export_tokenizer::VOCAB_SIZE as usize);
    for (id, name) in [
        (199_998, "<|startoftext|>"),
        (199_999, "<|endoftext|>"),
        (200_002, "<|return|>"),
        (200_003, "<|constrain|>"),
        (200_005, "<|channel|>"),
        (200_006, "<|start|>"),
        (200_007, "<|end|>"),
        (200_008, "<|message|>"),
        (200_012, "<|call|>"),
        // o200k_base names it <|endofprompt|>; o200k_harmony has both names, and the later counts.
        (200_018, "<|reserved_200018|>"),
        (201_087, "<|reserved_201087|>"),
    ] {
        assert_eq!(tokenizer.decode_piece(id), name.as_bytes());
        let tokens = tokenizer.encode(name.as_bytes(), 99).unwrap();
        assert!(tokens.iter().all(|&token| token < 199_998), "{name}: {tokens:?}");
    }
    assert_eq!(tokenizer.decode_piece(NUL_ID), [0]);
}

/// Byte-pair encoding learns a token by merging two, so the tokens' own bytes lead to every one of them. All but NUL's,
/// whose entry is its name.
fn every_ordinary_token_encodes_to_itself(tokenizer: &Tokenizer) {
    for id in (0..199_998).filter(|&id| id != NUL_ID) {
        assert_eq!(tokenizer.encode(tokenizer.decode_piece(id), 99).unwrap(), [id]);
    }
}
