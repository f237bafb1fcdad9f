#!/usr/bin/env bash
# The GPU engine without a GPU, on a SIMT machine emulated on the CPU: the machine and its driver, the backend and a
# model from end to end; then the kernels alone against float64, with AddressSanitizer, which also knows where an array
# in shared memory ends. CXX names the C++ compiler. The library's unit tests are gpu.sh's; the kernels in all orders,
# and a model with every access looked up, are amd.sh's.
. "$(dirname "$0")/lib.sh"
cxx=${CXX:-c++}
need "${cxx%% *}" "apt-get install g++"
cargo=${CARGO:-cargo}
find_toolchains
simt=(--locked --features "${features:?}")
read -ra compile <<<"$cxx -std=c++17 -fvisibility=hidden -Ikernels -Wno-attributes"

# The kernels as build_support/simt.rs compiles them, into $sanitized, but with AddressSanitizer.
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
"$cargo" test "${simt[@]}" --no-fail-fast "${tests[@]}"
library=$("$cargo" test "${simt[@]}" --no-run "${tests[@]}" --message-format=json |
    sed -n 's/.*\["GETP_SIMT_KERNELS","\([^"]*\)"\].*/\1/p' | tail -1)

# What host programs do, with the library that the tests have just been built with. Two prompts do: hosts.sh has all of
# them.
head -n 3 c_examples/prompts.txt | sed '1s/.*/2/' >"$scratch/prompts"
library_of simt_launch "${simt[@]}" "${tests[@]}"
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
side_by_side sanitize kernels/*.hip kernels/cdna/*.hip "$made"/*.hip kernels/gpu/simt.cpp
$cxx -shared -fsanitize=address "$scratch"/kernel_*.o -o "$sanitized" -lpthread -ldl
link() {
    "${compile[@]}" -O3 -DGUARD=0 -fsanitize=address "$1" "$sanitized" -Wl,-rpath,"$scratch" -ldl -lpthread \
        -o "$scratch/$(basename "$1" .cpp)"
}
run() {
    local program order
    read -r program order <<<"$1"
    quietly "${program%_test} kernels with AddressSanitizer, order $order" "$scratch/$program" "$order"
}
side_by_side link kernels/test/small_test.cpp kernels/cdna/mfma_test.cpp kernels/cdna/attention_test.cpp
# What a thread touches is the same in any order; 2 takes fewer shapes, and looks at what has to be uniform.
side_by_side run "mfma_test 2" "attention_test 2" "small_test 2"
