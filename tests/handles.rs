//! The interface for programs without the eval program's structs: options, handles, the shared library.

mod fake;

use fake::{Control, Program, VOCAB, expected, expected_ending, finish, inference, last_error, quiet, vocabulary_file};
use getp::abi::lifecycle;
use getp::checkpoint::{CONFIG_BYTES, TensorLayout, config_from_bytes};
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

fn c_path(path: &Path) -> CString {
    CString::new(path.to_str().unwrap()).unwrap()
}

#[test]
fn options_are_checked() {
    use getp::abi::options::{
        GETP_ANSWER, GETP_FAST, GETP_OFF, GETP_ON, GETP_TOKENS, Options, getp_options_init_sized,
    };
    use getp::options::{DeviceChoice, Print};
    let mut options = Options {
        size: 3,
        ..Options::default()
    };
    // SAFETY: its own struct.
    unsafe { getp_options_init_sized(&mut options, size_of::<Options>()) };
    assert_eq!(options.size, 80);
    // SAFETY: the sizes are refused or the struct's, `logits` and `device` are NULL or C strings in all of them.
    let choices = |options: Options| unsafe { Options::read(&options)?.choices() };
    let default = choices(options).unwrap();
    assert!(default.threads.is_none() && default.print.is_none() && default.logits.is_none());
    let chosen = Options {
        precision: GETP_FAST,
        max_batch: 5,
        print: GETP_OFF,
        profile: GETP_ON,
        strict: GETP_ON,
        logits: c"/tmp/x".as_ptr(),
        device: c"cpu".as_ptr(),
        group: 2,
        device_mb: 65_536,
        ..options
    };
    let chosen = choices(chosen).unwrap();
    assert_eq!((chosen.group, chosen.device_mb), (Some(Some(2)), Some(65_536)));
    assert_eq!(
        (chosen.max_batch, chosen.print, chosen.profile, chosen.strict),
        (Some(Some(5)), Some(Print::Nothing), Some(true), Some(true))
    );
    // A program compiled with an older header has not set the field.
    let before = Options {
        size: 56,
        strict: GETP_ON,
        ..options
    };
    assert_eq!(choices(before).unwrap().strict, None);
    let before = Options {
        size: 64,
        strict: GETP_ON,
        group: 2,
        ..options
    };
    let before = choices(before).unwrap();
    assert_eq!((before.strict, before.group), (Some(true), None));
    let before = Options {
        size: 72,
        device_mb: 7,
        steps: GETP_TOKENS,
        ..options
    };
    let before = choices(before).unwrap();
    assert_eq!((before.device_mb, before.steps), (Some(7), None));
    for (print, expected) in [(GETP_ON, Print::Text), (GETP_ANSWER, Print::Answer)] {
        assert_eq!(choices(Options { print, ..options }).unwrap().print, Some(expected));
    }
    assert_eq!(chosen.logits.clone().flatten().as_deref(), Some(Path::new("/tmp/x")));
    assert_eq!(chosen.device, Some(DeviceChoice::Cpu));
    for (wrong, word) in [
        (Options { size: 0, ..options }, "getp_options.size=0"),
        (Options { size: 52, ..options }, "getp_options.size=52"),
        (
            Options {
                size: usize::MAX,
                ..options
            },
            "is not known; use 80",
        ),
        (Options { threads: -1, ..options }, "getp_options.threads=-1"),
        (
            Options {
                precision: 9,
                ..options
            },
            "GETP_EXACT or GETP_FAST",
        ),
        (
            Options {
                device: c"gpu".as_ptr(),
                ..options
            },
            "getp_options.device=gpu is not known; use auto, cpu, hip",
        ),
        (
            Options {
                threads: 5000,
                ..options
            },
            "getp_options.threads=5000 is not known; use a number from 0 to 4096",
        ),
        (
            Options {
                max_batch: 1 << 17,
                ..options
            },
            "getp_options.max_batch=131072 is not known; use a number from 1 to 65536",
        ),
        (
            Options { group: -2, ..options },
            "getp_options.group=-2 is not known; use a number from 1",
        ),
        (
            Options {
                logits: c"".as_ptr(),
                ..options
            },
            "getp_options.logits= is not known; use the path of a file",
        ),
        (
            Options { print: -1, ..options },
            "getp_options.print=-1 is not known; use GETP_OFF, GETP_ON or GETP_ANSWER",
        ),
        (Options { progress: 3, ..options }, "GETP_OFF or GETP_ON"),
        (Options { strict: 9, ..options }, "getp_options.strict=9"),
        (
            Options { steps: 3, ..options },
            "getp_options.steps=3 is not known; use GETP_POSITIONS or GETP_TOKENS",
        ),
        // What a newer header may call otherwise, and this library would not do.
        (
            Options {
                reserved: 1 << 8,
                ..options
            },
            "getp_options: its byte 61 is set, for which this library, of version",
        ),
        (
            Options {
                reserved_2: -1,
                ..options
            },
            "getp_options: its byte 76 is set",
        ),
    ] {
        let message = choices(wrong).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
}

/// The struct as it was before it had `device`.
#[repr(C)]
struct Yesterday {
    size: usize,
    numbers: [c_int; 8],
    logits: *const c_char,
    /// Memory after the program's struct.
    behind: u64,
}

/// The struct as a later version may define it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Tomorrow {
    today: getp::abi::options::Options,
    more: u64,
    behind: u64,
}

