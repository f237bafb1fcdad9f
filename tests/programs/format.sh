#!/usr/bin/env bash
# What rustfmt does not look at: the C and C++ programs are as clang-format has them, no line of C, C++ or a script and
# no comment of Rust is longer than 120 characters, documents are as documents.py wants them, and their pictures are
# what the code says.
. "$(dirname "$0")/lib.sh"
need git "apt-get install git"
need clang-format-22 "apt-get install clang-format-22"
need python3 "apt-get install python3"
clang-format-22 --dry-run --Werror c_examples/*.c c_examples/*.cpp c_examples/*.h
clang-format-22 --dry-run --Werror tests/hip/*.cpp tests/hip/emulator/*.cpp tests/hip/emulator/*.h

# Files from before this rule, which may go on having longer lines. No file is added; one whose lines are mended is
# taken off.
mapfile -t older <tests/programs/long_lines.txt
mapfile -t files < <(git ls-files '*.h' '*.hip' '*.cpp' '*.c' '*.py' '*.sh' Makefile .ci/run "${older[@]/#/:!}")
export LC_ALL=C.UTF-8
! grep -nE '^.{121,}' "${files[@]}" || fail "lines of more than 120 characters"
# rustfmt leaves comments as they are. Tables in them may be longer.
mapfile -t files < <(git ls-files '*.rs' "${older[@]/#/:!}")
! grep -nE '^.{121,}' "${files[@]}" | grep -E '^[^:]*:[0-9]*: *//[/!]? [^|]' ||
    fail "comments of more than 120 characters"
echo "ok: lines are at most 120 characters long"

tests/programs/documents.py || fail "documents"
echo "ok: the documents' lines, links, and the files that they and comments name"
docs/pictures.py --check || fail "pictures"
echo "ok: the pictures are what the code says"
