# shellcheck shell=bash
# shellcheck disable=SC2034 # the scripts that source this use them
# What the scripts here share; each sources it first.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "make: $*" >&2
    exit 1
}

# need PROGRAM PACKAGE
need() {
    command -v "$1" >/dev/null || fail "$1 is missing; it is in $2"
}

# A field of Cargo.toml's [package].
field() {
    sed -n "s/^$1 = \"\(.*\)\"\$/\1/p" Cargo.toml | head -n 1
}

version=$(field version)
major=${version%%.*}
soname=libgetp.so.$major
file=libgetp.so.$version
made=${TARGET:?}/installable

