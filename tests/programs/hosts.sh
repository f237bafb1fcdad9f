#!/usr/bin/env bash
# Programs that do to the library what hosts do: they end in the middle, fork, lose their readers, call on a small
# stack, and were compiled with an older header. They are built without optimization, so that each call is where it is
# written.
. "$(dirname "$0")/lib.sh"
need g++ "apt-get install g++"

strict=(-O0 -g -Wall -Wextra -Wpedantic -Werror -Iinclude)
link=(-L"$TARGET/release" -lgetp -Wl,-rpath,"$TARGET/release" -lpthread)
export GETP_THREADS=2 GETP_PROGRESS=0

for program in exit.cpp fork.c pipes.c small_stack.c old_options.c; do
    case $program in
        *.c) gcc -std=c11 "${strict[@]}" -o "$scratch/program" "tests/programs/$program" "${link[@]}" ;;
        *) g++ -std=c++17 "${strict[@]}" -o "$scratch/program" "tests/programs/$program" "${link[@]}" ;;
    esac
    "$scratch/program" "$BUILD/tiny.bin" "$BUILD/tiny-tokenizer.bin" c_examples/prompts.txt \
        >"$scratch/stdout" 2>"$scratch/log" || {
        status=$?
        cat "$scratch/log" >&2
        fail "$program: exit status $status"
    }
    grep "^ok: " "$scratch/log" || fail "$program says nothing"
done
