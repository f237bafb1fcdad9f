#!/usr/bin/env bash
# What cannot be written costs its own output and nothing else.
. "$(dirname "$0")/lib.sh"
cp "$BUILD/tiny.bin" "$BUILD/tiny-tokenizer.bin" c_examples/prompts.txt "$scratch"
eval=("$BUILD/eval" "$scratch/tiny.bin" -z "$BUILD/tiny-tokenizer.bin" -i c_examples/prompts.txt -n 64)
batch=("$BUILD/batch" "$BUILD/tiny.bin" "$BUILD/tiny-tokenizer.bin" c_examples/prompts.txt 64)

GETP_PRINT=0 "${eval[@]}" -o "$scratch/expected" >"$scratch/log" 2>&1

"${eval[@]}" -o "$scratch/answers" >/dev/full 2>"$scratch/log"
same "the disk behind stdout is full" "$scratch/answers" "$scratch/expected"

"${eval[@]}" -o "$scratch/answers" >&- 2>"$scratch/log"
same "stdout is closed" "$scratch/answers" "$scratch/expected"

"${eval[@]}" -o "$scratch/answers" >"$scratch/log" 2>/dev/full
same "the disk behind stderr is full" "$scratch/answers" "$scratch/expected"

mkfifo "$scratch/fifo"
for logits in /dev/full "$scratch/missing/logits" /proc/version "$scratch/fifo" "$scratch/tiny.bin"; do
    rm -f "$scratch/answers"
    ! GETP_LOGITS=$logits "${eval[@]}" -o "$scratch/answers" >"$scratch/log" 2>&1 || fail "logits go to $logits"
    grep -aq "^getp: \(error: \)\?$logits: " "$scratch/log" || fail "$logits: nobody said so"
    test ! -e "$scratch/answers" || fail "$logits: there are answers without logits"
    echo "ok: logits cannot go to $logits"
done
! GETP_LOGITS=$scratch/both "${batch[@]}" >"$scratch/both" 2>"$scratch/log" || fail "logits go to the file of stdout"
grep -q "/both: the program prints there" "$scratch/log" || fail "the file of stdout: nobody said so"
same "the checkpoint is not overwritten" "$scratch/tiny.bin" "$BUILD/tiny.bin"

# Files that the library or the program has read and closed.
for logits in tiny-tokenizer.bin prompts.txt; do
    ! GETP_LOGITS=$scratch/$logits "$BUILD/batch" "$BUILD/tiny.bin" "$scratch/tiny-tokenizer.bin" \
        "$scratch/prompts.txt" 64 >"$scratch/answers" 2>"$scratch/log" || fail "logits go to $logits"
    grep -q "$logits: it holds something else" "$scratch/log" || fail "$logits: nobody said so"
done
same "the tokenizer is not overwritten" "$scratch/tiny-tokenizer.bin" "$BUILD/tiny-tokenizer.bin"
same "the prompts are not overwritten" "$scratch/prompts.txt" c_examples/prompts.txt

# The limit is in blocks of 1 KiB; the signal that comes with it would end the program.
(
    ulimit -f 64
    GETP_LOGITS=$scratch/logits "${eval[@]}" -o "$scratch/answers" >"$scratch/log" 2>&1
)
grep -q "logits are not recorded" "$scratch/log" || fail "a limit on files' sizes: nobody said so"
same "logits reach the limit on files' sizes" "$scratch/answers" "$scratch/expected"

# The program's own file is the program's own failure; a path that cannot be written is found before it computes.
for out in /dev/full /proc/version; do
    ! "${eval[@]}" -o "$out" >"$scratch/log" 2>&1 || fail "-o $out succeeds"
    grep -aq "^eval: $out: " "$scratch/log" || fail "-o $out: nobody said so"
done
for out in "$scratch" "$scratch/missing/answers"; do
    ! "${eval[@]}" -o "$out" >"$scratch/log" 2>&1 || fail "-o $out succeeds"
    grep -aq "^eval: $out: " "$scratch/log" || fail "-o $out: nobody said so"
    ! grep -aq "warm up" "$scratch/log" || fail "-o $out: it computes first"
done
! "${batch[@]}" >/dev/full 2>"$scratch/log" || fail "batch >/dev/full succeeds"
grep -aq "^batch: stdout: " "$scratch/log" || fail "batch >/dev/full: nobody said so"
echo "ok: programs tell when their own output is lost"