#[test]
fn options_of_other_versions_are_read_as_far_as_they_go() {
    use getp::abi::options::{GETP_FAST, Options, getp_options_init, getp_options_init_sized};
    quiet();
    const BEHIND: u64 = 0x5EAF_00D5_5EAF_00D5;
    for by_size in [false, true] {
        let mut old = Yesterday {
            size: 0,
            numbers: [-1; 8],
            logits: c"left from before".as_ptr(),
            behind: BEHIND,
        };
        let options = (&raw mut old).cast::<Options>();
        // SAFETY: the struct's own; 48 bytes of it are the program's.
        unsafe {
            match by_size {
                true => _ = getp_options_init_sized(options, 48),
                false => getp_options_init(options),
            }
        }
        assert_eq!((old.size, old.numbers, old.logits.is_null()), (48, [0; 8], true));
        assert_eq!(old.behind, BEHIND);
        (old.numbers[0], old.numbers[1]) = (GETP_FAST, 3);
        let options = (&raw const old).cast::<Options>();
        // SAFETY: as above; what lies behind is no pointer and not read.
        let choices = unsafe { Options::read(options).unwrap().choices() }.unwrap();
        assert_eq!((choices.threads, choices.device), (Some(3), None));
    }

    let mut new = Tomorrow {
        today: Options::default(),
        more: 7,
        behind: BEHIND,
    };
    let options = (&raw mut new).cast::<Options>();
    // SAFETY: the struct's own; 88 bytes of it are the program's.
    unsafe { getp_options_init_sized(options, 88) };
    assert_eq!((new.today.size, new.more, new.behind), (88, 0, BEHIND));
    // SAFETY: as above.
    let read = |new: &Tomorrow| unsafe { Options::read((&raw const *new).cast()) };
    new.today.max_batch = 5;
    assert_eq!(read(&new).unwrap().max_batch, 5);
    new.more = 1 << 32;
    let message = read(&new).unwrap_err().to_string();
    assert!(message.contains("getp_options: its byte 84 is set"), "{message}");
}

#[test]
fn a_tokenizer_handle_is_the_program_s_struct() {
    use getp::abi::tokenizer::*;
    let dir = tempfile::tempdir().unwrap();
    let path = c_path(&vocabulary_file(dir.path()));
    // SAFETY: handles of this test's own; arrays are as long as the struct says.
    unsafe {
        let handle = getp_tokenizer_open(path.as_ptr());
        let tokenizer = &*getp_tokenizer_get(handle);
        assert_eq!((tokenizer.vocab_size, tokenizer.max_token_length), (300, 2));
        assert_eq!(CStr::from_ptr(*tokenizer.vocab), c"<0x00>");
        assert_eq!(CStr::from_ptr(*tokenizer.vocab.add(256)), c"ab");
        assert_eq!(*tokenizer.lengths.add(256), 2);
        assert_eq!(tokenizer.byte_tokens[65], 65);
        assert_eq!(tokenizer.byte_pieces[130..132], [65, 0]);
        let sorted = std::slice::from_raw_parts(tokenizer.sorted_vocab, 300);
        let at = sorted.iter().position(|entry| entry.id == 256).unwrap();
        assert_eq!((sorted[at - 1].id, sorted[at].len), (i32::from(b'a'), 2));
        let piece = |id| {
            let mut length = 9;
            let bytes = getp_tokenizer_piece(handle, id, &mut length);
            std::slice::from_raw_parts(bytes.cast::<u8>(), length).to_vec()
        };
        assert_eq!((piece(256), piece(0)), (b"ab".to_vec(), vec![0]));
        assert_eq!((piece(300), piece(-1)), (vec![], vec![]));
        getp_tokenizer_close(handle);
    }
}

#[test]
fn a_tokenizer_handle_encodes_and_decodes_by_the_program_s_rule() {
    use getp::abi::{options::GETP_ON, status::*, text::*, tokenizer::*};
    let dir = tempfile::tempdir().unwrap();
    let path = c_path(&vocabulary_file(dir.path()));
    // SAFETY: handles and structs of this test's own.
    unsafe {
        let handle = getp_tokenizer_open(path.as_ptr());
        let tokens = getp_tokenizer_encode(handle, c"cab".as_ptr(), 3, null());
        let ids = std::slice::from_raw_parts((*tokens).ids, (*tokens).count);
        assert_eq!(ids, [99, 256]);
        let text = getp_tokenizer_decode(handle, ids.as_ptr(), ids.len(), null());
        assert_eq!(((*text).size, (*text).length), (24, 3));
        assert_eq!(CStr::from_ptr((*text).bytes), c"cab");
        getp_text_free(text);
        getp_tokens_free(tokens);
        let mut options: TextOptions = std::mem::zeroed();
        getp_text_options_init_sized(&mut options, size_of::<TextOptions>());
        options.specials = GETP_ON;
        assert!(getp_tokenizer_encode(handle, c"ab".as_ptr(), 2, &options).is_null());
        assert!(last_error().unwrap().contains("opened of a tokenizer.bin"));
        assert!(getp_tokenizer_encode(handle, null(), 2, null()).is_null());
        assert_eq!(getp::abi::library::getp_last_status(), GETP_BAD_ARGUMENT);
        getp_tokenizer_close(handle);
    }
}

#[cfg(not(feature = "tokenizer-json"))]
#[test]
fn a_tokenizer_json_is_refused_where_nothing_reads_it() {
    use getp::abi::{library::getp_last_status, status::GETP_BAD_FILE, tokenizer::*};
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokenizer.json");
    std::fs::write(&file, "{\"version\": \"1.0\"}").unwrap();
    for path in [dir.path(), &file] {
        // SAFETY: a path of this test's own.
        assert!(unsafe { getp_tokenizer_open(c_path(path).as_ptr()) }.is_null());
        let error = last_error().unwrap();
        assert!(
            error.contains("tokenizer.json: this library is built without the feature"),
            "{error}"
        );
        assert!(error.contains("--features tokenizer-json"), "{error}");
        assert_eq!(getp_last_status(), GETP_BAD_FILE);
    }
    let empty = tempfile::tempdir().unwrap();
    // SAFETY: as above.
    assert!(unsafe { getp_tokenizer_open(c_path(empty.path()).as_ptr()) }.is_null());
    assert!(last_error().unwrap().contains("there is no tokenizer.json in it"));
}

