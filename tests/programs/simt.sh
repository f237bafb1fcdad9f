#!/usr/bin/env bash
# The GPU engine without a GPU, on the CPU played as a SIMT machine: the machine and its driver, the kernels alone against
# float64 with waves in order and at random, the backend and a model from end to end; then kernels and model once more
# under AddressSanitizer. CXX names the C++ compiler.
. "$(dirname "$0")/lib.sh"
cxx=${CXX:-c++}
need "${cxx%% *}" "apt-get install g++"
cargo=${CARGO:-cargo}
simt=(--locked --features simt)

# kernels NAME FLAGS...: the kernels' own tests, linked to the library of kernels that the build script makes.
kernels() {
    local name=$1 library test order
    shift
    library=$("$cargo" build "${simt[@]}" --lib --message-format=json |
        sed -n 's/.*\["GETP_SIMT_KERNELS","\([^"]*\)"\].*/\1/p' | tail -1)
    for test in kernels/test/small_test.cpp kernels/mfma/mfma_test.cpp kernels/mfma/attention_test.cpp; do
        "$cxx" -O1 -std=c++17 -fvisibility=hidden -Ikernels -Wno-attributes "$@" "$test" "$library" \
            -Wl,-rpath,"$(dirname "$library")" -ldl -lpthread -o "$scratch/$name-$(basename "$test" .cpp)" &
    done
    wait
    quietly "small kernels, $name" "$scratch/$name-small_test"
    for order in 0 1; do
        quietly "matrix products, $name, order $order" "$scratch/$name-mfma_test" "$order"
        quietly "attention, $name, order $order" "$scratch/$name-attention_test" "$order"
    done
}

"$cargo" test "${simt[@]}" --no-fail-fast --lib --test simt --test gpu -- --skip backend::cpu
kernels plain

# The sanitizer's runtime has to be there before a test program loads the kernels.
export GETP_SIMT_SANITIZE=address ASAN_OPTIONS=detect_leaks=0
kernels sanitized -fsanitize=address
host=$(rustc -vV | awk '/^host/ { print $2 }')
runner="target.$host.runner = ['env', 'LD_PRELOAD=$("$cxx" -print-file-name=libasan.so)']"
"$cargo" test "${simt[@]}" --config "$runner" --test gpu -- a_tiny_model
