#!/usr/bin/env bash
# AMD's machine code, on the emulator in tests/hip: models from end to end in every order of blocks and waves, with one
# device, two and a group of two, and the kernels' own tests. In random orders several blocks run at once, and caches do
# not see each other. On gfx90a, gfx942 and gfx950, every kernel of the library has to have run. With the argument `all`
# also all of tests/gpu that does not need the SIMT machine. What instructions do is tested in tests/hip.
# LLVM_OBJDUMP and CXX name other programs than those in PATH.
. "$(dirname "$0")/lib.sh"
find_toolchains
cargo=${CARGO:-cargo}
export HIP_EMULATOR_OBJDUMP=${LLVM_OBJDUMP:-llvm-objdump-22} HIP_EMULATOR_MEMORY_MIB=256
if [[ $GETP_HIP_ARCHS == none ]] || ! command -v "$HIP_EMULATOR_OBJDUMP" >/dev/null; then
    echo "skipped: no clang-22, lld-22 or llvm-22" | tee "${SKIPPED:-/dev/null}"
    exit
fi
cxx=${CXX:-g++}
need "$cxx" "apt-get install g++"
need clang++ "apt-get install clang"
# Those that the emulator knows.
IFS=, read -ra targets < <(tr , '\n' <<<"$GETP_HIP_ARCHS" | grep '^gfx9' | paste -sd,)
# Where tests/hip has it, too.
emulator=${TARGET:?}/tmp/hip

# The library with all GPU features, as test-gpu has it, and what the build made of the kernels. Their LDS is what the
# catalogue says.
"$cargo" test --locked --features "${features:?}" --test code_objects amd_code_objects_have
"$cargo" test --locked --features "$features" --no-run --test gpu
messages=$scratch/messages
"$cargo" test --locked --features "$features" --no-run --test gpu --message-format=json >"$messages" 2>/dev/null
objects=$(sed -n 's/.*"out_dir":"\([^"]*\/build\/getp-[^"]*\)".*/\1/p' "$messages" | tail -n 1)
gpu_tests=$(sed -n 's/.*"executable":"\([^"]*\/gpu-[^"]*\)".*/\1/p' "$messages" | tail -n 1)
mkdir "$scratch/library"
cp "$TARGET/debug/deps/libgetp.so" "$scratch/library"
programs=$scratch/programs
quietly "the evaluation program" make -C c_examples GETP_LIB_DIR="$scratch/library" BUILD="$programs" "$programs/eval"

mkdir -p "$emulator"
flock "$emulator/lock" make --no-print-directory -s -j "$(nproc)" -C tests/hip/emulator CXX="$cxx" BUILD="$emulator" \
    "$emulator/lib/libamdhip64.so.6" "$emulator/libkernel_tests.a"
warnings() {
    quietly "no warnings in $1, clang++" \
        clang++ -std=c++20 -Wall -Wextra -Wpedantic -Werror -DR0600 -fsyntax-only "$1"
}
side_by_side warnings tests/hip/*.cpp tests/hip/emulator/*.cpp

# ---- Models. What has run is noted in $scratch/ran-TARGET-*.

# model NAME DIMENSIONS...
model() {
    quietly "the model $1" "$TOOLS/make_model" --vocab 512 --n-experts 4 --experts-per-token 2 "${@:2}" \
        "$scratch/$1.bin"
}
# With heads that attention on the matrix cores takes.
heads=(--hidden 128 --intermediate 64 --layers 2 --head-dim 64 --heads 16 --kv-heads 2 --window 32 --seq-len 256)
model heads "${heads[@]}"
# With a value in the unembedding, which follows a header of 15 words and the embedding, that FP16 has not: 2^100.
model wide "${heads[@]}"
printf '\0\0\200\161' | dd of="$scratch/wide.bin" bs=4 seek=$((15 + 512 * 128)) conv=notrunc status=none
# The same, with experts in bfloat16.
model wide_experts "${heads[@]}" --experts bf16
model experts "${heads[@]}" --experts bf16
printf '\0\0\200\161' | dd of="$scratch/wide_experts.bin" bs=4 seek=$((15 + 512 * 128)) conv=notrunc status=none
# With matrices in float32, which only the plain kernels take, and tokens that are drawn.
model drawn --dense f32 --window 8 --seq-len 256
ln -s "$BUILD/tiny.bin" "$scratch/tiny.bin"
head -n 5 c_examples/prompts.txt | sed '1s/.*/4/' >"$scratch/prompts"
# answers MODEL OUT: in the environment of the caller.
answers() {
    local temperature=0
    [[ $1 != drawn ]] || temperature=1
    "$programs/eval" "$scratch/$1.bin" -z "$BUILD/tiny-tokenizer.bin" -i "$scratch/prompts" -n 72 -t "$temperature" \
        -s 7 -o "$2"
}
export GETP_PRINT=0 GETP_PROGRESS=0 GETP_THREADS=1
for model in tiny heads drawn; do
    GETP_DEVICE=cpu GETP_PRECISION=exact quietly "$model on the CPU" answers "$model" "$scratch/$model"
