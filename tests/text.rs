//! A checkpoint's own tokenizer against tiktoken, on the vocabulary and in the form of the released models, and what
//! the C API makes of it.

#[allow(dead_code)] // its command line is not used here
#[path = "../examples/export_tokenizer.rs"]
mod export_tokenizer;

use getp::text::{Decoder, Source, Specials, TextTokenizer};
use proptest::prelude::*;
use std::ffi::CString;
use std::fs;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Instant;
use tempfile::TempDir;
use tiktoken_rs::CoreBPE;

/// A directory as the released models' are, but for its weights.
static DIRECTORY: LazyLock<TempDir> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let mut entries = export_tokenizer::entries().unwrap();
    entries.truncate(export_tokenizer::END_OF_NAMES as usize);
    let mut file = Vec::new();
    export_tokenizer::write_json(&mut file, &entries).unwrap();
    fs::write(dir.path().join("tokenizer.json"), file).unwrap();
    let vocab_size = export_tokenizer::VOCAB_SIZE;
    fs::write(
        dir.path().join("config.json"),
        format!("{{\"vocab_size\": {vocab_size}}}"),
    )
    .unwrap();
    dir
});
static TOKENIZER: LazyLock<Arc<TextTokenizer>> =
    LazyLock::new(|| Arc::new(TextTokenizer::open(DIRECTORY.path()).unwrap()));
static TIKTOKEN: LazyLock<CoreBPE> = LazyLock::new(|| tiktoken_rs::o200k_harmony().unwrap());

fn encode(text: &str) -> Vec<u32> {
    TOKENIZER.encode(text.as_bytes(), Specials::Text).unwrap()
}

/// The ids are tiktoken's, and the text comes back, whole and in pieces.
fn check(text: &str) {
    let ids = encode(text);
    let expected = TIKTOKEN.encode_ordinary(text);
    if ids != expected {
        let at = ids.iter().zip(&expected).take_while(|(a, b)| a == b).count();
        let around = |ids: &[u32]| ids[at.saturating_sub(2)..(at + 5).min(ids.len())].to_vec();
        panic!(
            "{:?} where tiktoken has {:?}: {text:.300?}",
            around(&ids),
            around(&expected)
        );
    }
    assert_eq!(
        TOKENIZER.decode(ids.iter().copied(), Specials::Text).unwrap(),
        text.as_bytes()
    );
    let mut decoder = Decoder::new(TOKENIZER.clone(), Specials::Text);
    let streamed: String = ids.iter().map(|&id| decoder.next([id]).unwrap()).collect();
    assert_eq!(streamed, text);
    assert_eq!(decoder.end(), "");
}

/// Characters of many scripts, and those that the cutting into words looks at.
fn character() -> impl Strategy<Value = char> {
    let range = |from: u32, to: u32| (from..=to).prop_filter_map("a surrogate", char::from_u32);
    prop_oneof![
        6 => prop::char::range(' ', '~'),
        3 => prop::sample::select(vec![' ', ' ', '\n', '\r', '\t', '\'', '/', '\u{a0}', '\u{3000}', '\u{2028}', '\0']),
        2 => range(0xA1, 0x24F),
        1 => range(0x300, 0x36F),
        2 => range(0x370, 0x52F),
        1 => range(0x590, 0x7BF),
        1 => range(0x900, 0xDFF),
        1 => range(0x1E00, 0x218F),
        2 => range(0x3040, 0x9FFF),
        1 => range(0xAC00, 0xD7A3),
        1 => range(0x1F300, 0x1FAFF),
        1 => range(0, 0x10_FFFF),
    ]
}

