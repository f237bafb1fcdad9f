# What the scripts here share; each sources it first. The Makefile sets TARGET, BUILD and TOOLS.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# A folder that is gone with the script, so that scripts may run side by side.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# need PROGRAM INSTALL_COMMAND
need() {
    command -v "$1" >/dev/null || fail "$1 is missing; install it with: $2"
}

# quietly NAME COMMAND...: its output is shown only if it fails.
quietly() {
    local name=$1
    shift
    if ! "$@" >"$scratch/output" 2>&1; then
        cat "$scratch/output" >&2
        fail "$name"
    fi
    echo "ok: $name"
}

# same NAME A B
same() {
    cmp "$2" "$3" >&2 || fail "$1: the files differ"
    echo "ok: $1"
}
