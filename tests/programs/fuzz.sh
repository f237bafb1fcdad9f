#!/usr/bin/env bash
# Fuzzes each target for FUZZ_SECONDS, from the seeds in fuzz/seeds and whatever earlier runs have kept in fuzz/corpus.
. "$(dirname "$0")/lib.sh"
need cargo-fuzz "cargo install cargo-fuzz --locked"

# Sanitizers are unstable options, which a stable compiler takes only so.
export RUSTC_BOOTSTRAP=1
cargo fuzz build --target-dir "$TARGET/fuzz"
for target in $(cargo fuzz list); do
    mkdir -p "fuzz/corpus/$target"
    # The library's lines on stderr, one for each refusal, would be all one sees.
    cargo fuzz run --target-dir "$TARGET/fuzz" "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- \
        -max_total_time="$FUZZ_SECONDS" -timeout=20 -rss_limit_mb=2048 -close_fd_mask=3 -print_final_stats=1 \
        >"$scratch/log" 2>&1 || {
        tail -n 60 "$scratch/log" >&2
        fail "fuzzing $target"
    }
    echo "ok: $target: $(awk '/number_of_executed_units/ { print $2 }' "$scratch/log") inputs"
done
