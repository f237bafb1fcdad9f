#!/usr/bin/env bash
# run.sh PROMPTS STEPS: answers the prompts with the library, and compares its answers with the baseline's.
. "$(dirname "$0")/lib.sh"
prompts=$1 steps=$2
model=("$BUILD/7m.bin" -z "$BUILD/tokenizer.bin" -i "$prompts" -n "$steps")

echo "== libgetp"
"$BUILD/eval" "${model[@]}" -o "$scratch/getp"
echo "== baseline"
"$BUILD/eval" "${model[@]}" -m baseline -o "$scratch/baseline"
echo "=="
same "both give the same tokens" "$scratch/getp" "$scratch/baseline"