/// Pieces of text whose borders matter: contractions, digits, blanks before words and lines.
fn piece() -> impl Strategy<Value = String> {
    let words = [
        "'s",
        "'T",
        "'re",
        "'VE",
        "'ll",
        "I'd",
        "don't",
        "L'été",
        "007",
        "1234567",
        "٣٤٥",
        "½",
        "  ",
        " \n",
        "\r\n\r\n",
        "://",
        "/\n/",
        "...\n",
        "camelCase",
        "HTTPServer",
        "snake_case",
        "naïve",
        "Größe",
        "東京都",
        "สวัสดี",
        "नमस्ते",
        "👩‍👩‍👧‍👦",
        "🇫🇷",
        "e\u{301}",
        "ǅ",
        "\u{FEFF}",
        "<|start|>",
        "<|end|>",
        "<|return|>",
        "<|reserved_200013|>",
        "|>",
        "<|",
        "\u{200D}",
        "\t\t",
        "    return",
        "};\n",
        "﷽",
    ];
    prop_oneof![
        3 => prop::sample::select(words.to_vec()).prop_map(str::to_owned),
        3 => prop::collection::vec(character(), 0..6).prop_map(String::from_iter),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 4000,
        rng_seed: proptest::test_runner::RngSeed::Fixed(200),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn texts_have_tiktoken_s_ids(pieces in prop::collection::vec(piece(), 0..24)) {
        check(&pieces.concat());
    }

    #[test]
    fn special_tokens_are_found_where_they_are_asked_for(pieces in prop::collection::vec(piece(), 0..12)) {
        let text = pieces.concat();
        let ids = TOKENIZER.encode(text.as_bytes(), Specials::Tokens).unwrap();
        prop_assert_eq!(&ids, &TIKTOKEN.encode_with_special_tokens(&text));
        prop_assert_eq!(TOKENIZER.decode(ids, Specials::Tokens).unwrap(), text.into_bytes());
    }
}

/// The files of this repository: Rust, C, C++, HIP, Python, shell, TOML, SVG, Markdown; whole, and line by line.
#[test]
fn code_and_prose_have_tiktoken_s_ids() {
    let mut texts = 0;
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && !path.is_symlink() && !["target", "build", ".git"].contains(&name.as_str()) {
                folders.push(path);
            } else if let Some(text) = fs::read_to_string(&path).ok().filter(|text| text.len() < 200_000) {
                check(&text);
                text.lines().step_by(7).for_each(check);
                texts += 1;
            }
        }
    }
    assert!(texts > 300, "{texts} files");
}

#[test]
fn every_character_has_tiktoken_s_ids() {
    let all: Vec<char> = (0..=0x10_FFFF).filter_map(char::from_u32).collect();
    for chunk in all.chunks(4096) {
        check(&String::from_iter(chunk));
    }
    // Between letters and behind blanks each is looked at by itself.
    for chunk in all[..0x3_0000].chunks(1024) {
        check(&chunk.iter().map(|c| format!("a{c}B {c} ")).collect::<String>());
    }
}

/// Pieces of a length that a quadratic algorithm would not end with, or a regular expression give up on.
#[test]
fn long_runs_have_tiktoken_s_ids() {
    for unit in ["a", " ", "\n", "\u{3000}", "7", "!", "é", "ab", " a", "\r\n", "👩‍👩‍👧‍👦"] {
        let start = Instant::now();
        let text = unit.repeat(100_000) + "x";
        check(&text);
        println!("{unit:?}: {:?}", start.elapsed());
    }
}

/// What a regular expression would give up on, and other tokens follow from, is refused.
#[test]
fn the_longest_run_of_blanks_has_tiktoken_s_ids() {
    for blank in [" ", "\n", "\u{3000}"] {
        let text = blank.repeat(500_000) + "x";
        assert_eq!(encode(&text), TIKTOKEN.encode_ordinary(&text));
        let longer = format!("a{blank}{text}");
        let error = TOKENIZER
            .encode(longer.as_bytes(), Specials::Text)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("more than 500000 characters of white space in a row"),
            "{error}"
        );
    }
}

