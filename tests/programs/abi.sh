#!/usr/bin/env bash
# A program that was linked with a released version runs with this one. tests/releases has of each release its header
# and the dump that libabigail's abidw makes of it: abidiff compares this version with each, and a program compiled with
# that header runs with this library. `abi.sh keep` writes both down for the version in Cargo.toml.
#
# The library's own debug information has no types. What is dumped and compared is a library of empty functions as the
# header declares them, with the symbols that the real one exports; tests/header holds the header to the source.
. "$(dirname "$0")/lib.sh"
need gcc "apt-get install gcc"
need abidiff "apt-get install abigail-tools"
version=$(version_here)
# The structs that a program passes with their size, or gets a pointer to: they may grow at their ends.
growing='^getp_(options|batch_options|request|event|stats_t|text_options|tokens|text|defaults)$'

# empty FOLDER SYMBOLS: of FOLDER/getp.h makes FOLDER/libgetp.so, with the symbols in that file.
empty() (
    cd "$1"
    gcc -fsyntax-only -aux-info declarations -I. -x c - <<<'#include <getp.h>'
    {
        echo '#include <getp.h>'
        sed -n 's|^/\* [^ ]*getp\.h:[^ ]* \*/ extern \(.*\);$|\1 { __builtin_trap(); }|p' declarations
    } >declared.c
    gcc -g -fPIC -I. -c declared.c
    nm --defined-only declared.o | awk '{ print $NF }' | sort >declared
    comm -13 declared "$2" | sed 's/.*/void &(void) { __builtin_trap(); }/' >others.c
    {
        echo "{ global:"
        sed 's/$/;/' "$2"
        echo "local: *; };"
    } >version_script
    gcc -g -shared -fPIC -Wl,-soname,"libgetp.so.${version%%.*}" -Wl,--version-script=version_script -o libgetp.so \
        declared.o others.c
)

# macros HEADER: those that it defines, with their values. The version's have another one in each.
macros() {
    gcc -E -dM -x c "$1" | grep -E '^#define (GETP|getp)_' | grep -vE '^#define GETP_(H$|VERSION)' | sort
}

# cut_to OLD NEW: the header NEW, whose structs that may grow end behind as many fields as they have in OLD.
cut_to() {
    awk -v growing="$growing" -v field='^  [^/* ].*;$' '
        $0 == "typedef struct {" { within = 1; fields = lines = 0 }
        FNR < NR && !within
        within {
            line[lines] = $0
            # Lines before the first field have the number 1, its own and those behind it 2, and so on.
            number[lines++] = fields + 1
            if ($0 ~ field) fields++
        }
        within && /^}/ {
            within = 0
            if (FNR == NR) { most[$2] = fields; next }
            name = substr($2, 1, length($2) - 1)
            grows = name ~ growing && $2 in most
            for (at = 0; at < lines - 1; at++) if (!grows || number[at] <= most[$2]) print line[at]
            print
        }' "$1" "$2"
}

# changes RELEASE HEADER SYMBOLS: what of that release is another one in a library with this header and these symbols,
# such that a program linked with the release may not run with it.
changes() {
    local new status=0
    new=$(mktemp -d -p "$scratch")
    cut_to "$1/getp.h" "$2" >"$new/getp.h"
    quietly "a library of empty functions" empty "$new" "$3" >/dev/null
    abidiff --no-added-syms "$1/libgetp.abi" "$new/libgetp.so" >"$new/log" 2>&1 || status=$?
    # A sum: 1 and 2 are failures of abidiff itself.
    ((status % 4 == 0)) || { cat "$new/log" >&2 && fail "abidiff"; }
    ((status == 0)) || cat "$new/log"
    macros "$1/getp.h" >"$new/released"
    macros "$2" >"$new/macros"
    comm -23 "$new/released" "$new/macros"
}

nm -D --defined-only "$TARGET/release/libgetp.so" | awk '{ print $NF }' | sort >"$scratch/symbols"
if [[ ${1:-} == keep ]]; then
    kept=tests/releases/$version
    mkdir -p "$kept" "$scratch/kept"
    cp include/getp.h "$kept"
    cp include/getp.h "$scratch/kept"
    empty "$scratch/kept" "$scratch/symbols"
    abidw --no-comp-dir-path --no-corpus-path --no-show-locs --no-elf-needed --out-file "$kept/libgetp.abi" \
        "$scratch/kept/libgetp.so"
    echo "kept: $kept"
    exit
fi

export GETP_THREADS=2
for release in tests/releases/*; do
    found=$(changes "$release" include/getp.h "$scratch/symbols")
    [[ -z $found ]] || fail "what is linked with getp ${release##*/} does not run with this version: $found"
    echo "ok: abidiff, since getp ${release##*/}"
    gcc -std=c90 -Wall -Wextra -Wpedantic -Werror -I"$release" -o "$scratch/released" tests/programs/released.c \
        -L"$TARGET/release" -lgetp -Wl,-rpath,"$TARGET/release"
    "$scratch/released" "$BUILD/tiny.bin" 2>"$scratch/log" || { cat "$scratch/log" >&2 && fail "getp ${release##*/}"; }
done

# That each of these is seen: LINE LEFT. The header after a change by sed.
changed() {
    sed -E "$1" include/getp.h >"$scratch/changed.h"
    ! cmp -s include/getp.h "$scratch/changed.h" || fail "the header has no line for $1"
}
while IFS=$'\t' read -r change seen; do
    changed "$change"
    found=$(changes "$release" "$scratch/changed.h" "$scratch/symbols")
    [[ $found == *"$seen"* && -n $found ]] || fail "$change gives no \"$seen\" but $found"
    echo "ok: seen: $change"
done <<'END'
s/^(size_t getp_batch_most_tokens\(.*, )size_t /\1int /	parameter 2 of type 'typedef size_t' changed
s/^size_t (getp_batch_most_tokens)/int \1/	return type changed
/^  int max_batch;$/d	data member deletion
s/^  int max_batch;$/  float max_batch;/	type of 'int max_batch' changed
s/^  int max_batch;$/  int more;\n&/	data member insertion
s/^  int (reserved_2);$/  char \1[12];/	type of 'int reserved_2' changed
s/^  size_t top_count;$/&\n  int more;/	data member insertion
s/^  int seq_len;$/&\n  int more;/	data member insertion
s/^  void \(\*on_event\)/  int (*on_event)/	on_event
s/^(#define GETP_END_LENGTH) .*/\1 8/	#define GETP_END_LENGTH 3
END
grep -v '^getp_batch_close$' "$scratch/symbols" >"$scratch/fewer"
found=$(changes "$release" include/getp.h "$scratch/fewer")
[[ $found == *"[D] 'function void getp_batch_close(getp_batch*)'"* ]] || fail "a symbol less is not seen: $found"
echo "ok: seen: a function less"

# What may be added.
sort - "$scratch/symbols" <<<getp_more >"$scratch/more"
while IFS= read -r change; do
    changed "$change"
    found=$(changes "$release" "$scratch/changed.h" "$scratch/more")
    [[ -z $found ]] || fail "$change gives $found"
    echo "ok: may be: $change"
done <<'END'
s/^  int reserved_2;$/&\n  int more;\n  double last;/
s/^  size_t prompt_count;$/&\n  size_t more;/
s/^#define GETP_END_FAILED .*/&\n#define GETP_END_MORE 7/
s/^void getp_batch_close/void getp_more(int);\n&/
END