done

# in_order ORDER COMMAND...
in_order() {
    local caches=0 residents=1
    [[ $1 != [0-9]* ]] || caches=1 residents=5
    HIP_EMULATOR_ORDER=$1 HIP_EMULATOR_CACHES=$caches HIP_EMULATOR_RESIDENT=$residents "${@:2}"
}

# on_amd "TARGET MODEL PRECISION ORDER DEVICES GROUP": exact answers are the CPU's.
on_amd() {
    local target model precision order devices group profile=0 units=104
    read -r target model precision order devices group <<<"$1"
    local out=$scratch/${1// /-}
    # A profile measures a device by a kernel of its own, which takes long for each compute unit.
    [[ $model != wide ]] || profile=1 units=1
    HIP_EMULATOR_ARCH=$target HIP_EMULATOR_DEVICES=$devices \
        HIP_EMULATOR_UNITS=$units HIP_EMULATOR_REPORT=$scratch/ran-$target-$BASHPID ROCM_PATH=$emulator \
        GETP_DEVICE=hip GETP_GROUP=$group GETP_PRECISION=$precision GETP_PROFILE=$profile \
        quietly "$target, $model, $precision, order $order, $devices devices, groups of $group" \
        in_order "$order" answers "$model" "$out"
    [[ $precision != exact ]] || same "$target, $model: the CPU's answers" "$scratch/$model" "$out"
}
# one_launch_on_amd "TARGET MODEL ORDER": where a step's layers are one launch, the answers are those of the kernels
# apart. The device has few compute units, which all take turns.
one_launch_on_amd() {
    local target model order
    read -r target model order <<<"$1"
    local out=$scratch/one-launch-${1// /-}
    one_launch() {
        HIP_EMULATOR_ARCH=$target HIP_EMULATOR_UNITS=8 HIP_EMULATOR_TOGETHER=$1 ROCM_PATH=$emulator GETP_DEVICE=hip \
            HIP_EMULATOR_REPORT=$scratch/ran-$target-$BASHPID-$1 GETP_PRECISION=fast GETP_LOGITS=$out.$1.logits \
            quietly "$target, $model, layers in ${2}, order $order" in_order "$order" answers "$model" "$out.$1"
    }
    one_launch 0 "a launch a kernel"
    one_launch 1 "one launch"
    same "$target, $model: the same answers in one launch" "$out.0" "$out.1"
    same "$target, $model: the same logits in one launch" "$out.0.logits" "$out.1.logits"
    rm "$out".*.logits
}
runs=()
for target in "${targets[@]}"; do
    for model in tiny heads; do
        runs+=("$target $model exact forward 1 1" "$target $model exact backward 2 1" "$target $model exact 7 2 2")
    done
    runs+=("$target drawn exact forward 1 1" "$target heads fast forward 1 1" "$target wide fast backward 1 1")
done
side_by_side on_amd "${runs[@]}"
runs=()
for target in "${targets[@]}"; do
    runs+=("$target heads 3" "$target wide backward" "$target experts 5" "$target wide_experts forward")
done
side_by_side one_launch_on_amd "${runs[@]}"

# ---- The kernels' own tests, each target in an order of its own; attention, where a block reads what others have
# written, in a random one.

# kernels_of TARGET: their names.
kernels_of() {
    local object
    for object in "$objects/$1"-*.o; do llvm-readelf-22 --dyn-syms "$object"; done |
        sed -n 's/.* \([A-Za-z0-9_]*\)\.kd$/\1/p' | sort -u
}
for target in "${targets[@]}"; do kernels_of "$target" >"$scratch/kernels-$target"; done
# A function for each, by whose address a test names it.
sort -u "$scratch"/kernels-* |
    sed 's/.*/extern "C" __attribute__((visibility("default"))) void &(const void *) {}/' >"$scratch/names.cpp"
"$cxx" -shared -fPIC -fvisibility=hidden "$scratch/names.cpp" -Wl,--whole-archive "$emulator/libkernel_tests.a" \
    -Wl,--no-whole-archive -ldl -o "$scratch/libkernels.so"
link() {
    "$cxx" -std=c++17 -O2 -DGUARD=0 -fvisibility=hidden -Ikernels -Wno-attributes "kernels/$1.cpp" \
        "$scratch/libkernels.so" -Wl,-rpath,"$scratch" -ldl -lpthread -o "$scratch/${1##*/}"
}
side_by_side link test/small_test cdna/mfma_test cdna/attention_test

# own_test "TARGET ORDER PROGRAM ARGUMENT"
own_test() {
    local target order program argument joined
    read -r target order program argument <<<"$1"
    local files=("$objects/$target"-*.o)
    printf -v joined '%s:' "${files[@]}"
    HIP_EMULATOR_ARCH=$target KERNEL_OBJECTS=${joined%:} HIP_EMULATOR_REPORT=$scratch/ran-$target-$program \
        quietly "the kernels' own $program, $target, order $order" \
        in_order "$order" "$scratch/$program" ${argument:+"$argument"}
}
orders=(backward 11 forward)
own=()
for i in "${!targets[@]}"; do
    # The argument is one of their own orders, which the emulator does not have. It is also how many shapes two of them
    # take: all for one target, fewer for the others.
    shapes=$((i == 0 ? 0 : 2))
    order=${orders[i % 3]}
    own+=("${targets[i]} $order small_test 0" "${targets[i]} $order mfma_test $shapes"
        "${targets[i]} 11 attention_test $shapes")
done
side_by_side own_test "${own[@]}"

# ---- Of the library's own tests of the GPU backend a part, or all.

# gpu_test "TARGET NAME": in a process of its own, as one loads the runtime once.
gpu_test() {
    local target name
    read -r target name <<<"$1"
    HIP_EMULATOR_ARCH=$target HIP_EMULATOR_REPORT=$scratch/ran-$target-$BASHPID ROCM_PATH=$emulator \
        HIP_EMULATOR_MEMORY_MIB=1024 GETP_TEST_DEVICE=hip:0 \
        quietly "$name, $target" "$gpu_tests" --exact "$name" --test-threads=1
}
# What is about the SIMT machine itself, or its faults.
machines='^(devices|faults|graphs|groups|limits)::|^ops::in_odd_orders_of_threads$'
# What takes the CPU's answers for right, also in `fast`, and what is about the runtime, each for one target.
part='^(closeness|contract|cuts)::|^replica::a_few_|^ops::few_rows$|^outputs::(a|tokens)_'
tests=()
for name in $("$gpu_tests" --list 2>/dev/null | sed -n 's/: test$//p'); do
    [[ ! $name =~ $machines ]] || continue
    if [[ ${1:-} == all ]]; then
        for target in "${targets[@]}"; do tests+=("$target $name"); done
    elif [[ $name =~ $part ]]; then
        tests+=("${targets[${#tests[@]} % ${#targets[@]}]} $name")
    fi
done
side_by_side gpu_test "${tests[@]}"

# ---- What has run.

for target in "${targets[@]}"; do
    cat "$scratch/ran-$target"-* | awk '{ print $2 }' | sort -u >"$scratch/ran"
    left=$(comm -13 "$scratch/ran" "$scratch/kernels-$target" | tr '\n' ' ')
    [[ -z $left ]] || fail "$target: these kernels have not run: $left"
    echo "ok: $target: all $(wc -l <"$scratch/kernels-$target") kernels have run"
done
