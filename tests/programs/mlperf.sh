#!/usr/bin/env bash
# MLPerf's LoadGen drives the library through c_examples/mlperf.cpp, by the rules of gpt-oss-120b but for durations and
# lengths, which are those of a tiny model: LoadGen must find both scenarios VALID, and log the ids that each sample
# gives alone.
. "$(dirname "$0")/lib.sh"
need g++ "apt-get install g++"
need clang++ "apt-get install clang"
[[ -e $loadgen/$loadgen_version ]] || fail "LoadGen is missing; install it with: tests/programs/setup.sh mlperf"
export GETP_PRINT=0

for compiler in g++ clang++; do
    quietly "mlperf.cpp, $compiler" "${MAKE:-make}" -C c_examples mlperf CXX="$compiler" \
        CXXFLAGS="-std=c++17 -O2 -Wall -Wextra -Wpedantic -Werror" \
        GETP_LIB_DIR="$TARGET/release" LOADGEN="$PWD/$loadgen" BUILD="$scratch/$compiler"
done

samples=$scratch/samples
"$TOOLS/make_samples" "$samples" --count 64 --vocab 512 --scale 0.02

# mlperf SCENARIO MODE OPTION...: a later option goes before an earlier one.
mlperf() {
    "$scratch/g++/mlperf" --model "$BUILD/tiny.bin" --samples "$samples" --max-tokens 16 --logs "$scratch/$1" \
        --scenario "$1" --mode "$2" "${@:3}"
}

# Offline: 3,300 samples, which no two cores answer in a tenth of a second. Server: 900 samples, twice as many as are
# enough to say that 99 of 100 are in time.
load() {
    case $1 in
        Offline) echo --qps 30000 --seconds 0.1 ;;
        Server) echo --qps 150 --seconds 6 ;;
    esac
}

# Alone, samples are also computed in another way: one thread, and prompts in pieces of seven tokens.
verify() {
    GETP_MAX_BATCH=1 GETP_STEP_TOKENS=7 GETP_THREADS=1 mlperf "$1" verify
}

equal=0
for scenario in Offline Server; do
    mapfile -d ' ' -t options < <(load $scenario | tr '\n' ' ')
    quietly "$scenario, performance: VALID" mlperf $scenario performance "${options[@]}"
    quietly "$scenario, accuracy" mlperf $scenario accuracy "${options[@]}"
    verify $scenario >"$scratch/verified" 2>"$scratch/log" || {
        cat "$scratch/log" "$scratch/verified" >&2
        fail "$scenario: answers differ"
    }
    echo "ok: $scenario, $(<"$scratch/verified")"
    equal=$((equal + $(awk '{ print $1 }' "$scratch/verified")))
done

# refused NAME REASON COMMAND...: it must fail, and say the reason.
refused() {
    ! "${@:3}" >"$scratch/stdout" 2>"$scratch/log" || fail "$1: the program succeeds"
    grep -qF -- "$2" "$scratch/log" || {
        cat "$scratch/log" >&2
        fail "$1: nobody says: $2"
    }
    echo "ok: $1 is told"
}

refused "a run that is too short" "the run is not VALID" mlperf Offline performance --qps 1 --seconds 100
log=$scratch/Server/mlperf_log_accuracy.json
cp "$log" "$scratch/kept"
# The last digit of one id.
sed -i '9s/00", "token_data"/01", "token_data"/' "$log"
! cmp -s "$log" "$scratch/kept" || fail "the log has not been changed"
refused "another answer" "has another answer alone" verify Server
sed -i 9d "$log"
refused "an answer that is missing" "has no answer to sample" verify Server
refused "answers longer than the model" "samples have failed" mlperf Offline accuracy --max-tokens 100000
sed '3s/$/ 512/' "$samples" >"$scratch/odd"
refused "an id that the model does not have" "the model's are from 0 to 511" \
    mlperf Offline accuracy --samples "$scratch/odd"
sed '1s/64/65/' "$samples" >"$scratch/odd"
refused "a file that has been cut" "has 64 samples and not 65" mlperf Offline accuracy --samples "$scratch/odd"
for odd in 's/ / x/' 's/ .*//' 's/$/ /' 's/$/ 2147483648/' 's/^/x/'; do
    sed "5$odd" "$samples" >"$scratch/odd"
    refused "a sample changed by $odd" "odd:5: " mlperf Offline accuracy --samples "$scratch/odd"
done
refused "a folder for logs that is a file" "name another folder" mlperf Offline accuracy --logs "$samples"
refused "a rate that is none" "--qps is fast" mlperf Offline performance --qps fast
refused "a scenario that is not there" "--scenario must be" mlperf Offline performance --scenario SingleStream

echo "mlperf: Offline VALID, Server VALID, $equal answers equal"
