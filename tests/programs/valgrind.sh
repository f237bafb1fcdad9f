#!/usr/bin/env bash
# The plain C programs under memcheck: files of prompts with each of what may be asked for, and a batch whose tokens are
# printed as they come.
. "$(dirname "$0")/lib.sh"
need valgrind "apt-get install valgrind"

sed '1s/.*/4/' c_examples/prompts.txt | head -n 5 >"$scratch/prompts"
# memcheck NAME PROGRAM ARGUMENTS...
memcheck() {
    local name=$1
    shift
    quietly "$name" valgrind --quiet --error-exitcode=9 --leak-check=full --show-leak-kinds=all \
        --errors-for-leak-kinds=all --suppressions=tests/programs/valgrind.supp --num-callers=30 "$@"
}
files=("$BUILD/tiny.bin" "$BUILD/tiny-tokenizer.bin")
batch=("$BUILD/batch" "${files[@]}" "$scratch/prompts" 48)

way() {
    case $1 in
    exact) GETP_PRECISION=exact memcheck "exact, greedy" "${batch[@]}" ;;
    fast) GETP_PRECISION=fast memcheck "fast, greedy" "${batch[@]}" ;;
    nucleus) GETP_PRECISION=exact memcheck "exact, nucleus" "${batch[@]}" 0.8 0.9 ;;
    all)
        GETP_PRECISION=fast GETP_MAX_BATCH=2 GETP_STEP_TOKENS=3 GETP_PROFILE=1 GETP_LOGITS=$scratch/logits \
            memcheck "fast, small steps, all tokens, logits and profile" "${batch[@]}" 1 1
        ;;
    stream) memcheck "tokens as they come" "$BUILD/stream" "${files[@]}" 16 ;;
    esac
}
side_by_side way all nucleus exact fast stream
