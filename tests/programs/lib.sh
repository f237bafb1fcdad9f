# shellcheck shell=bash
# What the scripts here share; each sources it first. The Makefile sets TARGET, BUILD and TOOLS.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# A folder that is gone with the script, so that scripts may run side by side.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# need PROGRAM INSTALL_COMMAND
need() {
    command -v "$1" >/dev/null || fail "$1 is missing; install it with: $2"
}

# The version in Cargo.toml.
version_here() {
    sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1
}

# quietly NAME COMMAND...: its output is shown only if it fails.
quietly() {
    local name=$1 output=$scratch/output.$BASHPID
    shift
    if ! "$@" >"$output" 2>&1; then
        cat "$output" >&2
        fail "$name"
    fi
    echo "ok: $name"
}

# side_by_side JOB ARGUMENT...: calls JOB with each argument, as many at once as there are cores; fails if any does.
side_by_side() {
    local job=$1 cores running=0 failed=0 argument
    cores=$(nproc)
    shift
    for argument; do
        if ((running < cores)); then
            running=$((running + 1))
        else
            wait -n || failed=$((failed + 1))
        fi
        "$job" "$argument" &
    done
    for ((; running > 0; running--)); do
        wait -n || failed=$((failed + 1))
    done
    ((failed == 0)) || fail "$failed of $# $job"
}

# same NAME A B
same() {
    cmp "$2" "$3" >&2 || fail "$1: the files differ"
    echo "ok: $1"
}

# Whether there is an nvcc, then exported in NVCC: the one that NVCC names, in PATH, or where setup.sh installs it.
nvidia=build/nvidia
find_nvcc() {
    local program
    for program in "${NVCC:-nvcc}" "$PWD/$nvidia"/lib/python3*/site-packages/nvidia/cu13/bin/nvcc; do
        if command -v "$program" >/dev/null; then
            export NVCC=$program
            return
        fi
    done
    return 1
}

# older_clang VERSION: the program of a clang that AMD's kernels are tried with, where setup.sh installs it.
older_clang() { echo "build/clang-$1/bin/clang"; }

# library_of ARGUMENT...: copies the library with every feature that `cargo test ARGUMENT...` has just built to
# $scratch/library. `cargo build` would take other features of some crates than the tests do, and build all again. A
# copy, since every build writes that file, also one with other features; Cargo makes it again once it is gone.
library_of() {
    local shared=$TARGET/debug/deps/libgetp.so
    if ! grep -q "simt tokenizer-json" "$shared"; then
        rm -f "$shared"
        quietly "the library with every feature" "${CARGO:-cargo}" test "$@" --no-run
    fi
    mkdir -p "$scratch/library"
    cp "$shared" "$scratch/library"
}

# openai-harmony, where setup.sh installs it.
# shellcheck disable=SC2034 # the scripts that source this use it
harmony=build/harmony harmony_version=0.0.8

# MLPerf's LoadGen, where setup.sh builds it; a file named as its version is the last one that it makes.
# shellcheck disable=SC2034 # the scripts that source this use them
loadgen=build/loadgen loadgen_version=6.0.17

# The names of the programs in tests/.
integration_tests() {
    local path
    for path in tests/*.rs tests/*/main.rs; do
        path=${path#tests/} path=${path%/main.rs}
        echo "${path%.rs}"
    done
}

# Every feature but MPI's in $features, what the GPUs' toolchains lack here in $missing, and for the build the variables
# that name compilers and targets. The checks take this one set, so that the library is built once for them. NVCC and
# GETP_HIPCC name compilers that are not in PATH.
#
# The library warns of a GETP_* that is none of its options: with $as_users_do cargo starts the tests without those that
# are for the build.
find_toolchains() {
    # shellcheck disable=SC2034 # the scripts that source this use it
    features=simt,cuda,hip,cli
    missing=()
    # shellcheck disable=SC2034
    as_users_do=(--config "target.'cfg(unix)'.runner = ['env', '-u', 'GETP_HIP_ARCHS', '-u', 'GETP_CUDA_ARCHS', '-u', \
'GETP_HIPCC', '-u', 'GETP_SIMT_KERNELS']")
    if command -v "${GETP_HIPCC:-clang-22}" >/dev/null; then
        export GETP_HIP_ARCHS=${GETP_HIP_ARCHS:-gfx90a,gfx942,gfx950,gfx1030,gfx1100,gfx1151,gfx1201}
    else
        export GETP_HIP_ARCHS=none
        missing+=("clang-22 and lld-22")
    fi
    if find_nvcc; then
        export GETP_CUDA_ARCHS=${GETP_CUDA_ARCHS:-sm_90a,compute_80,compute_75}
    else
        export GETP_CUDA_ARCHS=none
        missing+=("nvcc")
    fi
}
