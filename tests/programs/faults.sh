#!/usr/bin/env bash
# What cannot be written costs its own output and nothing else.
. "$(dirname "$0")/lib.sh"
eval=("$BUILD/eval" "$BUILD/tiny.bin" -z "$BUILD/tiny-tokenizer.bin" -i c_examples/prompts.txt -n 64)
batch=("$BUILD/batch" "$BUILD/tiny.bin" "$BUILD/tiny-tokenizer.bin" c_examples/prompts.txt 64)

GETP_PRINT=0 "${eval[@]}" -o "$scratch/expected" >"$scratch/log" 2>&1

"${eval[@]}" -o "$scratch/answers" >/dev/full 2>"$scratch/log"
same "the disk behind stdout is full" "$scratch/answers" "$scratch/expected"

"${eval[@]}" -o "$scratch/answers" >&- 2>"$scratch/log"
same "stdout is closed" "$scratch/answers" "$scratch/expected"

"${eval[@]}" -o "$scratch/answers" >"$scratch/log" 2>/dev/full
same "the disk behind stderr is full" "$scratch/answers" "$scratch/expected"

for logits in /dev/full "$scratch/missing/logits" /proc/version; do
    GETP_LOGITS=$logits "${eval[@]}" -o "$scratch/answers" >"$scratch/log" 2>&1
    grep -q "logits are not recorded" "$scratch/log" || fail "$logits: nobody said so"
    same "logits cannot go to $logits" "$scratch/answers" "$scratch/expected"
done

# The program's own file is the program's own failure.
for out in /dev/full /proc/version; do
    ! "${eval[@]}" -o $out >"$scratch/log" 2>&1 || fail "-o $out succeeds"
    grep -aq "^eval: $out: " "$scratch/log" || fail "-o $out: nobody said so"
done
! "${batch[@]}" >/dev/full 2>"$scratch/log" || fail "batch >/dev/full succeeds"
grep -aq "^batch: stdout: " "$scratch/log" || fail "batch >/dev/full: nobody said so"
echo "ok: programs tell when their own output is lost"
