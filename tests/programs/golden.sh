#!/usr/bin/env bash
# The library's answers and logits against the baseline's, through the eval program.
. "$(dirname "$0")/lib.sh"
export GETP_PRINT=0

# Beside the prompts for users: none, one that is too long, one of every byte that a line can hold.
{
    echo 15
    tail -n +2 c_examples/prompts.txt
    echo
    printf 'too long %.0s' {1..2000}
    echo
    # shellcheck disable=SC2059  # the format is the bytes
    printf "$(printf '\\x%02x' {1..9} {11..255})"
    echo
} >"$scratch/prompts"

# All prompts in one line, each time from another one on: long, and hardly any of the steps is left for the answer.
awk 'NR > 1 { line[NR - 2] = $0 }
     END { n = NR - 1; print n
           for (i = 0; i < n; i++) { for (j = 0; j < n; j++) printf "%s ", line[(i + j) % n]; print "" } }' \
    c_examples/prompts.txt >"$scratch/long"

# answer NAME MODEL ARGUMENTS...: tokens go to NAME, logits to NAME.logits if $logits is set.
answer() {
    local name=$scratch/$1 model=$BUILD/$2 tokenizer=$BUILD/$2-tokenizer.bin
    shift 2
    test -e "$tokenizer" || tokenizer=$BUILD/tokenizer.bin
    GETP_LOGITS=${logits:+$name.logits} \
        "$BUILD/eval" "$model.bin" -z "$tokenizer" -o "$name" "$@" >"$name.log" 2>&1 || {
        cat "$name.log" >&2
        fail "eval $model.bin $*"
    }
}

