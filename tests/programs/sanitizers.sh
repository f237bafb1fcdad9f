#!/usr/bin/env bash
# Address, leak and undefined-behaviour sanitizers: the C and C++ programs with the library as it ships, the same with a
# library that is instrumented too, and the library's own tests.
. "$(dirname "$0")/lib.sh"
need g++ "apt-get install g++"
cargo=${CARGO:-cargo}

# The library's tests and the programs share one build of it. Third-party crates are those of Cargo's debug folder as
# far as other checks have compiled them: what they do to memory is checked where they call the allocator, or have
# generic code that is compiled here.
own=$TARGET/sanitizers
third_party() {
    local debug=$TARGET/debug part
    mkdir -p "$own/debug/deps"
    for part in build .fingerprint; do
        [[ ! -d $debug/$part ]] || cp -a "$debug/$part" "$own/debug"
        rm -rf "$own/debug/$part"/getp-*
    done
    find "$debug/deps" -maxdepth 1 -name '*.*' -not -name '*getp*' -exec cp -a -t "$own/debug/deps" {} + || true
}
instrumented() {
    INSTRUMENT="-Zsanitizer=address" RUSTC_WORKSPACE_WRAPPER=$PWD/tests/programs/rustc.sh "$cargo" test --locked \
        --features tokenizer-json --target-dir "$own" "$@"
}

# Memory that cannot be had is to be an error, as without the sanitizer.
export ASAN_OPTIONS=allocator_may_return_null=1:detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS=print_stacktrace=1 GETP_PRINT=0
strict=(-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -Iinclude)
files=(-z "$BUILD/tiny-tokenizer.bin" -i c_examples/prompts.txt -n 200)

# programs FOLDER: builds the programs with the library there and runs each way of answering.
programs() {
    local name=${1#"$TARGET/"} link=(-L"$1" -lgetp -Wl,-rpath,"$1") precision
    local own=$scratch/${name//\//_}
    mkdir "$own"
    gcc -std=c11 "${strict[@]}" -o "$own/batch" c_examples/batch.c "${link[@]}"
    gcc -std=c11 "${strict[@]}" -o "$own/batch_hosts" tests/programs/batch_hosts.c "${link[@]}" -lpthread -lm
    g++ -std=c++17 -fopenmp "${strict[@]}" -o "$own/eval" c_examples/eval.cpp "${link[@]}"
    for precision in exact fast; do
        export GETP_PRECISION=$precision
        GETP_LOGITS=$own/logits GETP_PROFILE=1 quietly "batch, $precision, $name" \
            "$own/batch" "$BUILD/tiny.bin" "$BUILD/tiny-tokenizer.bin" c_examples/prompts.txt 200
        quietly "eval, $precision, $name" "$own/eval" "$BUILD/tiny.bin" "${files[@]}" -o "$own/$precision" \
            -t 0.9 -s 5
    done
    unset GETP_PRECISION
    GETP_THREADS=2 quietly "hosts of a batch, $name" \
        "$own/batch_hosts" "$BUILD/tiny.bin" "$BUILD/tiny-tokenizer.bin" c_examples/prompts.txt short
    quietly "baseline, $name" "$own/eval" "$BUILD/tiny.bin" "${files[@]}" -o "$own/baseline" -m baseline \
        -t 0.9 -s 5
    same "answers, $name" "$own/exact" "$own/baseline"
    for model in /dev/null /does/not/exist "$BUILD"; do
        ! "$own/batch" "$model" "$BUILD/tiny-tokenizer.bin" c_examples/prompts.txt 9 >"$own/log" 2>&1 ||
            fail "$model is taken for a model"
        ! grep -aE "Sanitizer|runtime error" "$own/log" || fail "a refused model, $name"
    done
    echo "ok: refused models, $name"
    ! "$own/eval" "$BUILD/tiny.bin" "${files[@]}" -o /dev/full >"$own/log" 2>&1 || fail "-o /dev/full succeeds"
    ! grep -aE "Sanitizer|runtime error" "$own/log" || fail "a failure before finish, $name"
    echo "ok: a failure before finish, $name"
}

# The library's own tests, but those that are long and of safe code alone: the scheduler, processes that share requests,
# replicas (which threads.sh runs), the simulation of many devices, tokenizers, the choice of kernels (tests/ladders.rs
# also makes families that stay to the end), the program getp, and what reads sources and code objects.
tests=(--lib)
for name in $(integration_tests); do
    [[ " code_objects gpu header hip ladders loads_in_flight program ranks replicas rooms scheduler side_by_side simt \
        tokenizer " == *" $name "* ]] ||
        tests+=(--test "$name")
done

[[ -e $own ]] || third_party
# `cargo build` would take other features of some crates than the tests do, and build all again.
instrumented --no-run "${tests[@]}"
side_by_side programs "$TARGET/release" "$own/debug/deps"

# The test of the C program links it to the library without a sanitizer's runtime; it has just run with one. A
# sanitizer's report goes to stderr, which one of the tests puts into a file unless it is told not to. What the
# tokenizer's Rust API does takes minutes here, and is safe code alone.
instrumented --no-fail-fast "${tests[@]}" -- --nocapture --skip the_c_program_answers --skip cluster::simulation \
    --skip tiktoken_s_ids --skip entries_are_those --skip files_that_would_give --skip what_is_no_tokenizer
