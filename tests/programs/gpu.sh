#!/usr/bin/env bash
# Builds the library for every kind of GPU whose toolchain is here, and not with a named compiler that compiles nothing.
# Tests the HIP driver with a fake runtime, and checks that no kernel has scratch or spills and that no loop of AMD's
# matrix products waits for loads meant to be in flight. No GPU is needed. LLVM_OBJDUMP names a disassembler that is
# not in PATH.
. "$(dirname "$0")/lib.sh"
find_toolchains
cargo=${CARGO:-cargo}
checks=(--test code_objects --test hip)
if command -v "${LLVM_OBJDUMP:-llvm-objdump-22}" >/dev/null; then
    checks+=(--test loads_in_flight)
else
    missing+=("llvm-22")
fi

# Everything with all features; what there is of each alone with that one: what only one of them uses must be behind it.
"$cargo" clippy --locked --all-targets --features "${features:?}" -- -D warnings
for feature in ${features//,/ }; do
    "$cargo" clippy --locked --lib --test gpu --test hip --bench gpu --features "$feature" -- -D warnings
done
RUSTDOCFLAGS="-D warnings" "$cargo" doc --locked --no-deps --features "${features#simt,}"
# A compiler that is named is meant.
for named in NVCC=cuda GETP_HIPCC=hip; do
    said=$(env -u GETP_CUDA_ARCHS -u GETP_HIP_ARCHS "${named%=*}=false" \
        "$cargo" check --locked --lib --features "${named#*=}" 2>&1) && fail "$named: built without kernels"
    grep -q "${named%=*}=false compiled no kernels" <<<"$said" || fail "$named: $said"
done
"$cargo" test --locked --features "$features" --lib -- backend::gpu
"$cargo" test --locked --features "$features" "${checks[@]}" -- --nocapture

if ((${#missing[@]})) && [[ -n ${SKIPPED:-} ]]; then
    printf -v list '%s, ' "${missing[@]}"
    echo "skipped in part: no ${list%, }" >"$SKIPPED"
fi
