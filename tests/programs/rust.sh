#!/usr/bin/env bash
# The library's own tests: all with its default features, or, where TOOLS_PROFILE is `dev`, with every feature, as the
# other checks build it: then without the tests that these run.
. "$(dirname "$0")/lib.sh"
cargo=${CARGO:-cargo}
if [[ ${TOOLS_PROFILE:?} != dev ]]; then
    "$cargo" test --locked --no-fail-fast
    exit
fi
find_toolchains
tests=(--lib --example compare_logits --example make_samples)
for name in $(integration_tests); do
    # simt.sh, gpu.sh, amd.sh and text.sh run these.
    [[ " gpu simt code_objects hip loads_in_flight text program " == *" $name "* ]] || tests+=(--test "$name")
done
"$cargo" test --locked "${as_users_do[@]}" --features "${features:?}" --no-fail-fast "${tests[@]}"
"$cargo" test --locked --features "$features" --doc
