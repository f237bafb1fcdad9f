#!/usr/bin/env bash
# The drop-in's steps, as README.md and docs/drop-in.md have them, on a tree that stands for the evaluation program's:
# its Makefile has the variables and targets of that program's and no place for a link line. Trees that the library
# cannot serve are refused.
. "$(dirname "$0")/lib.sh"
need g++ "apt-get install g++"
need clang++ "apt-get install clang"
library=$TARGET/release/libgetp.so
model=("$BUILD/tiny.bin" -z "$BUILD/tiny-tokenizer.bin" -i c_examples/prompts.txt)
export GETP_PRINT=0 GETP_PRECISION=exact

# tree NAME: the stand-in in $scratch/NAME. Behind its main it has the functions that record_logits.cpp calls.
tree() {
    local to=$scratch/$1
    mkdir "$to"
    cp c_examples/{eval_model.h,baseline.h,getp_eval.cpp,getp_run.cpp,record_logits.cpp} "$to"
    cp c_examples/eval.cpp "$to/run.cpp"
    cat >>"$to/run.cpp" <<'CPP'
float *forward(Transformer *transformer, int token, int pos) {
    static Rope rope = build_rope(transformer->config);
    forward(transformer, &rope, token, pos);
    return transformer->state.logits;
}
int sample(Sampler *sampler, float *logits) { return sample(*sampler, logits, &sampler->rng_state); }
void encode(Tokenizer *tokenizer, const char *text, int, int, int *out, int *n_out, int max_tokens) {
    const std::vector<int> tokens = encode(*tokenizer, text, static_cast<int>(std::strlen(text)), max_tokens);
    std::copy(tokens.begin(), tokens.end(), out);
    *n_out = static_cast<int>(tokens.size());
}
CPP
    : >"$to/tokenizer.cpp"
    cat >"$to/Makefile" <<'MAKE'
CC := $(shell command -v hipcc 2>/dev/null || echo g++)
CFLAGS = --std=c++17 -lm
CPP_FILES = run.cpp tokenizer.cpp

.PHONY: run runfast runomp tokenizer-bin
run: $(CPP_FILES) tokenizer-bin
	$(CC) -g -O0 -o run $(CPP_FILES)
runfast: $(CPP_FILES) tokenizer-bin
	$(CC) $(CFLAGS) -O3 -o run $(CPP_FILES)
runomp: $(CPP_FILES) tokenizer-bin
	$(CC) $(CFLAGS) -O3 -fopenmp -march=native $(CPP_FILES) -o run
tokenizer-bin:
	false
MAKE
}

# build NAME GOAL ARGUMENTS...: as README.md says, without the tokenizer's export.
build() {
    local name=$1 goal=$2
    shift 2
    LD_RUN_PATH=$TARGET/release make --no-print-directory -C "$scratch/$name" -o tokenizer-bin "$goal" CC=g++ "$@"
}
linked=CPP_FILES="run.cpp tokenizer.cpp $library"

# answers NAME ARGUMENTS...: what the program in NAME answers goes to NAME/answers.
answers() {
    local name=$1
    shift
    "$scratch/$name/run" "${model[@]}" -o "$scratch/$name/answers" -n 64 -t 0 "$@" >"$scratch/$name/log" 2>&1
}

"$BUILD/eval" "${model[@]}" -o "$scratch/baseline" -n 64 -t 0 -m baseline >"$scratch/log" 2>&1
tree original
for goal in run runfast runomp; do
    quietly "make $goal builds with the library" build original "$goal" "$linked"
    answers original || fail "the program of make $goal"
    same "tokens of make $goal" "$scratch/original/answers" "$scratch/baseline"
done
test "$(grep -c "built without GPU support" "$scratch/original/log")" = 1 || fail "nobody said that there is no GPU"

