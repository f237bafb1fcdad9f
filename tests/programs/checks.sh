#!/usr/bin/env bash
# Runs each of the Makefile's targets given, whatever becomes of the others, counts them and says what they took:
# seconds by the clock, and seconds of processor time.
#
# One more than there are cores run at a time, and at most four: one from the front of the list, the others from its
# back, so that the parts that take one core, or wait for another's build, leave none idle. What a target prints is
# shown as a whole when it has ended. What names the failures, and the end of what the failed ones printed, is shown
# again last of all, where a log that is cut still has it.
. "$(dirname "$0")/lib.sh"

# check NAME: what it prints goes to NAME.log, what becomes of it to NAME.result, its line of the table to NAME.line.
check() {
    local name=$1 result=passed start=$SECONDS cpu
    # A script that cannot do its work here writes the reason into this file.
    export SKIPPED=$scratch/$name.skipped
    "${MAKE:-make}" --no-print-directory "$name" >"$scratch/$name.log" 2>&1 || result=FAILED
    [[ $result == FAILED || ! -s $SKIPPED ]] || result=$(<"$SKIPPED")
    # Processor time of what this shell has started.
    times >"$scratch/$name.times"
    cpu=$(awk -F '[ms ]+' 'NR == 2 { printf "%d", ($1 + $3) * 60 + $2 + $4 }' "$scratch/$name.times")
    echo "$result" >"$scratch/$name.result"
    printf '%-18s %5d s %5d s CPU  %s\n' "$name" $((SECONDS - start)) "$cpu" "$result" >"$scratch/$name.line"
}

checks=("$@")
cores=$(nproc)
slots=$((cores < 3 ? cores + 1 : 4))
first=0 last=$(($# - 1))
declare -A running=()
begin() {
    echo "=== $1 begins"
    check "$1" &
    running[$!]=$1
}
passed=0 skipped=0 failed=()
end() {
    local name=$1
    echo "=== $(<"$scratch/$name.line")"
    cat "$scratch/$name.log"
    case $(<"$scratch/$name.result") in
        passed) passed=$((passed + 1)) ;;
        FAILED) failed+=("$name") ;;
        *) skipped=$((skipped + 1)) ;;
    esac
}

front=
while ((first <= last || ${#running[@]})); do
    if ((first <= last)) && [[ -z $front ]]; then
        begin "${checks[first]}"
        front=$! first=$((first + 1))
    elif ((first <= last && ${#running[@]} < slots)); then
        begin "${checks[last]}"
        last=$((last - 1))
    else
        wait -n -p ended
        end "${running[$ended]}"
        unset "running[$ended]"
        [[ $ended != "$front" ]] || front=
    fi
done

echo "==="
cpu=0
for name; do
    cat "$scratch/$name.line"
    cpu=$((cpu + $(awk '{ print $4 }' "$scratch/$name.line")))
done
printf '%-18s %5d s %5d s CPU\n' "all" $SECONDS "$cpu"
echo "$passed passed, ${#failed[@]} failed, $skipped skipped"
for name in "${failed[@]}"; do
    echo "=== $name FAILED"
    grep -aE '^(test .* FAILED$|FAILED: |error\b)' "$scratch/$name.log" | head -n 20 || true
    echo "=== $name: the end of its log"
    tail -n 40 "$scratch/$name.log"
done
((${#failed[@]} == 0))