# both NAME MODEL ARGUMENTS...: exact must give the baseline's tokens and, if $logits is set, its logits to the bit.
both() {
    local name=$1
    shift
    answer baseline "$@" -m baseline
    GETP_PRECISION=exact answer getp "$@"
    same "$name: tokens" "$scratch/getp" "$scratch/baseline"
    test -z "${logits:-}" || quietly "$name: logits" "$TOOLS/compare_logits" --atol 0 --rtol 0 \
        "$scratch/getp.logits" "$scratch/baseline.logits"
    rm -f "$scratch"/*.logits
}

short=(-i "$scratch/prompts" -n 64)
both "7m, greedy" 7m "${short[@]}" -t 0
both "7m, temperature 0.8, top-p 0.9" 7m "${short[@]}" -t 0.8 -p 0.9 -s 7
both "7m, temperature 1, top-p 1" 7m "${short[@]}" -t 1 -p 1 -s 8
both "7m, a temperature at which logits overflow" 7m "${short[@]}" -t 1e-38 -p 1 -s 8
answer greedy 7m "${short[@]}" -t 0
same "such a temperature is greedy" "$scratch/getp" "$scratch/greedy"
GETP_THREADS=1 GETP_MAX_BATCH=3 GETP_STEP_TOKENS=5 both "7m, batches of 3" 7m "${short[@]}" -t 1 -p 0.9 -s 9
head -n 4 c_examples/prompts.txt | sed '1s/.*/3/' >"$scratch/three"
logits=1 both "7m, three prompts" 7m -i "$scratch/three" -n 32
logits=1 both "4 layers, beyond the window" small -i "$scratch/prompts" -n 180

# What the steps count, by both rules: prompts of all lengths up to more than there are steps.
letters=abcdefghijklmnopqrstuvwxyz0123456789ABCDEF
{
    echo ${#letters}
    for ((n = 1; n <= ${#letters}; n++)); do echo "${letters:0:n}"; done
} >"$scratch/lengths"
# lengths N: how many tokens each answer has.
lengths() { awk '{ printf "%d ", NF }' "$scratch/$1"; }
for rule in positions tokens; do
    for steps in 1 2 16; do
        GETP_STEPS=$rule logits=1 both "steps are $rule, $steps of them" tiny -i "$scratch/lengths" -n $steps
        cp "$scratch/getp" "$scratch/$rule.$steps"
    done
done
[[ $(lengths positions.1) == "1 "*" 0 " && $(lengths tokens.1) != *[1-9]* ]] ||
    fail "a prompt of one token and one step"
[[ $(lengths positions.16) == *" 2 1 0 "* && $(lengths tokens.16) == *" 2 1 0 "* ]] ||
    fail "no prompt is as long as the steps"
same "a token more of steps that are tokens" "$scratch/tokens.2" "$scratch/positions.1"

# Once answers part, the logits behind them say nothing; so the prompts, of up to 337 tokens, take up nearly all steps.
logits=1 steps=340
answer baseline small -i "$scratch/long" -n "$steps" -m baseline
! grep -q '^$' "$scratch/baseline" || fail "a prompt does not fit $steps steps: set more"
GETP_PRECISION=fast answer fast small -i "$scratch/long" -n "$steps"
"$TOOLS/compare_logits" "$scratch/fast.logits" "$scratch/baseline.logits" | tee "$scratch/report" || true
awk '/^mean KL/ { kl = $3 } /^top-1/ { top = $3 } END { exit !(kl != "" && kl + 0 <= 1e-3 && top + 0 >= 98) }' \
    "$scratch/report" || fail "fast: the mean KL divergence must be at most 1e-3, top-1 agreement at least 98 %"
echo "ok: fast is close"

# One random state for all requests in turn, as the original draws: of the first request the answer is the same, and of
# each request alone.
drawn=(7m -n 64 -t 1 -p 0.9 -s 7)
answer own "${drawn[@]}" -i "$scratch/three" -m baseline
answer shared "${drawn[@]}" -i "$scratch/three" -m baseline -d shared
for name in own shared; do
    awk -v base="$scratch/$name" '{ print >(base "." NR) }' "$scratch/$name"
done
same "-d shared, the first request" "$scratch/shared.1" "$scratch/own.1"
for row in 2 3; do
    ! cmp -s "$scratch/shared.$row" "$scratch/own.$row" || fail "-d shared: request $((row - 1)) has its own state"
done
head -n 2 "$scratch/three" | sed '1s/.*/1/' >"$scratch/one"
answer getp "${drawn[@]}" -i "$scratch/one"
answer shared "${drawn[@]}" -i "$scratch/one" -m baseline -d shared
same "-d shared, one request" "$scratch/getp" "$scratch/shared"
for odd in "-t nan" "-p nan" "-d all" "-d shared"; do
    # shellcheck disable=SC2086  # an option and its value
    ! "$BUILD/eval" "$BUILD/7m.bin" -i "$scratch/one" -o "$scratch/odd" $odd >"$scratch/log" 2>&1 ||
        fail "eval $odd succeeds"
    grep -qE "^eval: (${odd:0:2}|$odd) is " "$scratch/log" || fail "eval $odd: nobody said so"
done
echo "ok: options that say nothing are refused"

# The program reads its options as the original does: what is no number is 0, what is out of range is set right.
answer expected tiny "${short[@]}" -t 1 -p 0.9 -s 7 -m baseline
answer odd tiny "${short[@]}" -t 1 -p 7 -s 7abc -m baseline
same "-p out of range and a seed with letters" "$scratch/odd" "$scratch/expected"
answer expected tiny "${short[@]}" -t 0 -n 0
answer odd tiny "${short[@]}" -t -1 -n -5 -s abc -p much
same "a temperature and steps below 0, a seed and a top-p that are no numbers" "$scratch/odd" "$scratch/expected"

# Printed is the prompt and behind it the answer, by the library as by the mode that generates one; of a prompt with
# more tokens than steps as many as are fed, and one more.
tail -n 2 c_examples/prompts.txt | head -n 1 >"$scratch/prompt"
{ echo 1 && cat "$scratch/prompt"; } >"$scratch/one"
for steps in 64 5; do
    GETP_PRINT=1 answer answer 7m -i "$scratch/one" -n $steps
    sed -e '1,/^warm up/d' -e '/^total tokens/,$d' "$scratch/answer.log" | grep -av '^getp: ' >"$scratch/printed"
    "$BUILD/eval" "$BUILD/7m.bin" -z "$BUILD/tokenizer.bin" -m generate -i "$(<"$scratch/prompt")" -n $steps \
        2>"$scratch/log" | sed '1,/^swiglu_limit/d' >"$scratch/generated"
    same "printed text, $steps steps" "$scratch/printed" "$scratch/generated"
done
grep -q "^getp: .*do not fit the 5 positions" "$scratch/answer.log" || fail "the prompt fits 5 steps"
