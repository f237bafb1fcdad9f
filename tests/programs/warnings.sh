#!/usr/bin/env bash
# The C and C++ programs and the header compile without a warning.
. "$(dirname "$0")/lib.sh"
need g++ "apt-get install g++"
need clang++ "apt-get install clang"

compile() {
    local flags=(-O2 -Wall -Wextra -Wpedantic -Werror -Iinclude -c -o "$scratch/$1.o")
    case $1 in
    *++)
        quietly "eval.cpp, $1" "$1" -std=c++17 -fopenmp "${flags[@]}" c_examples/eval.cpp
        quietly "chat.c, $1" "$1" -x c++ -std=c++17 "${flags[@]}" c_examples/chat.c
        ;;
    *)
        quietly "batch.c, $1" "$1" -std=c11 "${flags[@]}" c_examples/batch.c
        quietly "stream.c, $1" "$1" -std=c11 "${flags[@]}" c_examples/stream.c
        quietly "chat.c, $1" "$1" -std=c11 "${flags[@]}" c_examples/chat.c
        ;;
    esac
}
side_by_side compile g++ clang++ gcc clang
