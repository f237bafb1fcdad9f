#!/usr/bin/env bash
# Builds the library for every kind of GPU whose toolchain is here, asks the runtimes for devices, and checks that no
# kernel has scratch or spills and that no loop of AMD's matrix products waits for loads meant to be in flight. No GPU is
# needed. NVCC and GETP_HIPCC name compilers that are not in PATH, LLVM_OBJDUMP a disassembler.
. "$(dirname "$0")/lib.sh"

missing=()
features=cuda
if [[ -e /usr/include/hip/hip_runtime_api.h ]]; then
    features+=,hip HIP_PATH=/usr
    export HIP_PATH
elif [[ -e ${ROCM_PATH:-/opt/rocm}/include/hip/hip_runtime_api.h ]]; then
    features+=,hip
else
    missing+=("libamdhip64-dev")
fi
if command -v "${GETP_HIPCC:-clang-22}" >/dev/null; then
    export GETP_HIP_ARCHS=${GETP_HIP_ARCHS:-gfx90a,gfx942,gfx950}
else
    missing+=("clang-22 and lld-22")
fi
if command -v "${NVCC:-nvcc}" >/dev/null; then
    export GETP_CUDA_ARCHS=${GETP_CUDA_ARCHS:-sm_90a}
else
    missing+=("nvcc")
fi
checks=(--test code_objects)
if command -v "${LLVM_OBJDUMP:-llvm-objdump-22}" >/dev/null; then
    checks+=(--test loads_in_flight)
else
    missing+=("llvm-22")
fi

cargo=${CARGO:-cargo}
for set in "$features" "$features,simt" ${features//,/ } simt; do
    "$cargo" clippy --locked --all-targets --features "$set" -- -D warnings
done
"$cargo" test --locked --features "$features" --lib -- backend::gpu
"$cargo" test --locked --features "$features" "${checks[@]}" -- --nocapture

if ((${#missing[@]})) && [[ -n ${SKIPPED:-} ]]; then
    printf -v list '%s, ' "${missing[@]}"
    echo "skipped in part: no ${list%, }" >"$SKIPPED"
fi