/// The program's struct is the one of a `tokenizer.bin` of all ids that the model has logits for.
#[test]
fn entries_are_those_of_the_program_s_file() {
    let source = Source::read(&DIRECTORY.path().join("tokenizer.json")).unwrap();
    let (_, entries) = source.entries().unwrap();
    let program_s = export_tokenizer::entries().unwrap();
    assert_eq!(entries.len(), program_s.len());
    for (id, (entry, (bytes, score))) in entries.iter().zip(&program_s).enumerate() {
        let name = if id == 200_018 {
            b"<|endofprompt|>"
        } else {
            bytes.as_slice()
        };
        assert_eq!(*entry, (name, *score), "{id}");
    }
    // Ids without a token are decoded to nothing.
    let decoded = |specials| {
        TOKENIZER
            .decode([200_018, 200_019, 201_087, u32::MAX], specials)
            .unwrap()
    };
    assert_eq!(decoded(Specials::Text), b"");
    assert_eq!(decoded(Specials::Tokens), b"<|endofprompt|>");
    // Also where no config.json stands beside the file.
    let alone = tempfile::tempdir().unwrap();
    let path = alone.path().join("renamed");
    fs::copy(DIRECTORY.path().join("tokenizer.json"), &path).unwrap();
    assert_eq!(
        Source::read(&path).unwrap().entries().unwrap().1.len(),
        export_tokenizer::VOCAB_SIZE as usize
    );
}

/// A small file in the form of the released one, changed.
fn small(change: impl Fn(&mut serde_json::Value)) -> Result<TextTokenizer, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let mut entries = export_tokenizer::entries().unwrap();
    let specials = entries.drain(199_998..).take(2).collect::<Vec<_>>();
    entries.truncate(300);
    entries.extend(specials);
    let mut file = Vec::new();
    export_tokenizer::write_json(&mut file, &entries).unwrap();
    let mut json = serde_json::from_slice(&file).unwrap();
    change(&mut json);
    fs::write(&path, json.to_string()).unwrap();
    TextTokenizer::open(&path).map_err(|error| error.to_string())
}

#[test]
fn files_that_would_give_other_tokens_are_refused() {
    use serde_json::json;
    let tokenizer = small(|_| ()).unwrap();
    let text = "a the <|endoftext|>";
    let ids = tokenizer.encode(text.as_bytes(), Specials::Tokens).unwrap();
    assert_eq!(ids.last(), Some(&301));
    assert_eq!(tokenizer.decode(ids, Specials::Tokens).unwrap(), text.as_bytes());
    let error = tokenizer.encode(b"a\xff", Specials::Text).unwrap_err().to_string();
    assert!(error.contains("not UTF-8 at byte 1"), "{error}");
    // What is for training and for a frame changes nothing.
    let changed = small(|json| {
        json["truncation"] = json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
        json["post_processor"] = json!(null);
        json["added_tokens"][1]["special"] = json!(false);
    });
    let ids = changed.unwrap().encode(text.as_bytes(), Specials::Text).unwrap();
    assert!(ids.len() > 3 && ids.last() == Some(&301), "{ids:?}");
    type Change<'a> = &'a dyn Fn(&mut serde_json::Value);
    let wrong: [(Change<'_>, &str); 9] = [
        (&|json| json["version"] = json!("2.0"), "version is \"2.0\""),
        (&|json| json["model"]["type"] = json!("Unigram"), "expected BPE"),
        (&|json| json["model"]["dropout"] = json!(0.1), "model.dropout is 0.1"),
        (
            &|json| json["decoder"] = json!(null),
            "decoder is not of the type ByteLevel",
        ),
        (
            &|json| json["decoder"] = json!({"type": "Fuse"}),
            "decoder is not of the type ByteLevel",
        ),
        (&|json| json["added_tokens"][0]["id"] = json!(310), "has the id 310"),
        (
            &|json| json["model"]["vocab"]["\u{4e00}"] = json!(299),
            "stands for no byte",
        ),
        (&|json| json["model"]["vocab"]["x"] = json!(1 << 24), "at most 16777216"),
        (
            &|json| json["model"]["vocab"]["<0x41>"] = json!(299),
            "the name of a byte",
        ),
    ];
    for (change, words) in wrong {
        let error = small(change).err().expect(words);
        assert!(error.contains(words) && error.contains("tokenizer.json"), "{error}");
    }
}

#[test]
fn what_is_no_tokenizer_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |path: &Path| TextTokenizer::open(path).err().unwrap().to_string();
    assert!(refused(dir.path()).contains("there is no tokenizer.json in it"));
    let path = dir.path().join("tokenizer.json");
    for (bytes, words) in [
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:1",
            "git lfs pull",
        ),
        ("<!DOCTYPE html><html>", "a web page"),
        ("{\"model\"", "EOF while parsing"),
        ("{\"version\": \"1.0\"}", "missing field `model`"),
        (
            "{\"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space",
            "EOF while parsing",
        ),
        ("", "an empty file"),
    ] {
        fs::write(&path, bytes).unwrap();
        let error = refused(dir.path());
        assert!(error.contains(words) && error.contains("tokenizer.json"), "{error}");
    }
}

