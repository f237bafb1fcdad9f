#!/usr/bin/env bash
# The C and C++ programs and the header compile without a warning.
. "$(dirname "$0")/lib.sh"
need g++ "apt-get install g++"
need clang++ "apt-get install clang"

strict=(-O2 -Wall -Wextra -Wpedantic -Werror -Iinclude -c -o "$scratch/object")
for cc in gcc clang; do
    quietly "batch.c, $cc" $cc -std=c11 "${strict[@]}" c_examples/batch.c
done
for cxx in g++ clang++; do
    quietly "eval.cpp, $cxx" $cxx -std=c++17 -fopenmp "${strict[@]}" c_examples/eval.cpp
done