tree ldflags
sed -i 's/\$(CPP_FILES) -o run$/$(CPP_FILES) $(LDFLAGS) -o run/' "$scratch/ldflags/Makefile"
quietly "a Makefile with LDFLAGS builds with the library" env -u LD_RUN_PATH make --no-print-directory \
    -C "$scratch/ldflags" -o tokenizer-bin runomp CC=g++ \
    LDFLAGS="-L$TARGET/release -lgetp -Wl,-rpath,$TARGET/release"
answers ldflags || fail "the program of a Makefile with LDFLAGS"
same "tokens with LDFLAGS" "$scratch/ldflags/answers" "$scratch/baseline"

# The newer version of the program has another loop: the line at the drop-in's head says so, and the environment goes
# before it.
tree newer
sed -i 's/^#define GETP_STEPS .*/#define GETP_STEPS "tokens"/' "$scratch/newer/getp_run.cpp"
quietly "a tree of the newer version builds" build newer runomp "$linked"
GETP_STEPS=tokens "$BUILD/eval" "${model[@]}" -o "$scratch/fewer" -n 64 -t 0 -m baseline >"$scratch/log" 2>&1
! cmp -s "$scratch/fewer" "$scratch/baseline" || fail "both loops give the same tokens"
answers newer || fail "the program of the newer version"
same "tokens of the newer version" "$scratch/newer/answers" "$scratch/fewer"
GETP_STEPS='' answers newer || fail "the program of the newer version, with an empty variable"
same "tokens of the newer version, with an empty variable" "$scratch/newer/answers" "$scratch/fewer"
GETP_STEPS=positions answers newer || fail "the program of the newer version, told otherwise"
same "tokens of the newer version, told otherwise" "$scratch/newer/answers" "$scratch/baseline"

# The script of docs/drop-in.md prints nothing after a run that answers everything, and else the reason alone: here of a
# prompt without an answer, of a failed warm-up where the program goes on, as the original does, and where it ends.
awk '/^    if ! \.\/run / { here = 1 } here { print } here && /fi$/ { exit }' docs/drop-in.md >"$scratch/script"
grep -q "grep .*error: ' err; fi$" "$scratch/script" || fail "docs/drop-in.md has no script"
tree careless
sed -i '/fail("inference failed")/d' "$scratch/careless/getp_eval.cpp"
quietly "a tree that does not check results builds" build careless runomp "$linked"
for name in careless original; do
    ln -s "$BUILD/tiny.bin" "$scratch/$name/model.bin"
    ln -s "$BUILD/tiny-tokenizer.bin" "$scratch/$name/tokenizer.bin"
done
# says NAME PROMPTS LINE...: what the script prints in NAME.
says() {
    local name=$1 prompts=$2
    shift 2
    cp "$prompts" "$scratch/$name/prompts.txt"
    (cd "$scratch/$name" && bash "$scratch/script") >"$scratch/log" 2>&1 || true
    printf '%s\n' "$@" | sed '/^$/d' | cmp - "$scratch/log" >&2 || fail "the script in $name: $(<"$scratch/log")"
    [[ ${GETP_PRECISION:-} == half ]] || grep -q '^getp: [^ew]' "$scratch/$name/err" ||
        fail "there is no information beside it"
}
head -n 2 c_examples/prompts.txt | sed '1s/.*/2/' >"$scratch/one_empty"
for name in careless original; do
    says "$name" c_examples/prompts.txt ""
    says "$name" "$scratch/one_empty" "getp: error: request 1: it is empty; give it at least one character"
done
half="getp: error: GETP_PRECISION=half is not known; use exact or fast"
again="getp: error: warming up has failed again, for the same reason"
GETP_PRECISION=half says careless c_examples/prompts.txt "$half" "$again"
GETP_PRECISION=half says original c_examples/prompts.txt "$half" "$again"
echo "ok: docs/drop-in.md's script prints the reason alone"

