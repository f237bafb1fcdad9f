#!/usr/bin/env bash
# Programs that do to the library what hosts do: they end in the middle, fork, lose their readers, close their files,
# call on a small stack, compute in other ways, load the library late, were compiled with an older header, and leave a
# batch open. They are built without optimization, so that each call is where it is written.
. "$(dirname "$0")/lib.sh"
need g++ "apt-get install g++"

strict=(-O0 -g -Wall -Wextra -Wpedantic -Werror -Iinclude)
link=(-L"$TARGET/release" -lgetp -Wl,-rpath,"$TARGET/release" -lpthread)
export GETP_THREADS=2 GETP_PROGRESS=0

# compile PROGRAM TO FLAGS...
compile() {
    case $1 in
        *.c) gcc -std=c11 "${strict[@]}" -o "$2" "tests/programs/$1" "${@:3}" "${link[@]}" ;;
        *) g++ -std=c++17 "${strict[@]}" -o "$2" "tests/programs/$1" "${@:3}" "${link[@]}" ;;
    esac
}

# run PROGRAM ARGUMENTS...: the program that was compiled last.
run() {
    "$scratch/program" "$BUILD/tiny.bin" "$BUILD/tiny-tokenizer.bin" c_examples/prompts.txt "${@:2}" \
        >"$scratch/stdout" 2>"$scratch/log" || {
        local status=$?
        cat "$scratch/log" >&2
        fail "$1: exit status $status"
    }
    grep "^ok: " "$scratch/log" || fail "$1 says nothing"
}

for program in exit.cpp exit_meanwhile.c fork.c pipes.c small_stack.c old_options.c closed.c float_environment.c \
    batch_hosts.c batch_ends.c; do
    compile "$program" "$scratch/program" -lm
    run "$program"
done

compile constructor.cpp "$scratch/plugin.so" -DPLUGIN -shared -fPIC
compile constructor.cpp "$scratch/program" -ldl
run constructor.cpp "$scratch/plugin.so"
