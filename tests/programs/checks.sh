#!/usr/bin/env bash
# Runs each of the Makefile's targets given, whatever becomes of the others, and counts them.
. "$(dirname "$0")/lib.sh"

# A script that cannot do its work here writes the reason into this file.
export SKIPPED=$scratch/skipped
passed=0 failed=0 skipped=0 summary=()
for check in "$@"; do
    echo "=== $check"
    : >"$SKIPPED"
    start=$SECONDS
    if ! "${MAKE:-make}" --no-print-directory "$check"; then
        result=FAILED failed=$((failed + 1))
    elif [[ -s $SKIPPED ]]; then
        result=$(<"$SKIPPED") skipped=$((skipped + 1))
    else
        result=passed passed=$((passed + 1))
    fi
    summary+=("$(printf '%-16s %5d s  %s' "$check" $((SECONDS - start)) "$result")")
done
echo "==="
printf '%s\n' "${summary[@]}"
echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0))
