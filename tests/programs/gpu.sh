#!/usr/bin/env bash
# Builds the library for every kind of GPU whose toolchain is here, and not where what was asked for is not compiled.
# Runs the unit tests of the GPUs' code, tests the HIP driver with an emulator of AMD's GPUs, and that emulator. Checks
# that no kernel has scratch or spills, the plain ones not with the oldest compiler either, that no loop of AMD's matrix
# products waits for loads that are to be in flight, and that the models of steps run. No GPU is needed. With the
# argument `all` older compilers compile all targets that they know and ptxas assembles for one more, which takes
# minutes.
# LLVM_OBJDUMP names a disassembler that is not in PATH.
. "$(dirname "$0")/lib.sh"
find_toolchains
cargo=${CARGO:-cargo}
checks=(--test code_objects --test hip)
if command -v "${LLVM_OBJDUMP:-llvm-objdump-22}" >/dev/null; then
    checks+=(--test loads_in_flight)
else
    missing+=("llvm-22")
fi

# Everything with all features; the library with each alone, too: what only one of them uses must be behind it. Cargo
# says once more what the build did of the kernels: the compiler has no wgmma wait for another.
"$cargo" clippy --locked --all-targets --features "${features:?}" -- -D warnings 2>&1 | tee "$scratch/clippy"
! grep "Potential Performance Loss" "$scratch/clippy" || fail "a compiler has products wait"
for feature in ${features//,/ }; do
    parts=(--lib)
    [[ $feature != cli ]] || parts+=(--bin getp)
    "$cargo" clippy --locked "${parts[@]}" --features "$feature" -- -D warnings
done
RUSTDOCFLAGS="-D warnings" "$cargo" doc --locked --no-deps --features "${features#simt,}"

# The build script as cargo runs it, without the library.
rustc --edition 2024 build.rs -o "$scratch/build-script"
# build_script OUT VARIABLE=VALUE...: what it said is in $said. It keeps objects in the folder that is four above OUT.
build_script() {
    rm -rf "$1"
    mkdir -p "$1"
    said=$(env -u GETP_HIP_ARCHS -u GETP_CUDA_ARCHS -u NVCC -u GETP_HIPCC OUT_DIR="$1" NUM_JOBS="$(nproc)" "${@:2}" \
        "$scratch/build-script" 2>&1) || fail "the build script: $said"
}
# A compiler that makes empty files, but none for the target UNKNOWN, and of kernels none for the target BROKEN.
mkdir "$scratch/fake"
cat >"$scratch/fake/hipcc" <<'END'
#!/bin/sh
for out; do :; done
case "$*" in
    *"${UNKNOWN:=none}"*) echo "error: unknown target" >&2 && exit 1 ;;
    *"${BROKEN:=none}"*/empty.hip*) ;;
    *"$BROKEN"*) echo "error: broken" >&2 && exit 1 ;;
esac
[ "$1" = --version ] || : >"$out"
END
chmod +x "$scratch/fake/hipcc"
ln -s hipcc "$scratch/fake/nvcc"
# builds refused|made LINE PATTERN VARIABLE=VALUE...: whether there is a build, and what its line says.
builds() {
    local result=made
    rm -rf "$scratch/getp-kernels"
    build_script "$scratch/a/b/c/out" PATH="$scratch/fake" ROCM_PATH=/none CUDA_HOME=/none "${@:3}"
    ! grep -q '^cargo::error=' <<<"$said" || result=refused
    [[ $result == "$1" ]] || fail "${*:3}: $result: $said"
    grep -qE "^cargo::(warning|error)=.*$2" <<<"$said" || fail "${*:3}: $said"
    echo "ok: $result: ${*:3}"
}
hip=CARGO_FEATURE_HIP=1 cuda=CARGO_FEATURE_CUDA=1
builds made 'gfx90a, gfx942, gfx950, gfx1030, gfx1100, gfx1151, gfx1201, with hipcc' $hip
builds made 'sm_90a, compute_80, compute_75, with nvcc' $cuda
builds made 'gfx942, gfx1030, .*, nothing for gfx950 \(error: unknown target\), with' $hip UNKNOWN=gfx950
builds refused 'nothing for gfx950: error: unknown target' GETP_HIP_ARCHS=gfx90a,gfx950 UNKNOWN=gfx950
builds refused 'nothing for gfx942: error: broken' $hip BROKEN=gfx942
builds refused 'nothing for gfx942: error: broken' GETP_HIP_ARCHS=gfx90a,gfx942 BROKEN=gfx942
builds refused 'none: error: unknown target' $hip UNKNOWN=gfx
builds refused 'none: error: broken' $hip BROKEN=gfx
builds refused 'nothing for sm_90a: error: broken' $cuda BROKEN=sm_90a
builds refused 'none: error: broken' $cuda BROKEN=compute_
builds refused 'none: no compiler found' $hip PATH=/none
builds refused 'none: no compiler found' $cuda PATH=/none
# A compiler that is named is meant.
builds refused 'NVCC=/bin/false compiled none' $cuda NVCC=/bin/false
builds refused 'GETP_HIPCC=/bin/false compiled none' $hip GETP_HIPCC=/bin/false
builds made 'AMD kernels: GETP_HIP_ARCHS=none' $hip PATH=/none GETP_HIP_ARCHS=none
builds made 'NVIDIA kernels: GETP_CUDA_ARCHS=none' $cuda PATH=/none GETP_CUDA_ARCHS=none

[[ ${1:-} != all ]] || export GETP_TEST_EVERY_ARCH=1
"$cargo" test --locked --features "$features" --lib -- backend::gpu
"$cargo" test --locked --features "$features" "${checks[@]}" -- --nocapture
# The models of steps on cards that there are none of, and of one workload.
"$cargo" test --locked --features "$features" --bench ampere
! command -v "${LLVM_MCA:-llvm-mca-22}" >/dev/null ||
    "$cargo" test --locked --features "$features" --bench cdna -- W2

# AMD's kernels by the oldest clang that docs/gpus.md names, which does not know gfx950 and gfx1201, and these by an
# early one that does. What it makes of the plain kernels takes seconds, of a family's minutes.
olders=(17:gfx1100)
[[ ${1:-} != all ]] || olders=(17:gfx90a,gfx942,gfx1100 20:gfx950,gfx1201)
for older in "${olders[@]}"; do
    version=${older%:*} archs=${older#*:}
    program=$(older_clang "$version")
    if ! command -v "$program" >/dev/null; then
        missing+=("$program (make setup)")
        continue
    fi
    out=$TARGET/older-compilers/build/clang-$version/out
    build_script "$out" $hip GETP_HIPCC="$program" GETP_HIP_ARCHS="$archs"
    grep -E '^cargo::(warning|error)=AMD' <<<"$said"
    grep -q "^cargo::warning=AMD kernels: ${archs//,/, }, with" <<<"$said" || fail "$program: $said"
    GETP_TEST_CODE_OBJECTS=$out "$cargo" test --locked --features "$features" --test code_objects no_kernel_spills
done

if ((${#missing[@]})) && [[ -n ${SKIPPED:-} ]]; then
    printf -v list '%s, ' "${missing[@]}"
    echo "skipped in part: no ${list%, }" >"$SKIPPED"
fi
