#!/usr/bin/env bash
# Several processes behind one queue, under Open MPI and MPICH: through the eval program, and through a program that
# calls MPI itself.
. "$(dirname "$0")/lib.sh"
for mpi in openmpi mpich; do
    need "mpicc.$mpi" "apt-get install libopenmpi-dev openmpi-bin libmpich-dev mpich"
done
cargo=${CARGO:-cargo}
preload=$scratch/failing_malloc.so
gcc -std=c11 -O1 -Wall -Wextra -Werror -fPIC -shared -o "$preload" tests/programs/failing_malloc.c -ldl
export GETP_PRINT=0 GETP_PROGRESS=0 GETP_DEVICE=cpu

# ranks N COMMAND...: starts it N times, for two minutes at most.
ranks() {
    local n=$1 options=(-n "$1")
    shift
    [[ $mpi == mpich ]] || options+=(--allow-run-as-root --oversubscribe --bind-to none)
    timeout 120 "mpirun.$mpi" "${options[@]}" "$@"
}

# answered NAME OUT N: the files of N ranks are those of the process started alone.
answered() {
    local rank
    for ((rank = 0; rank < $3; rank++)); do
        cmp "$2.$rank" "$scratch/alone.0" >&2 || fail "$mpi, $1: rank $rank has other answers"
    done
    rm -f "$2".*
    echo "ok: $mpi, $1"
}

# The eval program of one rank: its arguments but for the file of answers, which has the rank's number.
cat >"$scratch/rank" <<'END'
#!/usr/bin/env bash
export RANK=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
[[ $RANK != "${ODD_RANK:-}" ]] || export GETP_DEVICE=${ODD_DEVICE:-cpu} GETP_STRICT=${ODD_STRICT:-0}
[[ $RANK != "${ODD_RANK:-}" ]] || export GETP_STEPS=${ODD_STEPS:-}
[[ $RANK != "${ODD_RANK:-}" ]] || PROMPTS=${ODD_PROMPTS:-$PROMPTS} MODEL=${ODD_MODEL:-$MODEL}
exec "$SCRATCH/eval" "$MODEL" -z "$BUILD/tiny-tokenizer.bin" -i "$PROMPTS" -o "$SCRATCH/out.$RANK" \
    -n 200 -t 1 -s 5
END
chmod +x "$scratch/rank"
export SCRATCH=$scratch PROMPTS=c_examples/prompts.txt MODEL=$BUILD/tiny.bin
head -n 4 "$PROMPTS" | sed '1s/.*/3/' >"$scratch/three"
# A checkpoint that differs in one value, in the middle of the experts.
cp "$MODEL" "$scratch/other.bin"
middle=$(($(stat -c %s "$MODEL") / 2 / 4 * 4 + 3))
printf '\x42' | dd of="$scratch/other.bin" bs=1 seek=$middle conv=notrunc status=none

# refused NAME WHAT: ranks of which one is odd answer nothing, and are told that it has another WHAT. The eval program
# ends where inference fails, and the launcher may end the other rank before it does.
refused() {
    ranks 2 "$scratch/rank" >"$scratch/log" 2>&1 && fail "$mpi: ranks with $1 answer requests"
    grep -q "getp: error: rank [01]: rank 1 has another $2 than rank 0" "$scratch/log" ||
        fail "$mpi: ranks with $1 are not told"
    rm -f "$scratch"/out.*
    echo "ok: $mpi, ranks with $1 are told"
}

# failing RANK: requests for memory fail within the rank's first inference, one a run: all ranks have all answers or are
# told who has failed, and the next inference goes well.
failing() {
    local at status told=0
    for at in 1 2 3 4 5 6 7 8 10 12; do
        status=0
        FAIL_RANK=$1 FAIL_AT=$at ranks 2 env LD_PRELOAD="$preload" "${program[@]}" survive "$scratch/out" \
            >"$scratch/log" 2>&1 || status=$?
        ((status == 0)) || fail "$mpi: memory fails at request $at of rank $1: status $status: $(tail "$scratch/log")"
        if grep -q "^told, rank $((1 - $1)): rank $1 " "$scratch/log" && grep -q "^told, rank $1: " "$scratch/log"; then
            told=$((told + 1))
        elif grep '^told' "$scratch/log" >&2; then
            fail "$mpi: rank $1 has failed, and not all are told"
        fi
        answered "without memory at request $at of rank $1" "$scratch/out" 2
    done
    ((told > 0)) || fail "$mpi: no failure of rank $1 is told"
}

