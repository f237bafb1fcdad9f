//! Output and options. They depend on the environment, stdout and stderr, so each test runs its inference in a process
//! of its own.

mod fake;

use fake::{Control, PROMPTS, Program, VOCAB, expected, finish, inference, warm_up};
use getp::cluster::launcher;
use getp::logits::LogitsReader;
use std::ffi::c_int;
use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};
use std::ptr::null_mut;
use std::sync::Arc;

/// Set in the processes of [`child`]; the tests they run do nothing without it.
const CHILD: &str = "TEST_IN_A_CHILD";

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs the test `name` of this program alone, with these variables.
fn child(name: &str, variables: &[(&str, &str)]) -> Output {
    let output = command(name).envs(variables.iter().copied()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}

/// The command of [`child`], as if no launcher had started this program.
fn command(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    command.env(CHILD, "1").env_remove("GETP_PRINT");
    for sign in launcher::signs() {
        command.env_remove(sign);
    }
    command
}

/// Lines of ours on stderr.
fn lines(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stderr);
    text.lines()
        .filter_map(|line| Some(line.strip_prefix("getp: ")?.to_owned()))
        .collect()
}

#[test]
fn child_answers() {
    if !is_child() {
        return;
    }
    answer(Control::default());
}

fn answer(control: Control) {
    let mut program = Program::new(&PROMPTS, 40);
    let before = program.sampler;
    let control = Arc::new(control);
    warm_up(&mut program, &control).unwrap();
    inference(&mut program, &control).unwrap();
    finish(&mut program).unwrap();
    let counts_tokens = std::env::var("GETP_STEPS").is_ok_and(|rule| rule == "tokens");
    let positions = if counts_tokens { 39 } else { 40 };
    let rows: Vec<_> = (0..)
        .zip(PROMPTS)
        .map(|(i, prompt)| expected(prompt, positions, &before, i).0)
        .collect();
    assert_eq!(program.rows(), rows);
}

#[test]
fn child_answers_on_three_devices() {
    if !is_child() {
        return;
    }
    answer(Control {
        replicas: 3,
        depth: 2,
        ..Control::default()
    });
}

#[test]
fn child_without_logits() {
    if !is_child() {
        return;
    }
    let control = Arc::default();
    let mut program = Program::new(&PROMPTS, 40);
    warm_up(&mut program, &control).unwrap();
    getp::abi::guard::record(&inference(&mut program, &control).unwrap_err());
    assert!(program.rows().iter().all(Vec::is_empty));
}

#[test]
fn child_refused() {
    if !is_child() {
        return;
    }
    let mut program = Program::new(&[""; 15], 8);
    assert_eq!(inference(&mut program, &Arc::default()).unwrap(), 0);
}

#[test]
fn child_fails_to_warm_up() {
    if !is_child() {
        return;
    }
    let mut program = Program::new(&["ab"], 8);
    let error = warm_up(&mut program, &Arc::default()).unwrap_err();
    getp::abi::guard::record(&error);
}

#[test]
fn child_fails_to_warm_up_again() {
    if !is_child() {
        return;
    }
    use getp::abi::guard;
    let mut program = Program::new(&["ab"], 8);
    let refuses = Arc::new(Control {
        refuse: true,
        ..Control::default()
    });
    let reason = |program: &mut Program, control: &Arc<Control>| {
        assert_eq!(guard::work(-1, || inference(program, control)), -1);
        fake::last_error().unwrap()
    };
    guard::work((), || warm_up(&mut program, &refuses));
    let first = fake::last_error().unwrap();
    assert_eq!(reason(&mut program, &refuses), first);
    program.transformer.config.n_layers = 0; // another reason
    assert_ne!(reason(&mut program, &refuses), first);
    assert_ne!(reason(&mut program, &refuses), first);
    // Another transformer, and this one once it is finished, have not failed.
    let mut other = Program::new(&["ab"], 8);
    reason(&mut other, &refuses);
    finish(&mut program).unwrap();
    reason(&mut program, &refuses);
    // Nor has one that was warmed up since.
    assert_eq!(inference(&mut other, &Arc::default()).unwrap(), 8);
    finish(&mut other).unwrap();
    reason(&mut other, &refuses);
}

