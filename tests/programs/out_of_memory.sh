#!/usr/bin/env bash
# Whatever memory cannot be had, the program is told so and lives: each run ends well with the same answers, or fails
# with a line. First under limits of the address space, from one in which it does not even start to one in which all is
# well; then with a malloc and mmap that fail once, or from then on: at the first request above 4 KiB, at the second,
# and so on; then with small requests that fail. The arguments are the tiny model's.
. "$(dirname "$0")/lib.sh"

preload=$scratch/failing_malloc.so
gcc -std=c11 -O1 -Wall -Wextra -Werror -fPIC -shared -o "$preload" tests/programs/failing_malloc.c -ldl
sed 's/GETP_OFF/GETP_ON/' c_examples/batch.c |
    gcc -std=c11 -O1 -Iinclude -o "$scratch/printing" -x c - -x none \
        -L"$TARGET/release" -lgetp -Wl,-rpath,"$TARGET/release"
gcc -std=c11 -O1 -Wall -Wextra -Wpedantic -Werror -Iinclude -o "$scratch/batch_answers" tests/programs/batch_answers.c \
    -L"$TARGET/release" -lgetp -Wl,-rpath,"$TARGET/release"
"$TOOLS/make_model" "$@" --format safetensors "$scratch/directory" 2>/dev/null
{
    echo 40
    for i in {1..40}; do printf 'prompt %.0s' $(seq $((i % 7 + 3))) && echo; done
} >"$scratch/prompts"
bin=$BUILD/tiny.bin
export GETP_THREADS=2 GETP_KV_MB=4

# program PROGRAM MODEL [TEMPERATURE TOPP]: what the runs below run; keeps its answers.
program() {
    command=("$1" "$2" "$BUILD/tiny-tokenizer.bin" "$scratch/prompts" 200 "${@:3}")
    "${command[@]}" >"$scratch/expected" 2>"$scratch/lines" || {
        cat "$scratch/lines" >&2
        fail "with all memory: ${command[*]}"
    }
}

lines_have() {
    grep -aq "$1" "$scratch/lines"
}

# What the C library says then.
not_started='error while loading shared libraries\|memory for find-object data\|for initial thread\|process tunables'

# judge NAME STATUS: what a run has left in $scratch/answers and $scratch/lines.
judge() {
    if (($2 == 0)); then
        lines_have ' not printed' || cmp "$scratch/answers" "$scratch/expected" >&2 || fail "$1: other answers"
    elif (($2 == 127)) && lines_have "$not_started"; then
        : # the C library could not start the program
    elif (($2 >= 126)) || lines_have 'memory allocation of\|panicked\|internal error\|(null)' ||
        ! lines_have '^getp: .'; then
        cat "$scratch/lines" >&2
        fail "$1: status $2"
    fi
}

# ladder NAME FROM TO PERCENT: limits in KiB, each so much above the last.
ladder() {
    local limit status told=0 well=0
    for ((limit = $2; limit <= $3; limit += limit * $4 / 100)); do
        status=0
        (ulimit -v "$limit" && exec "${command[@]}") >"$scratch/answers" 2>"$scratch/lines" || status=$?
        judge "$1 within $limit KiB" $status
        if ((status)); then told=$((told + 1)); else well=$((well + 1)); fi
    done
    ((told && well)) || fail "$1: $told runs failed, $well went well; other limits are needed"
    echo "ok: $1: $told limits are told, $well suffice"
}

# injected NAME [VARIABLE]: lets each request fail in turn; VARIABLE, else FAIL_AT, tells failing_malloc.c which.
# FAIL_ON, FAIL_EARLY and FAIL_LATE go there, too.
injected() {
    local n status told=0
    for ((n = 1; ; n++)); do
        status=0
        env "${2:-FAIL_AT}=$n" LD_PRELOAD="$preload" "${command[@]}" \
            3>"$scratch/failed" >"$scratch/answers" 2>"$scratch/lines" || status=$?
        judge "$1, request $n" $status
        test -s "$scratch/failed" || break
        told=$((told + (status != 0)))
    done
    ((status == 0 && told > 0)) || fail "$1: of $n runs $told were told, and the last ended with $status"
    echo "ok: $1: each of $((n - 1)) requests fails, $told runs are told"
}

for GETP_PRECISION in exact fast; do
    export GETP_PRECISION
    program "$BUILD/batch" "$bin"
    ladder "$GETP_PRECISION" 3000 40000 1
    GETP_STEP_TOKENS=1048576 GETP_MAX_BATCH=65536 ladder "$GETP_PRECISION, steps of a million tokens" 30000 8000000 25
    injected "$GETP_PRECISION, greedy"
    program "$BUILD/batch" "$bin" 0.8 0.9
    FAIL_EARLY=1 injected "$GETP_PRECISION, nucleus, from the start"
    FAIL_ON=1 injected "$GETP_PRECISION, nucleus, all from then on"
    program "$scratch/printing" "$scratch/directory" 1 1
    GETP_PROFILE=1 GETP_LOGITS=$scratch/logits injected "$GETP_PRECISION, directory, all tokens, print, profile, logits"
done
program "$BUILD/batch" "$bin"
command[4]=4
"${command[@]}" >"$scratch/expected" 2>"$scratch/lines"
injected "four steps, small requests of the library" FAIL_SMALL
program "$BUILD/batch" "$bin"
GETP_THREADS=64 ladder "64 threads" 30000 20000000 15
FAIL_ON=1 injected "greedy, all from then on"

program "$scratch/batch_answers" "$bin" 0.8 0.9
command[4]=12
"${command[@]}" >"$scratch/expected" 2>"$scratch/lines"
ladder "a batch" 3000 40000 6
injected "a batch"
FAIL_ON=1 injected "a batch, all from then on"
FAIL_LATE=1 injected "a batch, small requests of the library" FAIL_SMALL
