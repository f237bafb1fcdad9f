#!/usr/bin/env bash
# A library with the feature tokenizer-json: its tokens against tiktoken, in Rust, and its conversations against
# openai-harmony, whose vocabulary is the one that tiktoken-rs carries; the program getp, also as docs/batch.md has a
# reader run it; and chat.c.
. "$(dirname "$0")/lib.sh"
[[ -e ${harmony:?}/$harmony_version ]] ||
    fail "openai-harmony is missing; install it with: tests/programs/setup.sh test"
find_toolchains
arguments=(--locked --features "${features:?}" --bin getp --test text --test program)
"${CARGO:-cargo}" test "${as_users_do[@]}" "${arguments[@]}"
library_of "${arguments[@]}"
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

gcc -std=c11 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -Iinclude -o "$scratch/chat" \
    c_examples/chat.c -L"$scratch/library" -lgetp -Wl,-rpath,"$scratch/library"
# chat NAME ARGUMENT...: what it prints goes to $scratch/said.
chat() {
    quietly "chat.c, $1" bash -c '"$0" "$@" >"$said"' "$scratch/chat" "$BUILD/7m" -n 24 "${@:2}"
}
export said=$scratch/said
chat "two turns" -s 'Be "brief"' Hello $'And\tyou?'
chat "lines" <<<$'one\ntwo'
cat >"$scratch/conversation.json" <<'END'
{"continue_final_message": true,
 "messages": [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two"}]}
END
chat "an answer that goes on with a message" -f "$scratch/conversation.json"
[[ $(head -c 8 "$said") == "[final] " ]] || fail "chat.c says $(cat "$said")"
! "$scratch/chat" "$BUILD/7m" -f /does/not/exist 2>"$said" || fail "chat.c answers no file"