/// The functions of the C API with a directory.
#[test]
fn the_c_functions_encode_and_decode() {
    use getp::abi::{library::*, options::GETP_ON, status::*, text::*, tokenizer::*};
    use std::ffi::c_int;
    use std::ptr::{null, null_mut};
    let path = CString::new(DIRECTORY.path().to_str().unwrap()).unwrap();
    // SAFETY: paths, handles and structs of this test's own.
    unsafe {
        let tokenizer = getp_tokenizer_open(path.as_ptr());
        assert!(!tokenizer.is_null());
        let mut options: TextOptions = std::mem::zeroed();
        assert_eq!(
            getp_text_options_init_sized(&mut options, size_of::<TextOptions>()),
            GETP_OK
        );
        let bytes = |text: *const Text| {
            let bytes = std::slice::from_raw_parts((*text).bytes.cast::<u8>(), (*text).length + 1).to_vec();
            assert_eq!(((*text).size, bytes.last()), (size_of::<Text>(), Some(&0)));
            getp_text_free(text);
            bytes[..bytes.len() - 1].to_vec()
        };
        for on in [false, true] {
            if on {
                options.specials = GETP_ON;
            }
            let options = if on { &raw const options } else { null() };
            let text = "<|start|>user<|message|>é\0";
            let tokens = getp_tokenizer_encode(tokenizer, text.as_ptr().cast(), text.len(), options);
            let ids = std::slice::from_raw_parts((*tokens).ids, (*tokens).count);
            assert_eq!(ids.contains(&200_006), on);
            assert_eq!(
                bytes(getp_tokenizer_decode(tokenizer, ids.as_ptr(), ids.len(), options)),
                text.as_bytes()
            );
            getp_tokens_free(tokens);
        }
        let tokens = getp_tokenizer_encode(tokenizer, null(), 0, null());
        assert_eq!((*tokens).count, 0);
        getp_tokens_free(tokens);
        assert_eq!(bytes(getp_tokenizer_decode(tokenizer, [-1].as_ptr(), 1, null())), b"");

        let ids: Vec<c_int> = encode("👩‍👩‍👧").into_iter().map(u32::cast_signed).collect();
        let decoder = getp_decoder_open(tokenizer, null());
        assert!(getp_tokenizer_encode(tokenizer, c"\xff".as_ptr(), 1, null()).is_null());
        assert_eq!(getp_last_status(), GETP_BAD_ARGUMENT);
        options.specials = 7;
        assert!(getp_decoder_open(tokenizer, &options).is_null());
        options.size = 3;
        assert!(getp_decoder_open(tokenizer, &options).is_null());
        getp_tokenizer_close(tokenizer);
        let mut length = 9;
        let mut text = Vec::new();
        for id in &ids {
            let piece = getp_decoder_next(decoder, id, 1, &mut length).cast::<u8>();
            let piece = std::slice::from_raw_parts(piece, length + 1);
            assert!(piece[length] == 0 && std::str::from_utf8(piece).is_ok());
            text.extend_from_slice(&piece[..length]);
        }
        assert_eq!(text, "👩‍👩‍👧".as_bytes());
        getp_decoder_next(decoder, ids.as_ptr(), 1, &mut length);
        assert_eq!(length, 0);
        let rest = getp_decoder_end(decoder, &mut length).cast::<u8>();
        assert_eq!(std::slice::from_raw_parts(rest, length), "\u{FFFD}".as_bytes());
        assert!(getp_decoder_next(null_mut(), null(), 0, &mut length).is_null());
        getp_decoder_close(decoder);
        getp_decoder_close(null_mut());
        getp_text_free(null());
        getp_tokens_free(null());
        assert!(getp_tokenizer_encode(null(), null(), 0, null()).is_null());
    }
}

