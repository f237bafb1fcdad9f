#!/usr/bin/env bash
# Runs each of the Makefile's targets given, whatever becomes of the others, counts them and says what they took:
# seconds by the clock, and seconds of processor time.
. "$(dirname "$0")/lib.sh"

# Seconds of processor time of everything that has ended so far, in $cpu.
count_cpu() {
    times >"$scratch/times"
    cpu=$(awk -F '[ms ]+' 'NR == 2 { printf "%d", ($1 + $3) * 60 + $2 + $4 }' "$scratch/times")
}

# A script that cannot do its work here writes the reason into this file.
export SKIPPED=$scratch/skipped
passed=0 failed=0 skipped=0 summary=()
for check in "$@"; do
    echo "=== $check"
    : >"$SKIPPED"
    count_cpu
    start=$SECONDS start_cpu=$cpu
    if ! "${MAKE:-make}" --no-print-directory "$check"; then
        result=FAILED failed=$((failed + 1))
    elif [[ -s $SKIPPED ]]; then
        result=$(<"$SKIPPED") skipped=$((skipped + 1))
    else
        result=passed passed=$((passed + 1))
    fi
    count_cpu
    summary+=("$(printf '%-18s %5d s %5d s CPU  %s' "$check" $((SECONDS - start)) $((cpu - start_cpu)) "$result")")
done
echo "==="
printf '%s\n' "${summary[@]}"
printf '%-18s %5d s %5d s CPU\n' "all" $SECONDS "$cpu"
echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0))