#[test]
fn a_warm_up_that_has_failed_is_named_and_its_reason_said_once() {
    let said = lines(&child("child_fails_to_warm_up_again", &[("GETP_PRINT", "0")]));
    let (early, again) = (
        "inference came before warm_up; warming up now",
        "warm_up has failed; warming up again",
    );
    let same = "error: warming up has failed again, for the same reason";
    let reason = "error: the fake refuses";
    let other = "error: config: n_layers is 0; it must lie in 1..=16777216";
    let said: Vec<_> = said.iter().map(String::as_str).collect();
    let expected: [&[&str]; 8] = [
        &[reason], // warm_up
        &[again, same],
        &[again, other],
        &[again, same],
        &[early, reason], // of another transformer
        &[early, other],  // finished
        &[again],         // the other one, which succeeds
        &[early, reason], // and finished
    ];
    let is_no_summary = |line: &&&str| !line.contains("MiB") && !line.contains("room for");
    assert_eq!(
        said.iter().filter(is_no_summary).copied().collect::<Vec<_>>(),
        expected.concat()
    );
}

#[test]
fn child_long_prompts() {
    if !is_child() {
        return;
    }
    let long = "x".repeat(41);
    let mut program = Program::new(&[long.as_str(); 13], 64);
    inference(&mut program, &Arc::default()).unwrap();
}

/// The requests of [`child_fed_otherwise`] and how many positions each has: 40 tokens are the model's context.
fn fed_otherwise() -> [Program; 2] {
    let [x, y] = ["x", "y"].map(|letter| letter.repeat(45));
    let short = Program::new(&["ab", &y[..30], "", &y, &y[..21], &y[..20], "z"], 20);
    [short, Program::new(&[&x, "q"], 64)]
}

#[test]
fn child_fed_otherwise() {
    if !is_child() {
        return;
    }
    for mut program in fed_otherwise() {
        inference(&mut program, &Arc::default()).unwrap();
        finish(&mut program).unwrap();
    }
}

#[test]
fn child_strange_vocabulary() {
    if !is_child() {
        return;
    }
    let mut program = Program::new(&["wxy"], 8);
    let answered = expected("wxy", 8, &program.sampler, 0).0;
    let mut piece = *b"n\0n";
    let mut write = |token: u8, length: usize| {
        // SAFETY: the vocabulary's own arrays; the bytes outlive the inference.
        unsafe {
            program
                .tokenizer
                .vocab
                .add(token.into())
                .write(piece.as_mut_ptr().cast());
            program.tokenizer.lengths.add(token.into()).write(length as c_int);
        }
    };
    // What follows a NUL in a token is not printed.
    answered
        .iter()
        .filter_map(|&token| u8::try_from(token).ok())
        .for_each(|token| write(token, 3));
    // Without an entry of one byte, x becomes token 0.
    write(b'x', 3);
    write(0, 1);
    inference(&mut program, &Arc::default()).unwrap();
    finish(&mut program).unwrap();
}

#[test]
fn child_odd_samplers() {
    if !is_child() {
        return;
    }
    for (temperature, topp, state) in [
        (-2.0, 7.0, 0),
        (1.0, 7.0, 1),
        (f32::INFINITY, 0.5, 1),
        (1.0, 0.5, 0),
        (0.0, 0.5, 0),
        (1.0, 0.5, 1),
    ] {
        let mut program = Program::new(&["ab"], 8);
        let sampler = &mut program.sampler;
        (sampler.temperature, sampler.topp, sampler.rng_state) = (temperature, topp, state);
        inference(&mut program, &Arc::default()).unwrap();
        finish(&mut program).unwrap();
    }
}

#[test]
fn child_not_finite() {
    if !is_child() {
        return;
    }
    let control = Arc::new(Control {
        non_finite: 12,
        ..Control::default()
    });
    let mut program = Program::new(&["ab"], 8);
    if let Err(error) = warm_up(&mut program, &control) {
        getp::abi::guard::record(&error);
    }
}

#[test]
fn prompts_and_answers_are_printed_in_order_as_they_are() {
    check_printed("1", |_, prompt| prompt.into(), printed);
    let with_nul = |token| if token == 0 { vec![0] } else { printed(token) };
    check_printed("answer", |i, _| format!("[{i}] "), with_nul);
}

#[test]
fn child_full() {
    if !is_child() {
        return;
    }
    let prompts = ["1234567", "12345678", "123456789", "1234567890"];
    let mut program = Program::new(&prompts, 8);
    inference(&mut program, &Arc::default()).unwrap();
    finish(&mut program).unwrap();
    let lengths: Vec<_> = program.rows().iter().map(Vec::len).collect();
    println!("{lengths:?}");
}