#[test]
fn a_request_handle_reads_its_file_and_runs() {
    use getp::abi::{requests::*, tokenizer::*};
    let dir = tempfile::tempdir().unwrap();
    let vocabulary = c_path(&vocabulary_file(dir.path()));
    let file = dir.path().join("requests");
    let open = |text: &str, steps| {
        std::fs::write(&file, text).unwrap();
        // SAFETY: paths and handles of this test's own.
        unsafe {
            let tokenizer = getp_tokenizer_open(vocabulary.as_ptr());
            let handle = getp_requests_open(c_path(&file).as_ptr(), steps, tokenizer);
            getp_tokenizer_close(tokenizer);
            handle
        }
    };
    for (steps, word) in [(0, "steps: 0 is too few"), (-4, "steps: -4 is too few")] {
        assert!(open("1\na\n", steps).is_null());
        let error = last_error().unwrap();
        assert!(error.contains(word), "{error}");
    }
    let handle = open("3\nab\n\na prompt far too long for its steps", 8);
    let mut program = Program::new(&[], 8);
    let mut length = 0;
    // SAFETY: as above; the structs are the test's own.
    unsafe {
        assert_eq!(getp_requests_count(handle), 3);
        let prompt = getp_requests_prompt(handle, 2, &mut length);
        assert_eq!(
            std::slice::from_raw_parts(prompt.cast::<u8>(), length),
            b"a prompt far too long for its steps"
        );
        getp_requests_tokens(handle, 0, &mut length);
        assert_eq!(length, 0);
        program.requests = *getp_requests_get(handle);
        assert_eq!(inference(&mut program, &Arc::default()).unwrap(), 8);
        let tokens = getp_requests_tokens(handle, 0, &mut length);
        assert_eq!(
            std::slice::from_raw_parts(tokens, length),
            expected("ab", 8, &program.sampler, 0).0
        );
        getp_requests_tokens(handle, 2, &mut length);
        assert_eq!(length, 0);
        for index in [-1, 3] {
            assert!(getp_requests_tokens(handle, index, &mut length).is_null());
            assert!(last_error().unwrap().contains("out of range"));
        }
        getp_requests_close(handle);
    }
    finish(&mut program).unwrap();
}

/// The prompts of a file with these bytes, or the error.
fn prompts_of(bytes: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    use getp::abi::{requests::*, tokenizer::*};
    let dir = tempfile::tempdir().unwrap();
    let vocabulary = c_path(&vocabulary_file(dir.path()));
    let file = dir.path().join("requests");
    std::fs::write(&file, bytes).unwrap();
    // SAFETY: paths and handles of this test's own.
    unsafe {
        let tokenizer = getp_tokenizer_open(vocabulary.as_ptr());
        let handle = getp_requests_open(c_path(&file).as_ptr(), 8, tokenizer);
        getp_tokenizer_close(tokenizer);
        if handle.is_null() {
            return Err(last_error().unwrap());
        }
        let prompt = |index| {
            let mut length = 0;
            let bytes = getp_requests_prompt(handle, index, &mut length);
            std::slice::from_raw_parts(bytes.cast::<u8>(), length).to_vec()
        };
        let prompts = (0..getp_requests_count(handle)).map(prompt).collect();
        getp_requests_close(handle);
        Ok(prompts)
    }
}

#[test]
fn prompts_are_the_same_however_their_lines_end() {
    let expected: [&[u8]; 3] = [b"ab", b"", b"a\rb \xff"];
    for file in [
        b"3\nab\n\na\rb \xff\n".as_slice(),
        b"3\nab\n\na\rb \xff",
        b" 3 \nab\n\na\rb \xff\n\n\n",
        b"\xef\xbb\xbf3\nab\n\na\rb \xff\n",
        b"3\r\nab\r\n\r\na\rb \xff\r\n",
        b"3\r\nab\r\n\r\na\rb \xff",
        b"3\r\nab\r\n\r\na\rb \xff\r",
        b"\xef\xbb\xbf3\r\nab\r\n\r\na\rb \xff\r\n\r\n",
    ] {
        assert_eq!(prompts_of(file).unwrap(), expected, "{}", file.escape_ascii());
    }
    // Of several CRs only the last belongs to the end of the line.
    assert_eq!(prompts_of(b"1\r\nab\r\r\n").unwrap(), [b"ab\r"]);
    assert!(prompts_of(b"0\n").unwrap().is_empty());
}

#[test]
fn files_of_prompts_that_are_odd_are_refused_by_name() {
    for (file, words) in [
        (b"".as_slice(), "it is an empty file; prompts are a text"),
        (b"{\"prompt\": \"a\"}\n", "it is a JSON file; prompts are a text"),
        (b"GGUF\x03\0\0\0", "it is a GGUF file; prompts are a text"),
        (b"\n1\na\n", "its first line is not a number but \"\""),
        (b"two\na\nb\n", "its first line is not a number but \"two\""),
        (b"2 prompts\na\nb\n", "but \"2 prompts\"; write how many prompts follow"),
        (b"2\x00\na\nb\n", "but \"2\\0\""),
        (b"-1\na\n", "but \"-1\""),
        (b"3\na\nb\n", "it has 2 prompts where its first line says 3"),
        (
            b"1\na\nb\n\nc\n",
            "says 1 prompts, and 2 more follow, the first in line 3; correct the number",
        ),
        (b"1\na\n\n\nb\n", "and 1 more follow, the first in line 5"),
        (b"2\r\na\nb\n", "line 1 ends in CR LF and line 2 in LF alone"),
        (b"2\na\nb\r\n", "line 3 ends in CR LF and line 1 in LF alone"),
        (b"2\na\nb\r", "line 3 ends in CR LF and line 1 in LF alone"),
        (b"2\r\na\r\nb\r\n\n", "line 1 ends in CR LF and line 4 in LF alone"),
        (b"2\ra\rb\r", "its lines end in CR alone; end them in LF or in CR LF"),
        (b"1\ra", "its lines end in CR alone"),
        (b"2\na\nb\x00c\n", "line 3 has a NUL byte"),
        (
            b"\xff\xfe1\x00\n\x00a\x00\n\x00",
            "it is UTF-16 or UTF-32; save it as UTF-8",
        ),
        (
            b"\xfe\xff\x001\x00\n\x00a\x00\n",
            "it is UTF-16 or UTF-32; save it as UTF-8",
        ),
    ] {
        let error = prompts_of(file).unwrap_err();
        assert!(error.contains(words), "{}: {error}", file.escape_ascii());
        assert!(error.contains("/requests: "), "{error}");
    }
}

