#!/usr/bin/env bash
# Fuzzes each target for FUZZ_SECONDS, from the seeds in fuzz/seeds and whatever earlier runs have kept in fuzz/corpus.
# The targets are plain programs with libFuzzer's main; `cargo fuzz` runs them too, but is not needed.
. "$(dirname "$0")/lib.sh"

# Sanitizers and coverage are unstable options, which a stable compiler takes only so; --target keeps build scripts free
# of them. Coverage: a counter and a table entry an edge, and both sides of each comparison.
export RUSTC_BOOTSTRAP=1
coverage=(-Cpasses=sancov-module)
for option in level=4 inline-8bit-counters pc-table trace-compares stack-depth; do
    coverage+=("-Cllvm-args=-sanitizer-coverage-$option")
done
export RUSTFLAGS="-Zsanitizer=address -Cdebug-assertions --cfg fuzzing ${coverage[*]}"
host=$(rustc -vV | awk '/^host/ { print $2 }')
"${CARGO:-cargo}" build --locked --release --bins --manifest-path fuzz/Cargo.toml \
    --target-dir "${TARGET:?}/fuzz" --target "$host"

fuzz() {
    local target=$1 log=$scratch/$1.log
    mkdir -p "fuzz/corpus/$target" "fuzz/artifacts/$target"
    # The library's lines on stderr, one for each refusal, would be all one sees. No input takes a second on an idle
    # machine; the time-out is by the clock, and others may use the cores.
    "$TARGET/fuzz/$host/release/$target" "fuzz/corpus/$target" "fuzz/seeds/$target" \
        -artifact_prefix="fuzz/artifacts/$target/" -max_total_time="${FUZZ_SECONDS:?}" -timeout=60 -rss_limit_mb=2048 \
        -close_fd_mask=3 -print_final_stats=1 >"$log" 2>&1 || {
        tail -n 60 "$log" >&2
        fail "fuzzing $target"
    }
    echo "ok: $target: $(awk '/number_of_executed_units/ { print $2 }' "$log") inputs"
}

targets=(fuzz/fuzz_targets/*.rs)
targets=("${targets[@]##*/}")
side_by_side fuzz "${targets[@]%.rs}"