# Compiling the library twice takes longer than what a tiny model takes without optimization.
library=(--locked --features mpi,simt --config 'profile.dev.package.getp.opt-level=0')
for mpi in openmpi mpich; do
    # The library binds the MPI that it is built with. Cargo does not see that it is another one.
    "$cargo" clean --locked -p mpi-sys
    export MPICC=mpicc.$mpi
    [[ $mpi != openmpi ]] ||
        "$cargo" clippy --locked --lib --test ranks --test weights --features mpi,simt -- -D warnings
    # `cargo build` would take other features of some crates than the tests do, and build all again.
    "$cargo" test "${library[@]}" --no-run --test ranks 2>&1 | tee "$scratch/log"
    tests=$(sed -n 's/.*Executable tests.ranks.rs (\(.*\))$/\1/p' "$scratch/log")
    mkdir "$scratch/$mpi"
    cp "$TARGET/debug/deps/libgetp.so" "$scratch/$mpi"
    # Fingerprints of weights are taken with this feature alone.
    [[ $mpi != openmpi ]] || "$cargo" test "${library[@]}" --test weights
    export LD_LIBRARY_PATH=$scratch/$mpi
    make -s -B -C c_examples eval GETP_LIB_DIR="$scratch/$mpi" BUILD="$scratch" CXXFLAGS="-O2 -std=c++17"
    "mpicc.$mpi" -std=c11 -O1 -Wall -Wextra -Werror -Iinclude -o "$scratch/mpi" tests/programs/mpi.c \
        -L"$scratch/$mpi" -lgetp -lpthread

    "$scratch/rank" >"$scratch/log" 2>&1
    mv "$scratch/out.0" "$scratch/alone.0"
    for n in 1 2 4; do
        GETP_PRINT=answer ranks "$n" "$scratch/rank" >"$scratch/log" 2>"$scratch/errors"
        [[ $(grep -ac '^\[0\] ' "$scratch/log") == 1 ]] || fail "$mpi, $n ranks: not one of them prints the answers"
        answered "$n ranks" "$scratch/out" "$n"
    done

    # Open MPI gives its processes a terminal; what they print is not escaped, since it may end in a file.
    printf '1\n\033[31mred\007\n' >"$scratch/steering"
    for launch in "" "ranks 1" "ranks 2"; do
        PROMPTS=$scratch/steering GETP_PRINT=1 $launch "$scratch/rank" 2>/dev/null | grep -a red >"$scratch/printed"
        [[ -n $launch ]] || mv "$scratch/printed" "$scratch/expected"
        [[ -z $launch ]] || same "$mpi, text printed by $launch" "$scratch/printed" "$scratch/expected"
    done
    rm -f "$scratch"/out.*

    ODD_RANK=1 ODD_DEVICE=hip ranks 2 "$scratch/rank" >"$scratch/log" 2>&1
    grep -q 'rank 1: .*this rank only receives the answers' "$scratch/log" || fail "$mpi: no word of missing devices"
    answered "a rank without devices" "$scratch/out" 2

    ODD_RANK=1 ODD_PROMPTS=$scratch/three refused "other requests" "set of requests"
    ODD_RANK=1 ODD_STRICT=1 refused "other options" "set of options"
    ODD_RANK=1 ODD_STEPS=tokens refused "another rule of steps" "set of options"
    ODD_RANK=1 ODD_MODEL=$scratch/other.bin refused "other weights" model

    program=("$scratch/mpi" "$BUILD/tiny.bin" "$BUILD/tiny-tokenizer.bin" "$PROMPTS")
    "${program[@]}" not "$scratch/alone" >"$scratch/log" 2>&1 || fail "$mpi: started alone: $(tail -n 3 "$scratch/log")"
    for how in not single funneled serialized; do
        ranks 2 "${program[@]}" "$how" "$scratch/out" >"$scratch/log" 2>&1 ||
            fail "$mpi: $how: $(tail -n 3 "$scratch/log")"
        together=$(grep -c 'ranks that share the requests: 2' "$scratch/log" || true)
        [[ $together == $([[ $how == single ]] && echo 0 || echo 2) ]] || fail "$mpi: $how: together $together times"
        [[ $how != single ]] || grep -q 'call MPI_Init_thread' "$scratch/log" || fail "$mpi: $how: no line"
        answered "MPI initialized by the program: $how" "$scratch/out" 2
    done
    failing 0
    failing 1
    # Of the four emulated devices, which both see, each rank has two.
    GETP_DEVICE=simt "${program[@]}" not "$scratch/alone" >"$scratch/log" 2>&1 || fail "$mpi: emulated devices, alone"
    GETP_DEVICE=simt ranks 2 "${program[@]}" not "$scratch/out" >"$scratch/log" 2>&1 ||
        fail "$mpi: emulated devices: $(tail -n 3 "$scratch/log")"
    for device in {0..3}; do
        rank=$((device / 2))
        grep -q "rank $rank: simt:$device " "$scratch/log" || fail "$mpi: simt:$device is not rank $rank's"
        ! grep -q "rank $((1 - rank)): simt:$device " "$scratch/log" || fail "$mpi: simt:$device is used twice"
    done
    answered "ranks that share out devices" "$scratch/out" 2
    if ranks 2 "$tests" --ignored --exact the_job_ends_with_a_rank_that_abandons_it >"$scratch/log" 2>&1; then
        fail "$mpi: a rank that abandons the others ends nothing"
    fi
    [[ $(grep -c '1 passed' "$scratch/log") == 1 ]] || fail "$mpi: nothing was abandoned: $(tail -n 3 "$scratch/log")"
    echo "ok: $mpi, a rank that abandons the others ends the job"
    if ranks 2 "${program[@]}" die "$scratch/out" >"$scratch/log" 2>&1; then fail "$mpi: a killed rank ends nothing"; fi
    [[ ! -e $scratch/out.0 ]] || fail "$mpi: a rank answers although another was killed"
    echo "ok: $mpi, a killed rank ends the job"
    rm -f "$scratch"/out.* "$scratch"/alone.*
done
