#!/usr/bin/env bash
# Several processes behind one queue, under Open MPI and MPICH: through the eval program, and through a program that
# calls MPI itself.
. "$(dirname "$0")/lib.sh"
for mpi in openmpi mpich; do
    need "mpicc.$mpi" "apt-get install libopenmpi-dev openmpi-bin libmpich-dev mpich"
done
cargo=${CARGO:-cargo}
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
[[ $RANK != "${ODD_RANK:-}" ]] || export GETP_DEVICE=${ODD_DEVICE:-cpu}
[[ $RANK != "${ODD_RANK:-}" ]] || PROMPTS=${ODD_PROMPTS:-$PROMPTS}
exec "$SCRATCH/eval" "$BUILD/7m.bin" -z "$BUILD/tokenizer.bin" -i "$PROMPTS" -o "$SCRATCH/out.$RANK" \
    -n 24 -t 1 -s 5
END
chmod +x "$scratch/rank"
export SCRATCH=$scratch PROMPTS=c_examples/prompts.txt
head -n 4 "$PROMPTS" | sed '1s/.*/3/' >"$scratch/three"

for mpi in openmpi mpich; do
    # The library binds the MPI that it is built with. Cargo does not see that it is another one.
    "$cargo" clean --locked -p mpi-sys
    export MPICC=mpicc.$mpi
    [[ $mpi != openmpi ]] || "$cargo" clippy --locked --all-targets --features mpi -- -D warnings
    # `cargo build` would take other features of some crates than the tests do, and build all again.
    "$cargo" test --locked --features mpi --no-run --test ranks
    mkdir "$scratch/$mpi"
    cp "$TARGET/debug/deps/libgetp.so" "$scratch/$mpi"
    [[ $mpi != openmpi ]] || "$cargo" test --locked --features mpi --test ranks
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

    ODD_RANK=1 ODD_DEVICE=hip ranks 2 "$scratch/rank" >"$scratch/log" 2>&1
    grep -q 'rank 1: .*this rank only receives the answers' "$scratch/log" || fail "$mpi: no word of missing devices"
    answered "a rank without devices" "$scratch/out" 2

    # The eval program ends where inference fails, and the launcher may end the other rank before it does.
    ODD_RANK=1 ODD_PROMPTS=$scratch/three ranks 2 "$scratch/rank" >"$scratch/log" 2>&1 &&
        fail "$mpi: ranks with other requests answer them"
    grep -q 'getp: rank [01]: rank 1 has another set of requests than rank 0' "$scratch/log" ||
        fail "$mpi: ranks with other requests are not told"
    rm -f "$scratch"/out.*
    echo "ok: $mpi, ranks with other requests are told"

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
    if ranks 2 "${program[@]}" die "$scratch/out" >"$scratch/log" 2>&1; then fail "$mpi: a killed rank ends nothing"; fi
    [[ ! -e $scratch/out.0 ]] || fail "$mpi: a rank answers although another was killed"
    echo "ok: $mpi, a killed rank ends the job"
    rm -f "$scratch"/out.* "$scratch"/alone.*
done
