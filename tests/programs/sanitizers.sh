#!/usr/bin/env bash
# Address, leak and undefined-behaviour sanitizers: the C and C++ programs with the library as it ships, the same with a
# library that is instrumented too, and the library's own tests.
. "$(dirname "$0")/lib.sh"
need g++ "apt-get install g++"

export ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS=print_stacktrace=1 GETP_PRINT=0
strict=(-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -Iinclude)
files=(-z "$BUILD/tiny-tokenizer.bin" -i c_examples/prompts.txt -n 200)

# programs NAME FOLDER: builds both programs with the library in FOLDER and runs each way of answering.
programs() {
    local name=$1 link=(-L"$2" -lgetp -Wl,-rpath,"$2") precision
    gcc -std=c11 "${strict[@]}" -o "$scratch/batch" c_examples/batch.c "${link[@]}"
    g++ -std=c++17 -fopenmp "${strict[@]}" -o "$scratch/eval" c_examples/eval.cpp "${link[@]}"
    for precision in exact fast; do
        export GETP_PRECISION=$precision
        GETP_LOGITS=$scratch/logits GETP_PROFILE=1 quietly "batch, $precision, $name" \
            "$scratch/batch" "$BUILD/tiny.bin" "$BUILD/tiny-tokenizer.bin" c_examples/prompts.txt 200
        quietly "eval, $precision, $name" "$scratch/eval" "$BUILD/tiny.bin" "${files[@]}" -o "$scratch/$precision" \
            -t 0.9 -s 5
    done
    unset GETP_PRECISION
    quietly "baseline, $name" "$scratch/eval" "$BUILD/tiny.bin" "${files[@]}" -o "$scratch/baseline" -m baseline \
        -t 0.9 -s 5
    same "answers, $name" "$scratch/exact" "$scratch/baseline"
    for model in /dev/null /does/not/exist "$BUILD"; do
        ! "$scratch/batch" "$model" "$BUILD/tiny-tokenizer.bin" c_examples/prompts.txt 9 >"$scratch/log" 2>&1 ||
            fail "$model is taken for a model"
        ! grep -aE "Sanitizer|runtime error" "$scratch/log" || fail "a refused model, $name"
    done
    echo "ok: refused models, $name"
    ! "$scratch/eval" "$BUILD/tiny.bin" "${files[@]}" -o /dev/full >"$scratch/log" 2>&1 || fail "-o /dev/full succeeds"
    ! grep -aE "Sanitizer|runtime error" "$scratch/log" || fail "a failure before finish, $name"
    echo "ok: a failure before finish, $name"
}

programs "library as it ships" "$TARGET/release"

# Sanitizers are unstable options, which a stable compiler takes only so; --target keeps build scripts free of them.
export RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address
host=$(rustc -vV | awk '/^host/ { print $2 }')
cargo build --locked --release --lib --target "$host"
programs "library instrumented" "$TARGET/$host/release"

# The test of the C program links it to the library without a sanitizer's runtime; it has just run with one.
cargo test --locked --no-fail-fast --lib --tests --target "$host" -- --skip the_c_program_answers