/// A prompt that takes up all steps has no answer. The program prints the tokens that it feeds, and the one behind
/// them.
#[test]
fn prompts_that_take_up_all_steps_are_printed_as_far_as_they_are_fed() {
    for (rule, lengths, full) in [("positions", "[2, 1, 0, 0]", 2), ("tokens", "[1, 0, 0, 0]", 1)] {
        let run = |print| child("child_full", &[("GETP_PRINT", print), ("GETP_STEPS", rule)]);
        let has = |output: &Output, text: &str| output.stdout.windows(text.len()).any(|bytes| bytes == text.as_bytes());
        let requests = |is_one: &dyn Fn(usize) -> bool| (0..4).filter(|&i| is_one(i)).collect::<Vec<_>>();
        let output = run("answer");
        assert!(has(&output, lengths), "{rule}: {output:?}");
        let printed = requests(&|i| has(&output, &format!("[{i}] ")));
        assert_eq!(printed, [0, 1, 2, 3], "{rule}");
        let said = lines(&output);
        let is_refused = |i: usize, line: &String| line.starts_with(&format!("error: request {i}: its "));
        let refused = requests(&|i| said.iter().any(|line| is_refused(i, line)));
        assert_eq!(refused, (full..4).collect::<Vec<_>>(), "{said:?}");

        let output = run("1");
        let fed = &b"1234567890"[..7 + full];
        let alone = output
            .stdout
            .split(|&byte| byte == b'\n')
            .filter(|line| *line == fed)
            .count();
        assert_eq!(alone, 4 - full, "{rule}: {output:?}");
    }
}

/// With `GETP_PRINT=value`, the output of `before` precedes each answer, whose tokens are printed as `piece` says.
fn check_printed(value: &str, before: impl Fn(usize, &str) -> String, piece: impl Fn(c_int) -> Vec<u8>) {
    let output = child("child_answers", &[("GETP_PRINT", value)]);
    let program = Program::new(&PROMPTS, 40);
    let mut text = Vec::new();
    for (i, prompt) in PROMPTS.into_iter().enumerate() {
        text.extend(before(i, prompt).into_bytes());
        let tokens = expected(prompt, 40, &program.sampler, i).0;
        text.extend(tokens.into_iter().flat_map(&piece));
        text.push(b'\n');
    }
    assert!(output.stdout.windows(text.len()).any(|window| window == text));
}

/// A pseudo-terminal: the master, which reads what is shown, and the slave, which programs write to.
fn terminal() -> (File, OwnedFd) {
    let (mut shows, mut takes) = (-1, -1);
    // SAFETY: two numbers of this function's own; the rest may be NULL.
    let opened = unsafe { libc::openpty(&mut shows, &mut takes, null_mut(), null_mut(), null_mut()) };
    assert_eq!(opened, 0);
    // SAFETY: just opened, and nobody else's.
    unsafe { (File::from_raw_fd(shows), OwnedFd::from_raw_fd(takes)) }
}

/// Whether a terminal would do something else than show the byte.
fn steers(byte: &u8) -> bool {
    byte.is_ascii_control() && !matches!(byte, b'\r' | b'\n' | b'\t')
}

