#!/usr/bin/env bash
# A library with the feature tokenizer-json: its tokens against tiktoken, in Rust, and its conversations against
# openai-harmony, whose vocabulary is the one that tiktoken-rs carries; and the program getp, also as docs/batch.md
# has a reader run it.
. "$(dirname "$0")/lib.sh"
[[ -e ${harmony:?}/$harmony_version ]] ||
    fail "openai-harmony is missing; install it with: tests/programs/setup.sh test"
arguments=(--locked --features cli --bin getp --test text --test program)
"${CARGO:-cargo}" clippy "${arguments[@]}" --lib -- -D warnings
"${CARGO:-cargo}" test "${arguments[@]}"
library_of "cpu tokenizer-json" "${arguments[@]}"
# Of this machine alone: Cargo would get the other systems' crates.
host=$(rustc -vV | awk '/^host/ { print $2 }')
TIKTOKEN_ENCODINGS_BASE=$("${CARGO:-cargo}" metadata --locked --format-version 1 --filter-platform "$host" |
    python3 -c 'import json, os, sys
packages = {package["name"]: package["manifest_path"] for package in json.load(sys.stdin)["packages"]}
print(os.path.join(os.path.dirname(packages["tiktoken-rs"]), "assets"))')
export TIKTOKEN_ENCODINGS_BASE
"$harmony/bin/python" tests/programs/harmony.py "$scratch/library/libgetp.so" "$BUILD/tokenizer.json" 600

# Cargo's program in the place of an installed one.
mkdir "$scratch/bin"
ln -s "$TARGET/debug/getp" "$scratch/bin"
sed -n '/^## A first run$/,/^## /s/^    //p' docs/batch.md >"$scratch/first_run"
rm -f build/answers.jsonl
quietly "docs/batch.md's first run" env PATH="$scratch/bin:$PATH" bash -euo pipefail "$scratch/first_run"
[[ $(grep -c '"error":null' build/answers.jsonl) == $(wc -l <build/requests.jsonl) ]] ||
    fail "docs/batch.md's requests are not all answered"