# The tree that passes three arguments more to warm_up and keeps getp_eval.cpp as eval.cpp.
tree five
sed -e 's/^void warm_up(.*);/void warm_up(Transformer *, Tokenizer *, int batch_size, int use_kv16, int odd_window);/' \
    -e 's/warm_up(transformer, tokenizer);/warm_up(transformer, tokenizer, 32, 1, 0);/' \
    "$scratch/five/getp_eval.cpp" >"$scratch/five/eval.cpp"
rm "$scratch/five/getp_eval.cpp"
sed -i 's/^    Arguments arguments;$/&\n    set_profiling_enabled(argc > 99);/' "$scratch/five/run.cpp"
quietly "a tree with five arguments builds" build five runomp "$linked"
answers five || fail "the program with five arguments"
same "tokens with five arguments" "$scratch/five/answers" "$scratch/baseline"

tree narrow
sed -i 's/int64_t{requests.max_seq_len} + 1/int64_t{requests.max_seq_len}/' "$scratch/narrow/getp_eval.cpp"
quietly "a tree with narrow requests builds" build narrow run "$linked"
! answers narrow || fail "narrow requests are taken"
grep -q "^getp: error: this program's requests lie 15 bytes and 3 ints apart" "$scratch/narrow/log" ||
    fail "nobody said so"
test ! -e "$scratch/narrow/answers" || fail "narrow requests are answered"
echo "ok: narrow requests are refused"

tree wide
sed -i 's/^    float swiglu_limit;/&\n    int batch_size;/' "$scratch/wide/eval_model.h"
! build wide run "$linked" >"$scratch/log" 2>&1 || fail "a tree with another Config builds"
grep -q "libgetp expects a Config of 60 bytes" "$scratch/log" || fail "nobody named the struct"
echo "ok: a tree with another Config does not build"

# Logits of the program's own forward pass: all of them, and some in lines of text.
for cxx in g++ clang++; do
    quietly "record_logits.cpp, $cxx" $cxx -std=c++17 -fopenmp -fsyntax-only -Wall -Wextra -Wpedantic -Werror \
        "$scratch/original/record_logits.cpp"
done
quietly "record_logits.cpp builds" build original runomp CPP_FILES="record_logits.cpp tokenizer.cpp"
GETP_LOGITS=$scratch/reference answers original -n 250 || fail "the program that records its logits"
GETP_LOGITS=$scratch/logits answers ldflags -n 250 || fail "the program with the library"
same "tokens beside the logits" "$scratch/ldflags/answers" "$scratch/original/answers"
quietly "the program's own logits" "$TOOLS/compare_logits" --atol 0 --rtol 0 "$scratch/logits" "$scratch/reference"
for tokens in reference.tokens:original logits.tokens:newer; do
    GETP_STEPS=tokens GETP_LOGITS=$scratch/${tokens%:*} answers "${tokens#*:}" -n 250 ||
        fail "logits of the newer version"
done
quietly "logits of the newer version" "$TOOLS/compare_logits" --atol 0 --rtol 0 \
    "$scratch/logits.tokens" "$scratch/reference.tokens"
record=$((16 + 4 * 512))
records() { tail -c +17 "$scratch/reference" | od -An -v -w$record "$@"; }
paste <(records -tu4 | awk '{ print $2 }') <(records -tf4) |
    awk '$1 % 100 == 0 { for (i = 6; i <= NF; i += 25) printf "%g ", $i; print "" }' >"$scratch/text"
quietly "some logits as text" "$TOOLS/compare_logits" "$scratch/logits" "$scratch/text"
sed -i '4s/^[^ ]*/9/' "$scratch/text"
! "$TOOLS/compare_logits" "$scratch/logits" "$scratch/text" >"$scratch/log" || fail "a wrong logit agrees"
grep -q "^first of them .* request 1, position 0, index 0: " "$scratch/log" || fail "the wrong logit is not named"
echo "ok: a wrong logit in the text is named"
