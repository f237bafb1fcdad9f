#!/usr/bin/env bash
# The GPU engine without a GPU, on a SIMT machine emulated on the CPU: the machine and its driver, the backend and a
# model from end to end; then the kernels that have several arrays in shared memory alone against float64, with
# AddressSanitizer, which knows where each of them ends. CXX names the C++ compiler. The library's unit tests are
# gpu.sh's; all kernels in all orders, models compared with the CPU's logits, and every other access are amd.sh's.
. "$(dirname "$0")/lib.sh"
cxx=${CXX:-c++}
need "${cxx%% *}" "apt-get install g++"
cargo=${CARGO:-cargo}
find_toolchains
simt=(--locked --features "${features:?}")
read -ra compile <<<"$cxx -std=c++17 -fvisibility=hidden -Ikernels -Wno-attributes"

# Kernels as build_support/simt.rs compiles them, into $sanitized, but with AddressSanitizer.
sanitized=$scratch/libsanitized_kernels.so
sanitize() {
    local object
    object=$scratch/kernel_$(basename "$(dirname "$1")")_$(basename "$1").o
    local flags=(-O1 -g1 -fsanitize=address -fPIC -I"$made")
    "$cxx" --version | grep -q clang || flags+=(-fno-weak)
    # g++ has much to say about -fno-weak.
    quietly "$(basename "$1") with AddressSanitizer" "${compile[@]}" "${flags[@]}" -c -x c++ "$1" -o "$object"
}

tests=(--test simt --test gpu)
"$cargo" test "${simt[@]}" --no-fail-fast "${tests[@]}" -- --skip closeness:: --skip replica::a_few_steps
library=$("$cargo" test "${simt[@]}" --no-run "${tests[@]}" --message-format=json |
    sed -n 's/.*\["GETP_SIMT_KERNELS","\([^"]*\)"\].*/\1/p' | tail -1)

# The ladder of an operation's kernels, each of which is compared with float64.
quietly "the ladder of attn_out" \
    "$cargo" test "${simt[@]}" --bench gpu -- kernel attn_out --devices simt:0 --shape 7m --rows 3

# What host programs do, with the library that the tests have just been built with. Two prompts do: hosts.sh has all of
# them.
head -n 3 c_examples/prompts.txt | sed '1s/.*/2/' >"$scratch/prompts"
library_of "${simt[@]}" "${tests[@]}"
# What tests and benches alone use is not in it.
names=$(nm "$scratch/library/libgetp.so")
grep -q 3gpu7replica <<<"$names" || fail "the library has no names of what replicas do"
! grep 7inspect <<<"$names" || fail "the library has what tests and benches alone use"
link=(-Iinclude -L"$scratch/library" -lgetp -Wl,-rpath,"$scratch/library" -lpthread -lm)
for program in exit_meanwhile float_environment; do
    gcc -std=c11 -O0 -Wall -Wextra -Wpedantic -Werror -o "$scratch/$program" "tests/programs/$program.c" "${link[@]}"
    GETP_DEVICE=simt:0 GETP_PROGRESS=0 GETP_THREADS=2 quietly "$program.c on the machine" \
        "$scratch/$program" "$BUILD/tiny.bin" "$BUILD/tiny-tokenizer.bin" "$scratch/prompts"
done
strict=(-std=c++17 -O0 -Wall -Wextra -Wpedantic -Werror)
g++ "${strict[@]}" -DPLUGIN -shared -fPIC -o "$scratch/plugin.so" tests/programs/unload.cpp "${link[@]}"
g++ "${strict[@]}" -Iinclude -o "$scratch/unload" tests/programs/unload.cpp -lpthread -ldl
GETP_DEVICE=simt:0 GETP_PROGRESS=0 GETP_THREADS=2 quietly "unload.cpp on the machine" \
    "$scratch/unload" "$BUILD/tiny.bin" "$BUILD/tiny-tokenizer.bin" c_examples/prompts.txt "$scratch/plugin.so"

# What the build made of the catalogue lies beside the library.
made=$(dirname "$library")/kernels/cdna
side_by_side sanitize kernels/*.hip kernels/gpu/simt.cpp
$cxx -shared -fsanitize=address "$scratch"/kernel_*.o -o "$sanitized" -lpthread -ldl
"${compile[@]}" -O3 -DGUARD=0 -fsanitize=address kernels/test/small_test.cpp "$sanitized" -Wl,-rpath,"$scratch" \
    -ldl -lpthread -o "$scratch/small_test"
# What a thread touches is the same in any order; 2, one wave first, also looks at what has to be uniform.
quietly "small kernels with AddressSanitizer" "$scratch/small_test" 2
