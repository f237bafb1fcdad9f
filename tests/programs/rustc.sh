#!/usr/bin/env bash
# Cargo's RUSTC_WORKSPACE_WRAPPER: compiles this repository's own crates with the flags in INSTRUMENT, which may be
# unstable ones, and leaves build scripts and third-party crates as they are.
[[ " $* " == *" --crate-name build_script_"* ]] || {
    read -ra flags <<<"${INSTRUMENT:?}"
    export RUSTC_BOOTSTRAP=1
}
exec "$@" "${flags[@]}"
