#!/usr/bin/env bash
# ThreadSanitizer over what threads share: the registry, rows, the queue, batches, replicas, the CPU's workers, the
# printer.
#
# It has to see the standard library too. In the one that comes with the compiler, a lock that was waited for, a
# condition and a `Once` order nothing that it knows of, and it would report hundreds of races that are none. So std and
# test are instrumented here, from the bitcode that comes with them, by the LLVM of the compiler's version.
. "$(dirname "$0")/lib.sh"
need gcc "apt-get install gcc"
cargo=${CARGO:-cargo}
host=$(rustc -vV | awk '/^host/ { print $2 }')
llvm=$(rustc -vV | sed -n 's/^LLVM version: \([0-9]*\).*/\1/p')
for tool in opt llc llvm-ar llvm-objcopy llvm-symbolizer; do
    if ! command -v "$tool-$llvm" >/dev/null; then
        echo "SKIPPED: no $tool-$llvm; install it with: apt-get install llvm-$llvm" | tee "${SKIPPED:-/dev/null}"
        exit 0
    fi
done

own=$TARGET/threads
libraries=$own/sysroot/lib/rustlib/$host/lib
toolchain=$(rustc --print target-libdir)

# instrument CRATE: puts an instrumented one in the place of the link to the toolchain's.
instrument() {
    local crate=$1 archive member object
    archive=$(cd "$toolchain" && echo lib"$crate"-*.rlib)
    member=$("llvm-ar-$llvm" t "$toolchain/$archive" | grep '\.o$')
    mkdir "$scratch/$crate"
    object=$scratch/$crate/$member
    "llvm-ar-$llvm" p "$toolchain/$archive" "$member" >"$object"
    "llvm-objcopy-$llvm" --dump-section ".llvmbc=$object.bc" "$object" "$object.rest"
    "opt-$llvm" -force-attribute=sanitize_thread -passes='forceattrs,tsan-module,function(tsan)' "$object.bc" \
        -o "$object.tsan.bc"
    "llc-$llvm" -O1 -filetype=obj -relocation-model=pic -function-sections -data-sections "$object.tsan.bc" -o "$object"
    rm "$libraries/$archive"
    cp "$toolchain/$archive" "$libraries/$archive"
    "llvm-ar-$llvm" r "$libraries/$archive" "$object"
}

rm -rf "$own/sysroot"
mkdir -p "$libraries"
ln -s "$toolchain/../bin" "$libraries/.."
ln -s "$toolchain"/* "$libraries"
side_by_side instrument std test
gcc -std=c11 -O1 -Wall -Wextra -Wpedantic -Werror -fPIC -c tests/programs/tsan.c -o "$scratch/tsan.o"

# Sanitizers are unstable options, which a stable compiler takes only so; --target keeps build scripts free of them.
# Generics that the toolchain's libraries have made already are made anew, so that they are instrumented.
export RUSTC_BOOTSTRAP=1 CARGO_PROFILE_DEV_DEBUG=line-tables-only
flags=(-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer -Zshare-generics=no "--sysroot=$own/sysroot")
library=$own/$host/debug
# The library alone, without what its tests depend on.
CARGO_ENCODED_RUSTFLAGS=$(IFS=$'\x1f' && echo "${flags[*]}") \
    "$cargo" rustc --locked --lib --crate-type lib --target "$host" --target-dir "$own"

# program SOURCE: builds it with the library.
program() {
    local test=()
    [[ $1 != tests/*/* ]] && test=(--test)
    rustc --edition 2024 --target "$host" "${test[@]}" -Copt-level=1 -Cdebuginfo=line-tables-only "${flags[@]}" \
        "-Clink-arg=$scratch/tsan.o" -Clink-arg=-Wl,--wrap=__tsan_atomic64_fetch_sub \
        --extern "getp=$library/libgetp.rlib" -L "dependency=$library/deps" -L "dependency=$own/debug/deps" \
        -o "$scratch/$(basename "$1" .rs)" "$1"
}
side_by_side program tests/programs/race.rs tests/replicas.rs tests/side_by_side.rs

export TSAN_OPTIONS="suppressions='$PWD/tests/programs/tsan.supp'"
TSAN_OPTIONS+=" external_symbolizer_path='$(command -v "llvm-symbolizer-$llvm")'"
quietly "no race is found in the standard library" "$scratch/race"
! "$scratch/race" race >"$scratch/log" 2>&1 || fail "a race is not found"
grep -q "SUMMARY: ThreadSanitizer: data race .*/race\.rs:" "$scratch/log" ||
    fail "what is found is not the planted race"
echo "ok: a planted race is found"

# Printed, so that the printer's thread takes part.
export GETP_PRINT=1 GETP_PROGRESS=0
quietly "calls side by side" "$scratch/side_by_side"
quietly "replicas side by side" "$scratch/replicas"