/// An answer that goes on with a message: its text is that message's, while it comes and as a whole.
#[test]
fn a_reader_in_c_goes_on_with_a_message() {
    use getp::abi::{harmony::*, text::*, tokenizer::*};
    use std::ffi::{c_char, c_int};
    let path = CString::new(DIRECTORY.path().to_str().unwrap()).unwrap();
    let conversation = r#"{"continue_final_message": true, "messages": [
        {"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, "}]}"#;
    let no_continuation = r#"[{"role": "user", "content": "Count"}]"#;
    let bytes = |json: &str| (json.as_ptr().cast::<c_char>(), json.len());
    let mut ids: Vec<c_int> = encode("two.").iter().map(|id| id.cast_signed()).collect();
    ids.push(200_002);
    // SAFETY: paths, handles and structs of this test's own.
    unsafe {
        let text = |given: *const Text| {
            assert!(!given.is_null());
            let bytes = std::slice::from_raw_parts((*given).bytes.cast::<u8>(), (*given).length).to_vec();
            getp_text_free(given);
            serde_json::from_slice::<serde_json::Value>(&bytes).unwrap()
        };
        let tokenizer = getp_tokenizer_open(path.as_ptr());
        for (json, channel) in [(conversation, Some("final")), (no_continuation, None)] {
            let (json, length) = bytes(json);
            let reader = getp_harmony_reader_open_for(tokenizer, json, length);
            let pieces = text(getp_harmony_reader_next(reader, ids.as_ptr(), ids.len()));
            assert_eq!(pieces[0]["channel"].as_str(), channel, "{pieces}");
            let whole = text(getp_harmony_reader_end(reader));
            assert_eq!(whole["message"]["content"], "two.", "{whole}");
            assert_eq!(whole["messages"][0]["channel"].as_str(), channel, "{whole}");
            assert_eq!(whole["finish_reason"], "stop");
            getp_harmony_reader_close(reader);
        }
        // An answer that is no message is text, which only its end shows.
        let reader = getp_harmony_reader_open(tokenizer);
        assert_eq!(
            text(getp_harmony_reader_next(reader, ids.as_ptr(), ids.len() - 1)),
            serde_json::json!([])
        );
        assert_eq!(text(getp_harmony_reader_finish(reader))[0]["content"], "two.");
        assert_eq!(text(getp_harmony_reader_end(reader))["message"]["content"], "two.");
        assert!(getp_harmony_reader_finish(std::ptr::null_mut()).is_null());
        getp_harmony_reader_close(reader);
        let (json, length) = bytes("[{");
        assert!(getp_harmony_reader_open_for(tokenizer, json, length).is_null());
        assert!(getp_harmony_reader_open_for(std::ptr::null(), json, length).is_null());
        getp_tokenizer_close(tokenizer);
    }
}