/// What `child_answers` prints on a terminal, which it may have been started from.
fn shown(is_controlling: bool, variables: &[(&str, &str)]) -> Vec<u8> {
    let (mut shows, takes) = terminal();
    let mut command = command("child_answers");
    command.env("GETP_PRINT", "1").envs(variables.iter().copied());
    command.stdout(takes).stderr(Stdio::null());
    if is_controlling {
        let take_control = || {
            // SAFETY: numbers alone go in and come out.
            match unsafe { (libc::setsid(), libc::ioctl(1, libc::TIOCSCTTY, 0)) } {
                (1.., 0) => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        };
        // SAFETY: the function makes two system calls.
        unsafe { command.pre_exec(take_control) };
    }
    let mut running = command.spawn().unwrap();
    drop(command); // and with it this process's end that takes
    let mut shown = Vec::new();
    let _ = shows.read_to_end(&mut shown); // it fails when the last writer is gone
    assert!(running.wait().unwrap().success());
    shown
}

#[test]
fn a_terminal_is_sent_no_control_characters() {
    let output = child("child_answers", &[("GETP_PRINT", "1")]);
    assert!(output.stdout.iter().any(steers), "what goes into a pipe is as it is");
    // Open MPI forwards its processes' stdout through a terminal, as it is.
    let launched = [("OMPI_COMM_WORLD_SIZE", "1")];
    let forwarded = shown(false, &launched);
    assert!(forwarded.iter().any(steers), "{}", String::from_utf8_lossy(&forwarded));
    // srun --pty gives its process a terminal that somebody sits at.
    for shown in [shown(false, &[]), shown(true, &[]), shown(true, &launched)] {
        assert!(!shown.iter().any(steers), "{}", String::from_utf8_lossy(&shown));
        assert!(String::from_utf8_lossy(&shown).contains("\\u{"));
    }
}

/// The text that is printed of a token.
fn printed(token: c_int) -> Vec<u8> {
    match token {
        0 => vec![], // a NUL byte
        1..=255 => vec![token as u8],
        256 => b"ab".to_vec(),
        _ => vec![], // not in the vocabulary
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

#[test]
fn the_prompt_is_printed_as_far_as_the_program_feeds_it() {
    let [short, long] = fed_otherwise();
    let answered = |program: &Program, prompt: &str, request| {
        let steps = program.requests.max_seq_len as usize;
        expected(prompt, steps, &program.sampler, request).0
    };
    let with = |prompt: &str, tokens: Vec<c_int>| {
        let answer: Vec<_> = tokens.into_iter().flat_map(printed).collect();
        [prompt.as_bytes(), &answer, b"\n"].concat()
    };
    let [x, y] = ["x", "y"].map(|letter| letter.repeat(40));
    // Where 20 steps end before the prompt does, the program has fed 20 tokens and printed the next one.
    let texts = [
        with("ab", answered(&short, "ab", 0)),
        with(&y[..21], vec![]),
        with("", vec![]),
        with(&y[..21], vec![]),
        with(&y[..21], vec![]),
        with(&y[..20], answered(&short, &y[..20], 5)),
        with("z", answered(&short, "z", 6)),
        with(&x, answered(&long, &x, 0)),
        with("q", answered(&long, "q", 1)),
    ];
    let output = child("child_fed_otherwise", &[("GETP_PRINT", "1")]);
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(contains(&output.stdout, &texts.concat()), "{shown}");
    let output = child("child_fed_otherwise", &[("GETP_PRINT", "answer")]);
    assert!(
        contains(&output.stdout, b"\n[1] \n[2] \n[3] \n[4] \n[5] "),
        "{output:?}"
    );
}

#[test]
fn tokens_are_printed_up_to_a_nul_and_bytes_without_one_as_token_0() {
    let output = child("child_strange_vocabulary", &[("GETP_PRINT", "1")]);
    let answered = expected("wxy", 8, &Program::new(&[], 8).sampler, 0).0;
    let pieces = answered.iter().flat_map(|&token| match token {
        0..=255 => b"n".to_vec(),
        _ => printed(token),
    });
    let text = [b"wny", pieces.collect::<Vec<_>>().as_slice(), b"\n"].concat();
    assert!(contains(&output.stdout, &text), "{output:?}");
}

#[test]
fn numbers_of_the_sampler_that_are_replaced_are_named() {
    let said = lines(&child("child_odd_samplers", &[("GETP_PRINT", "0")]));
    let of_sampler: Vec<_> = said.iter().filter(|line| line.contains("the sampler's ")).collect();
    let starts = [
        "warning: the sampler's temperature is -2; 0, which is greedy, is used instead",
        "warning: the sampler's topp is 7, which is not within 0 and 1; 0.9 is used instead",
        "warning: the sampler's temperature is infinite",
        "warning: the sampler's rng_state is 0, ",
    ];
    assert_eq!(of_sampler.len(), starts.len(), "{said:?}");
    for (line, start) in of_sampler.iter().zip(starts) {
        assert!(line.starts_with(start), "{line}");
    }
}

#[test]
fn logits_of_every_position_are_recorded() {
    for test in ["child_answers", "child_answers_on_three_devices"] {
        check_logits(test, "positions", 40);
        check_logits(test, "tokens", 39);
    }
}

fn check_logits(test: &str, rule: &str, positions: usize) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("logits");
    let path_text = path.to_str().unwrap();
    child(
        test,
        &[("GETP_PRINT", "0"), ("GETP_LOGITS", path_text), ("GETP_STEPS", rule)],
    );
    let mut reader = LogitsReader::open(&path).unwrap();
    let records = reader.records().to_vec();
    assert_eq!((reader.vocab(), records.len()), (VOCAB, PROMPTS.len() * positions));
    let keys: std::collections::HashSet<_> = records.iter().map(|(key, _)| *key).collect();
    assert_eq!(keys.len(), records.len());
    let mut row = Vec::new();
    for (at, (key, token)) in records.into_iter().enumerate() {
        reader.read(at, &mut row).unwrap();
        assert_eq!(row, fake::logits(token, key.position));
    }
}

#[test]
fn logits_that_cannot_be_written_are_an_error_before_the_first_step() {
    for path in ["/dev/full", "/does/not/exist"] {
        let said = lines(&child(
            "child_without_logits",
            &[("GETP_PRINT", "0"), ("GETP_LOGITS", path)],
        ));
        assert!(said.iter().any(|line| line.contains(path)), "{said:?}");
    }
}

#[test]
fn many_bad_requests_do_not_bury_the_rest() {
    let said = lines(&child("child_refused", &[]));
    let named: Vec<_> = said.iter().filter(|line| line.starts_with("error: request ")).collect();
    assert_eq!(named.len(), 10, "{said:?}");
    assert!(named[9].starts_with("error: request 9: it is empty"), "{said:?}");
    assert!(
        said.contains(&"error: 5 more requests get no answer".into()),
        "{said:?}"
    );
}

#[test]
fn prompts_that_are_cut_are_named() {
    let said = lines(&child("child_long_prompts", &[("GETP_PRINT", "0")]));
    let cut = "its prompt has more than 40 tokens, the model's initial_context_length, and is cut there";
    let named: Vec<_> = said.iter().filter(|line| line.contains(cut)).collect();
    assert_eq!(named.len(), 10, "{said:?}");
    assert!(named[9].starts_with("warning: request 9: "), "{said:?}");
    assert!(said.contains(&"warning: 3 more prompts are cut".into()), "{said:?}");

    let said = lines(&child("child_long_prompts", &[("GETP_STRICT", "1")]));
    assert!(!said.iter().any(|line| line.contains("is cut there")), "{said:?}");
    assert!(
        said.contains(&"error: 3 more requests get no answer".into()),
        "{said:?}"
    );
}

#[test]
fn weights_that_are_not_finite_are_warned_of() {
    let said = lines(&child("child_not_finite", &[]));
    let warned: Vec<_> = said
        .iter()
        .filter(|line| line.starts_with("warning: w_qkv of layer "))
        .collect();
    assert_eq!(warned.len(), 10, "{said:?}");
    assert!(warned[9].starts_with("warning: w_qkv of layer 9: NaN; "), "{said:?}");
    assert!(
        said.contains(&"warning: 2 more tensors have values that are not finite".into()),
        "{said:?}"
    );

    let said = lines(&child("child_not_finite", &[("GETP_STRICT", "1")]));
    assert_eq!(
        said,
        ["error: weights: w_qkv of layer 0: NaN; GETP_STRICT=1 refuses them"]
    );
}

#[test]
fn bad_options_are_named() {
    let said = lines(&child("child_fails_to_warm_up", &[("GETP_PRECISION", "half")]));
    assert!(
        said.contains(&"error: GETP_PRECISION=half is not known; use exact or fast".into()),
        "{said:?}"
    );
    let said = lines(&child("child_answers", &[("GETP_PRINT", "0"), ("GETP_BATCH", "3")]));
    assert!(
        said[0].starts_with("warning: GETP_BATCH: not known and not used;"),
        "{said:?}"
    );
}

#[test]
fn the_summary_and_the_profile_are_printed() {
    let said = lines(&child("child_answers", &[("GETP_PRINT", "0"), ("GETP_PROFILE", "1")]));
    assert_eq!(
        said[..4],
        [
            "w_qkv                  BF16               2.00 MiB",
            "w_mlp1                 BF16+F32           1.50 MiB  layer 1 is no MXFP4",
            "fake; weights 3.5 MiB from 5.7 MiB in 0.5 s (0.0 GB/s); KV cache 1.0 MiB, 66 blocks",
            "  room for 8 requests of 16 positions",
        ]
    );
    assert!(said.iter().any(|line| line.starts_with("operation ")), "{said:?}");
}

#[test]
fn each_device_has_a_line_and_a_profile() {
    let said = lines(&child(
        "child_answers_on_three_devices",
        &[("GETP_PRINT", "0"), ("GETP_PROFILE", "1")],
    ));
    let starts = |what: &str| said.iter().filter(|line| line.starts_with(what)).count();
    assert_eq!(
        (starts("w_qkv "), starts("fake; weights"), starts("operation ")),
        (1, 3, 3),
        "{said:?}"
    );
    assert_eq!(said[8], "3 devices share the requests");
}
