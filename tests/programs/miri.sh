#!/usr/bin/env bash
# The library's own tests under Miri, as far as it can run them: what deals with the program's buffers, its text and
# files' bytes, the plan of a step, and the portable vectors, whose code is that of the others. Miri has none of AVX's
# instructions, does not map files, does not know the C library's signals, and rounds `expf` at random on purpose. MIRI
# names the toolchain, "nightly" by default.
. "$(dirname "$0")/lib.sh"
toolchain=+${MIRI:-nightly}
if ! cargo "$toolchain" miri --version >/dev/null 2>&1; then
    echo "SKIPPED: no Miri; install it with: rustup toolchain install nightly --component miri,rust-src" |
        tee "${SKIPPED:-/dev/null}"
    exit 0
fi

# Some tests ask for a file that is not there.
export MIRIFLAGS=-Zmiri-disable-isolation
cargo "$toolchain" miri test --locked --lib --target-dir "$TARGET/miri" -- \
    checkpoint::tests dtype:: model:: options:: report::escape report::tests::texts requests:: \
    sampler::tests::the_stream sampler::tests::request_seeds scheduler:: simd::tests tokenizer:: \
    --skip exp_keeps_its_bound
