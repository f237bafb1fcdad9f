//! Runs kernels/gpu/simt_test.cpp, without and with AddressSanitizer.

use super::compile;
use std::process::{Command, Output};

const SOURCES: [&str; 2] = ["kernels/gpu/simt.cpp", "kernels/gpu/simt_test.cpp"];

fn run(program: &std::path::Path, test: &[&str]) -> Output {
    Command::new(program)
        .args(test)
        .env_remove("LD_PRELOAD")
        .output()
        .expect("the program just built")
}

fn text(output: &Output) -> String {
    [&output.stdout[..], &output.stderr[..]]
        .map(String::from_utf8_lossy)
        .concat()
}

#[test]
fn it_runs_kernels_and_finds_mistakes() {
    let output = run(
        &compile("simt_test", &["-O2", "-Wall", "-Wextra", "-Werror"], &SOURCES),
        &[],
    );
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn address_sanitizer_sees_fibers_and_shared_memory() {
    let program = compile("simt_test_asan", &["-O1", "-g", "-fsanitize=address"], &SOURCES);
    for test in ["reduce", "mfma", "errors", "words", "stack_reuse", "formats"] {
        let output = run(&program, &[test]);
        assert!(output.status.success(), "{}", text(&output));
    }
    for (test, report) in [
        ("shared_overflow", "heap-buffer-overflow"),
        ("fixed_shared_overflow", "global-buffer-overflow"),
    ] {
        let output = run(&program, &[test]);
        assert!(
            !output.status.success() && text(&output).contains(report),
            "{}",
            text(&output)
        );
    }
}