/// Writes a model of the program's dimensions whose weights are all 0.
fn model_file(dir: &Path, program: &Program) -> PathBuf {
    let mut bytes = program.transformer.config.to_bytes().to_vec();
    let config = config_from_bytes(&program.transformer.config.to_bytes()).unwrap();
    bytes.resize(TensorLayout::new(config).unwrap().file_bytes(), 0);
    let path = dir.join("model.bin");
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn a_model_handle_warms_up_from_its_file_and_finishes_when_closed() {
    use getp::abi::{library::*, model::*, sampler::*, status::*};
    quiet();
    let mut program = Program::new(&["ab"], 8);
    let dir = tempfile::tempdir().unwrap();
    let path = model_file(dir.path(), &program);
    let control = Arc::<Control>::default();
    // SAFETY: paths, handles and structs of this test's own.
    unsafe {
        assert!(getp_model_open(c"/does/not/exist".as_ptr(), null()).is_null());
        assert!(last_error().unwrap().starts_with("/does/not/exist: "));
        assert_eq!(getp_last_status(), GETP_BAD_FILE);
        // A model, but with heads of odd width: the seventh number is head_dim.
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[24..28].copy_from_slice(&31_i32.to_le_bytes());
        let odd = dir.path().join("odd.bin");
        std::fs::write(&odd, bytes).unwrap();
        assert!(getp_model_open(c_path(&odd).as_ptr(), null()).is_null());
        assert_eq!(getp_last_status(), GETP_UNSUPPORTED_MODEL, "{:?}", last_error());
        // Another family's directory.
        std::fs::write(dir.path().join("config.json"), r#"{"model_type": "llama"}"#).unwrap();
        assert!(getp_model_open(c_path(dir.path()).as_ptr(), null()).is_null());
        assert_eq!(getp_last_status(), GETP_UNSUPPORTED_MODEL, "{:?}", last_error());
        let model = getp_model_open(c_path(&path).as_ptr(), null());
        assert_eq!(getp_last_status(), GETP_OK);
        let transformer = getp_model_transformer(model);
        assert_eq!((*transformer).config, program.transformer.config);
        let sampler = getp_sampler_open(model, 0.0, 0.9, 5);
        assert_eq!((*getp_sampler_get(sampler)).vocab_size, VOCAB as c_int);
        let mut stats = Stats::default();
        assert_eq!(getp_stats(transformer, &mut stats), GETP_BAD_STATE);
        let tokenizer = &raw mut *program.tokenizer;
        let requests = &raw mut program.requests;
        let drawn = getp_sampler_get(sampler);
        let tokens = control.with_backends(|backends| {
            lifecycle::warm_up(transformer, tokenizer, backends).unwrap();
            lifecycle::inference(transformer, tokenizer, drawn, requests, backends)
        });
        assert_eq!(tokens.unwrap(), 8);
        // A program with an older header has no room for the last fields.
        (stats.devices, stats.lost_devices) = (77, 78);
        assert_eq!(getp_stats(transformer, &mut stats), GETP_OK);
        assert_eq!((stats.devices, stats.lost_devices), (77, 78));
        assert_eq!(getp_stats_sized(transformer, &mut stats, 3), GETP_BAD_ARGUMENT);
        assert_eq!(getp_stats_sized(transformer, &mut stats, size_of::<Stats>()), GETP_OK);
        assert_eq!(
            (stats.tokens, stats.prompt_tokens, stats.steps, stats.kv_bytes),
            (8, 1, 8, 1 << 20)
        );
        assert_eq!((stats.devices, stats.lost_devices), (1, 0));
        getp_sampler_close(sampler);
        getp_model_close(model);
    }
    assert_eq!(control.dropped.load(SeqCst), 1);
}

/// Half of the prompts begin with the same tokens, and some of the answers, most of which end early, are preempted; in
/// the second run the device fails, and in the third one of two: what the statistics say of what is shared and computed
/// again is the difference between the tokens to be computed and the rows that were.
#[test]
fn the_statistics_say_what_was_shared_and_what_was_computed_again() {
    use getp::abi::{library::*, status::*};
    const STEPS: usize = 200;
    let prompts: Vec<String> = ('!'..'y')
        .map(|c| match c as u32 % 2 {
            0 => format!("{c}"),
            _ => format!("of these thirty-three tokens each {c}"),
        })
        .collect();
    for (replicas, fail_calls, least_recomputed) in
        [(1, vec![], 200), (1, vec![(0, 300)], 100), (2, vec![(1, 150)], 100)]
    {
        let lost = fail_calls.len();
        let control = Arc::new(Control {
            replicas,
            end_every: 90,
            blocks: (0..replicas).map(|replica| (replica, 24)).collect(),
            fail_calls,
            ..Control::default()
        });
        let mut program = Program::new(&prompts.iter().map(String::as_str).collect::<Vec<_>>(), STEPS);
        inference(&mut program, &control).unwrap();
        for (prompt, row) in prompts.iter().zip(program.rows()) {
            assert_eq!(row, expected_ending(prompt, STEPS, control.end_every));
        }
        let mut stats = Stats::default();
        // SAFETY: structs of this test's own.
        let status = unsafe { getp_stats_sized(&raw const *program.transformer, &mut stats, size_of::<Stats>()) };
        assert_eq!(status, GETP_OK);
        println!(
            "{} tokens shared, {} computed again",
            stats.shared_tokens, stats.recomputed_tokens
        );
        // The last token of an answer is not fed.
        let to_compute = stats.prompt_tokens + stats.tokens - prompts.len() as u64;
        assert_eq!(
            to_compute + stats.recomputed_tokens - stats.shared_tokens,
            control.rows.load(SeqCst) as u64
        );
        assert!(stats.shared_tokens > 1000 && stats.recomputed_tokens > least_recomputed);
        assert_eq!(control.failed_calls.load(SeqCst), lost);
        finish(&mut program).unwrap();
    }
}

/// A model file of the program's dimensions with random weights.
fn random_model_file(dir: &Path, program: &Program) -> PathBuf {
    let path = model_file(dir, program);
    let mut bytes = std::fs::read(&path).unwrap();
    let mut state = 7_u64;
    for weight in bytes[CONFIG_BYTES..].chunks_exact_mut(4) {
        weight.copy_from_slice(&(getp::random::random_f32(&mut state) - 0.5).to_le_bytes());
    }
    std::fs::write(&path, bytes).unwrap();
    path
}

/// The ids of a prompt's tokens in the fake's vocabulary.
fn ids(prompt: &str) -> Vec<c_int> {
    prompt.replace("ab", "\u{100}").chars().map(|c| c as c_int).collect()
}

/// Waits for a batch's next event.
///
/// # Safety
///
/// The batch is open.
unsafe fn next_event(batch: *mut getp::abi::batch::Batch) -> *const getp::abi::event::CEvent {
    let mut event = null();
    // SAFETY: guaranteed by our caller.
    assert_eq!(unsafe { getp::abi::batch::getp_batch_next(batch, 60.0, &mut event) }, 0);
    event
}

#[test]
fn a_batch_answers_as_inference_does() {
    use getp::abi::{batch::*, driver, event::*, library::*, model::*, sampler::*, status::*};
    quiet();
    const STEPS: usize = 40;
    let mut program = Program::new(&fake::PROMPTS, STEPS);
    let dir = tempfile::tempdir().unwrap();
    let path = random_model_file(dir.path(), &program);
    // SAFETY: paths, handles and structs of this test's own.
    unsafe {
        let model = getp_model_open(c_path(&path).as_ptr(), null());
        let transformer = getp_model_transformer(model);
        let tokenizer = &raw mut *program.tokenizer;
        let requests = &raw mut program.requests;
        let greedy = getp_sampler_open(model, 0.0, 0.9, 1);
        assert!(driver::inference(transformer, tokenizer, getp_sampler_get(greedy), requests) > 0);
        let expected = program.rows();
        // Each prompt in turn as request 0 of a call of its own, whose seed is the sampler's.
        let drawn = fake::PROMPTS.map(|prompt| {
            let mut alone = Program::new(&[prompt], STEPS);
            let sampler = getp_sampler_open(model, 0.8, 0.9, 5);
            let requests = &raw mut alone.requests;
            assert!(driver::inference(transformer, tokenizer, getp_sampler_get(sampler), requests) > 0);
            getp_sampler_close(sampler);
            alone.rows().remove(0)
        });
        assert_ne!(expected.as_slice(), &drawn);

        let batch = getp_batch_open(model, null());
        assert!(!batch.is_null(), "{:?}", last_error());
        assert!(getp_batch_open(model, null()).is_null());
        assert_eq!(getp_last_status(), GETP_BAD_STATE);
        assert_eq!(
            driver::inference(transformer, tokenizer, getp_sampler_get(greedy), requests),
            -1
        );
        assert_eq!(getp_last_status(), GETP_BAD_STATE);
        assert!(last_error().unwrap().contains("a batch is open"));
        for (i, prompt) in fake::PROMPTS.iter().enumerate() {
            for temperature in [0.0, 0.8] {
                let ids = ids(prompt);
                let mut request: Request = std::mem::zeroed();
                assert_eq!(getp_request_init_sized(&mut request, size_of::<Request>()), GETP_OK);
                request.prompt = ids.as_ptr();
                request.prompt_length = ids.len();
                request.max_tokens = STEPS - ids.len() + 1;
                request.temperature = temperature;
                request.topp = 0.9;
                request.seed = 5;
                request.tag = 2 * i as u64 + u64::from(temperature > 0.0);
                request.tokens_per_event = (i % 3) as c_int;
                let mut id = 99;
                assert_eq!(getp_batch_submit(batch, &request, &mut id), GETP_OK);
                assert_eq!(id, request.tag);
            }
        }
        let mut answers = vec![Vec::new(); 2 * fake::PROMPTS.len()];
        while getp_batch_unfinished(batch) > 0 {
            let event = next_event(batch);
            let told = &*event;
            let answer = &mut answers[told.tag as usize];
            answer.extend_from_slice(std::slice::from_raw_parts(told.tokens, told.count));
            assert_eq!((told.size, told.answer_tokens), (size_of::<CEvent>(), answer.len()));
            assert_eq!(told.prompt_tokens, ids(fake::PROMPTS[told.tag as usize / 2]).len());
            assert!(told.submitted >= 0.0 && told.started >= told.submitted && told.last_token >= told.first_token);
            let is_last = [GETP_END_LENGTH, GETP_END_TOKEN].contains(&told.end);
            assert!(is_last || told.end == GETP_END_NONE && told.count > 0);
            assert!(told.why.is_null() && told.status == GETP_OK);
            getp_event_free(event);
        }
        for (i, (greedy, drawn)) in expected.iter().zip(&drawn).enumerate() {
            assert_eq!(
                [&answers[2 * i], &answers[2 * i + 1]],
                [greedy, drawn],
                "{:?}",
                fake::PROMPTS[i]
            );
        }
        let mut event = null();
        assert_eq!(getp_batch_next(batch, 0.0, &mut event), GETP_TIMED_OUT);
        assert!(event.is_null());
        let mut stats = Stats::default();
        assert_eq!(getp_stats_sized(transformer, &mut stats, size_of::<Stats>()), GETP_OK);
        assert_eq!(stats.devices, 1);
        getp_batch_close(batch);
        // The model is as it was, also for a second batch, which its own close ends.
        assert!(driver::inference(transformer, tokenizer, getp_sampler_get(greedy), requests) > 0);
        assert_eq!(program.rows(), expected);
        let batch = getp_batch_open(model, null());
        getp_sampler_close(greedy);
        getp_model_close(model);
        assert_eq!(getp_batch_next(batch, -1.0, &mut event), GETP_CLOSED);
        getp_batch_close(batch);
    }
}

/// A model whose vocabulary is padded beyond the tokenizer's: a batch that is told, and an inference, sample no others.
#[test]
fn ids_beyond_a_tokenizer_are_sampled_only_if_none_is_named() {
    use getp::abi::{batch::*, driver, event::*, library::*, model::*, sampler::*, status::*, tokenizer::*};
    quiet();
    const TOKENS: c_int = 100;
    const STEPS: usize = 40;
    let mut program = Program::new(&["A"], STEPS);
    let dir = tempfile::tempdir().unwrap();
    let path = random_model_file(dir.path(), &program);
    // Of the vocabulary's file as many entries; one has 9 bytes, but the first, which is written out.
    let file = vocabulary_file(dir.path());
    let whole = std::fs::read(&file).unwrap();
    let short = dir.path().join("short.bin");
    std::fs::write(&short, &whole[..4 + 14 + 9 * (TOKENS as usize - 1)]).unwrap();
    let long = dir.path().join("long.bin");
    std::fs::write(&long, [&whole[..], &whole[4..]].concat()).unwrap();
    // SAFETY: paths, handles and structs of this test's own.
    unsafe {
        let model = getp_model_open(c_path(&path).as_ptr(), null());
        let tokenizer = getp_tokenizer_open(c_path(&short).as_ptr());
        assert_eq!((*getp_tokenizer_get(tokenizer)).vocab_size, TOKENS);
        let mut options: BatchOptions = std::mem::zeroed();
        getp_batch_options_init_sized(&mut options, size_of::<BatchOptions>());
        assert!(options.tokenizer.is_null());
        let answer = |options: &BatchOptions, temperature: f32| -> Vec<c_int> {
            let batch = getp_batch_open(model, options);
            assert!(!batch.is_null(), "{:?}", last_error());
            // An id beyond the tokenizer's is one of a prompt's all the same.
            let prompt = [65, TOKENS + 50];
            let mut request: Request = std::mem::zeroed();
            getp_request_init_sized(&mut request, size_of::<Request>());
            (request.prompt, request.prompt_length, request.max_tokens) = (prompt.as_ptr(), 2, STEPS);
            request.temperature = temperature;
            assert_eq!(getp_batch_submit(batch, &request, null_mut()), GETP_OK);
            let event = next_event(batch);
            let tokens = std::slice::from_raw_parts((*event).tokens, (*event).count).to_vec();
            getp_event_free(event);
            getp_batch_close(batch);
            tokens
        };
        let told = BatchOptions { tokenizer, ..options };
        // A program with an older header knows no such field.
        let older = BatchOptions { size: 24, ..told };
        for temperature in [0.0, 1.0] {
            let all = answer(&options, temperature);
            assert!(all.iter().any(|&id| id >= TOKENS), "{all:?}");
            assert_eq!(answer(&older, temperature), all);
            let own = answer(&told, temperature);
            assert!(own.len() == STEPS && own.iter().all(|&id| id < TOKENS), "{own:?}");
            assert_eq!(answer(&options, temperature), all, "a batch that is not told again");
        }
        let many = getp_tokenizer_open(c_path(&long).as_ptr());
        assert!(!many.is_null(), "{:?}", last_error());
        let wrong = BatchOptions {
            tokenizer: many,
            ..options
        };
        assert!(getp_batch_open(model, &wrong).is_null());
        assert_eq!(getp_last_status(), GETP_BAD_ARGUMENT);
        let error = last_error().unwrap();
        assert!(
            error.contains("getp_batch_options.tokenizer: it has 600 tokens, and the model 300"),
            "{error}"
        );
        getp_tokenizer_close(many);

        let greedy = getp_sampler_open(model, 0.0, 0.9, 1);
        let (transformer, requests) = (getp_model_transformer(model), &raw mut program.requests);
        let (struct_, sampler) = (getp_tokenizer_get(tokenizer), getp_sampler_get(greedy));
        assert!(
            driver::inference(transformer, struct_, sampler, requests) > 0,
            "{:?}",
            last_error()
        );
        let row = program.rows().remove(0);
        assert!(row.len() > 10 && row.iter().all(|&id| id < TOKENS), "{row:?}");
        // With the whole vocabulary all may be.
        let whole = &raw mut *program.tokenizer;
        assert!(driver::inference(transformer, whole, sampler, requests) > 0);
        assert!(program.rows()[0].iter().any(|&id| id >= TOKENS));
        getp_sampler_close(greedy);
        getp_tokenizer_close(tokenizer);
        getp_model_close(model);
    }
}

#[test]
fn a_batch_refuses_what_nobody_can_mean() {
    use getp::abi::{batch::*, event::*, library::*, model::*, status::*};
    quiet();
    let program = Program::new(&["ab"], 8);
    let dir = tempfile::tempdir().unwrap();
    let path = random_model_file(dir.path(), &program);
    // SAFETY: paths, handles and structs of this test's own.
    unsafe {
        assert!(getp_batch_open(null_mut(), null()).is_null());
        let model = getp_model_open(c_path(&path).as_ptr(), null());
        let mut options: BatchOptions = std::mem::zeroed();
        assert!(getp_batch_open(model, &options).is_null());
        assert!(last_error().unwrap().starts_with("getp_batch_options.size=0"));
        assert_eq!(
            getp_batch_options_init_sized(&mut options, size_of::<BatchOptions>()),
            GETP_OK
        );
        let batch = getp_batch_open(model, &options);
        let prompt = [1, 2, 3];
        let mut good: Request = std::mem::zeroed();
        getp_request_init_sized(&mut good, size_of::<Request>());
        (good.prompt, good.prompt_length, good.max_tokens) = (prompt.as_ptr(), 3, 4);
        let id = |at| [at, VOCAB as c_int, -1];
        let [large, negative] = [id(VOCAB as c_int), id(-1)];
        type Change<'a> = &'a dyn Fn(&mut Request);
        let wrong: [(Change<'_>, &str); 11] = [
            (&|r| r.size = 0, "getp_request.size=0"),
            (&|r| r.prompt = null(), "prompt is NULL"),
            (&|r| r.prompt = large.as_ptr(), "prompt: its token 0 is 300"),
            (&|r| r.prompt = negative.as_ptr(), "prompt: its token 0 is -1"),
            (
                &|r| (r.stop, r.stop_length) = (negative.as_ptr(), 1),
                "stop: its token 0 is -1",
            ),
            (&|r| r.temperature = f32::NAN, "temperature: it is NaN"),
            (&|r| r.temperature = -0.5, "temperature: it is -0.5"),
            (&|r| (r.temperature, r.topp) = (1.0, f32::NAN), "topp: it is NaN"),
            (&|r| r.ignore_end = 3, "getp_request.ignore_end=3"),
            (&|r| r.tokens_per_event = -1, "getp_request.tokens_per_event: it is -1"),
            (&|r| r.reserved = 1, "getp_request: its byte 100 is set"),
        ];
        for (change, words) in wrong {
            let mut request = good;
            change(&mut request);
            assert_eq!(
                getp_batch_submit(batch, &request, null_mut()),
                GETP_BAD_ARGUMENT,
                "{words}"
            );
            assert_eq!(getp_last_status(), GETP_BAD_ARGUMENT);
            assert!(last_error().unwrap().starts_with(words), "{:?}", last_error());
        }
        assert_eq!(getp_batch_submit(null_mut(), &good, null_mut()), GETP_BAD_ARGUMENT);
        assert_eq!(getp_batch_submit(batch, null(), null_mut()), GETP_BAD_ARGUMENT);
        assert_eq!(getp_batch_next(batch, f64::NAN, &mut null()), GETP_BAD_ARGUMENT);
        assert_eq!(getp_batch_next(batch, 0.0, null_mut()), GETP_BAD_ARGUMENT);
        assert_eq!(getp_batch_cancel(batch, 0), GETP_BAD_ARGUMENT);
        assert_eq!(getp_batch_unfinished(null()), 0);
        let most = getp_batch_most_tokens(batch, 3);
        assert!(most > 4 && getp_batch_most_tokens(batch, most + 3) == 0);
        let none = [0, usize::MAX].map(|prompt| getp_batch_most_tokens(batch, prompt));
        assert_eq!(none, [0, 0]);
        let mut longest = good;
        longest.max_tokens = most;
        assert_eq!(getp_batch_submit(batch, &longest, null_mut()), GETP_OK);
        assert_eq!(getp_batch_cancel(batch, 0), GETP_OK);
        let event = next_event(batch);
        assert_eq!((*event).end, GETP_END_CANCELLED);
        getp_event_free(event);
        longest.max_tokens += 1;
        // What cannot run is told by an event.
        let changes: [Change<'_>; 3] = [&|r| r.prompt_length = 0, &|r| r.max_tokens = usize::MAX, &|r| {
            *r = longest
        }];
        for change in changes {
            let mut request = good;
            change(&mut request);
            assert_eq!(getp_batch_submit(batch, &request, null_mut()), GETP_OK);
            let event = next_event(batch);
            assert_eq!(((*event).end, (*event).status), (GETP_END_REFUSED, GETP_REFUSED));
            assert!(CStr::from_ptr((*event).why).to_str().unwrap().starts_with("request "));
            getp_event_free(event);
        }
        getp_event_free(null());
        getp_batch_close(null_mut());
        getp_batch_close(batch);
        getp_model_close(model);
    }
}

/// A program's function, which notes what it is told.
unsafe extern "C" fn note(context: *mut std::ffi::c_void, event: *const getp::abi::event::CEvent) {
    // SAFETY: what `events_may_be_taken_by_a_function` passes, and an event.
    let (notes, event) = unsafe { (&*context.cast::<std::sync::Mutex<Vec<(u64, usize, c_int)>>>(), &*event) };
    notes.lock().unwrap().push((event.id, event.count, event.end));
}

#[test]
fn events_may_be_taken_by_a_function() {
    use getp::abi::{batch::*, event::*, library::*, model::*, status::*};
    quiet();
    let program = Program::new(&["ab"], 8);
    let dir = tempfile::tempdir().unwrap();
    let path = random_model_file(dir.path(), &program);
    let notes = std::sync::Mutex::new(Vec::<(u64, usize, c_int)>::new());
    // SAFETY: paths, handles and structs of this test's own.
    unsafe {
        let model = getp_model_open(c_path(&path).as_ptr(), null());
        let mut options: BatchOptions = std::mem::zeroed();
        getp_batch_options_init_sized(&mut options, size_of::<BatchOptions>());
        options.on_event = Some(note);
        options.context = (&raw const notes).cast_mut().cast();
        let batch = getp_batch_open(model, &options);
        let prompt = [1, 2, 3];
        let mut request: Request = std::mem::zeroed();
        getp_request_init_sized(&mut request, size_of::<Request>());
        (request.prompt, request.prompt_length, request.max_tokens) = (prompt.as_ptr(), 3, 4);
        request.ignore_end = getp::abi::options::GETP_ON;
        for _ in 0..20 {
            assert_eq!(getp_batch_submit(batch, &request, null_mut()), GETP_OK);
        }
        assert_eq!(getp_batch_next(batch, 0.0, &mut null()), GETP_BAD_STATE);
        assert_eq!(getp_last_status(), GETP_BAD_STATE);
        let start = std::time::Instant::now();
        while notes.lock().unwrap().len() < 20 && start.elapsed().as_secs() < 60 {
            std::thread::yield_now();
        }
        getp_batch_close(batch);
        getp_model_close(model);
    }
    let mut notes = notes.into_inner().unwrap();
    notes.sort_unstable();
    let expected: Vec<_> = (0..20).map(|id| (id, 4, GETP_END_LENGTH)).collect();
    assert_eq!(notes, expected);
}

/// The struct of a sampler opened with these numbers, or the error.
fn sampler_of(temperature: f32, topp: f32, seed: u64) -> Result<getp::abi::types::Sampler, String> {
    use getp::abi::{model::*, sampler::*};
    let dir = tempfile::tempdir().unwrap();
    let path = c_path(&model_file(dir.path(), &Program::new(&[], 8)));
    // SAFETY: paths and handles of this test's own.
    unsafe {
        let model = getp_model_open(path.as_ptr(), null());
        let handle = getp_sampler_open(model, temperature, topp, seed);
        getp_model_close(model);
        if handle.is_null() {
            return Err(last_error().unwrap());
        }
        let sampler = *getp_sampler_get(handle);
        getp_sampler_close(handle);
        Ok(sampler)
    }
}

#[test]
fn a_sampler_handle_refuses_numbers_that_say_nothing() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for (temperature, topp, words) in [
        (
            -1.0,
            0.9,
            "temperature: it is -1; use 0, which is greedy, or a finite number above it",
        ),
        (-1e-45, 0.9, "temperature: it is -0.0"),
        (nan, 0.9, "temperature: it is NaN"),
        (inf, 0.9, "temperature: it is inf"),
        (-inf, 0.9, "temperature: it is -inf"),
        (1.0, nan, "topp: it is NaN"),
    ] {
        let error = sampler_of(temperature, topp, 1).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
    for (temperature, topp, held) in [
        (0.0, nan, 1.0),
        (-0.0, 0.5, 0.5),
        (f32::MAX, 0.9, 0.9),
        (1e-45, 0.9, 0.9),
        (1.0, -3.0, 1.0),
        (1.0, 0.0, 1.0),
        (1.0, inf, 1.0),
    ] {
        let sampler = sampler_of(temperature, topp, 1).unwrap();
        assert_eq!((sampler.temperature, sampler.topp), (temperature, held));
    }
}

#[test]
fn seed_0_is_a_state_that_the_generator_leaves() {
    use getp::abi::sampler::GETP_STATE_OF_SEED_0;
    use getp::random::coin;
    for seed in [1, 7, u64::MAX, GETP_STATE_OF_SEED_0] {
        assert_eq!(sampler_of(1.0, 0.9, seed).unwrap().rng_state, seed);
    }
    let state = sampler_of(1.0, 0.9, 0).unwrap().rng_state;
    assert_eq!(state, GETP_STATE_OF_SEED_0);
    let mut coins: Vec<_> = (0..100).map(|ahead| coin(state, ahead).to_bits()).collect();
    coins.sort();
    coins.dedup();
    assert_eq!(coins.len(), 100);
}

// The shared object.

fn library() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.with_file_name("libgetp.so")
}

/// Who cannot reach other processes has no code for what processes do together.
#[test]
fn the_protocol_of_several_ranks_is_where_mpi_is() {
    let output = Command::new("nm").arg(library()).output().unwrap();
    let symbols = String::from_utf8(output.stdout).unwrap();
    assert!(symbols.contains("6engine5queue"), "nm finds no symbols of the engine");
    assert_eq!(symbols.contains("6engine6member"), symbols.contains(" U MPI_"));
}

#[test]
fn nothing_else_is_exported() {
    let output = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let mut names: Vec<_> = text.lines().filter_map(|line| line.split_whitespace().last()).collect();
    names.retain(|name| !name.starts_with("getp_"));
    names.sort();
    let expected = [
        "_Z6finishP11TransformerP9Tokenizer",
        "_Z7warm_upP11TransformerP9Tokenizer",
        "_Z9inferenceP11TransformerP9TokenizerP7SamplerP8Requests",
        "finish",
        "inference",
        "warm_up",
    ];
    assert_eq!(names, expected);
}

#[test]
fn the_c_program_answers_or_says_what_went_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("batch");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let so_dir = library().parent().unwrap().to_owned();
    let built = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-o"])
        .args([&program, &root.join("c_examples/batch.c")])
        .arg(format!("-I{}", root.join("include").display()))
        .arg(format!("-L{}", so_dir.display()))
        .arg("-lgetp")
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let vocabulary = vocabulary_file(dir.path());
    let requests = dir.path().join("requests");
    std::fs::write(&requests, "1\nab\n").unwrap();
    let run = |model: &Path| {
        Command::new(&program)
            .env("LD_LIBRARY_PATH", &so_dir)
            .args([model, &vocabulary, &requests, Path::new("8")])
            .output()
            .unwrap()
    };
    let output = run(Path::new("/does/not/exist.bin"));
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr);
    // The library has said what is wrong, once.
    assert_eq!(text.matches("/does/not/exist.bin: ").count(), 1, "{text}");
    assert!(text.ends_with("\nbatch: a file cannot be used\n"), "{text}");
    // All logits of such a model are equal, and the lowest token is a NUL byte.
    let output = run(&model_file(dir.path(), &Program::new(&[], 8)));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(output.stdout, b"[0] \0\0\0\0\0\0\0\0\n");
}
