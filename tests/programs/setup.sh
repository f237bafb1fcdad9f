#!/usr/bin/env bash
# setup.sh run|check|test: installs what `make run`, `make check` or `make test` needs and is not here: Debian's
# packages, as root or where sudo asks for nothing, and for `make test` nvcc and older clangs in build/. Where it may
# not install it says what to install.
. "$(dirname "$0")/lib.sh"

packages=(make g++ libc6-dev)
# What looks at scripts and C++.
quick_checks=(git shellcheck clang-format-22)
all_checks=(
    "${quick_checks[@]}"
    # The programs, under another compiler and sanitizers.
    binutils clang libclang-rt-14-dev valgrind libc6-dbg
    # AMD's kernels; its LLVM also instruments Rust's standard library (threads.sh).
    clang-22 lld-22 llvm-22
    # Both MPIs.
    libopenmpi-dev openmpi-bin libmpich-dev mpich
    # nvcc and the older clangs.
    python3-venv
)

install_packages() {
    local missing=() package
    for package in "${packages[@]}"; do
        [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
            missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    local sudo=()
    ((EUID == 0)) || sudo=(sudo)
    local install="apt-get install --no-install-recommends ${missing[*]}"
    if ((EUID != 0)) && ! sudo -n true 2>/dev/null; then
        fail "packages are missing; install them with: sudo $install"
    fi
    echo "$install"
    "${sudo[@]}" apt-get update -qq
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$scratch/log" || {
        cat "$scratch/log" >&2
        fail "$install"
    }
}

# In a folder of its own. The parts are pinned together: ptxas refuses PTX of a newer nvvm.
install_nvcc() {
    ! find_nvcc || return 0
    echo "installing nvcc in ${nvidia:?}"
    python3 -m venv "$nvidia"
    "$nvidia/bin/pip" install --quiet nvidia-cuda-nvcc==13.0.88 'nvidia-cuda-runtime==13.0.*' \
        'nvidia-cuda-cccl==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*'
    find_nvcc || fail "$nvidia has no nvcc: remove the folder, so that it is made anew"
}

# install_clang VERSION ZIG: the clang inside that version of zig, which has AMD's targets; Debian 12 has none of that
# version. It links with another clang's lld.
install_clang() {
    local program folder
    program=$(older_clang "$1")
    folder=${program%/bin/clang}
    [[ ! -x $program ]] || return 0
    echo "installing clang $1 in $folder"
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet "ziglang==$2"
    ln -sf "$(command -v lld-22 || command -v lld)" "$folder/bin/lld"
    cat >"$program.new" <<'END'
#!/bin/sh
here=$(dirname "$0")
exec "$here"/../lib/python3*/site-packages/ziglang/zig clang -B "$here" "$@"
END
    chmod +x "$program.new"
    mv "$program.new" "$program"
}

need cargo "rustup (Rust 1.95 or later)"
case $1 in
    run)
        # Whoever has compilers of his own needs no package.
        if command -v make && command -v c++; then exit 0; fi >/dev/null
        ;;
    check) packages+=("${quick_checks[@]}") ;;
    test) packages+=("${all_checks[@]}") ;;
esac
if command -v dpkg-query >/dev/null; then
    install_packages
else
    echo "not Debian: each check says which program it misses" >&2
fi
if [[ $1 == test ]]; then
    install_nvcc
    install_clang 17 0.12.0
    install_clang 20 0.15.1
fi
echo "ok: everything that make $1 needs is here ($SECONDS s)"
