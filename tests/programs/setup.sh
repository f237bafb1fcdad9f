#!/usr/bin/env bash
# setup.sh run|check|test: installs what `make run`, `make check` or `make test` needs and is not here: Debian's
# packages, as root or where sudo asks for nothing, and for `make test` nvcc and clang 17 in build/. Where it may not
# install it says what to install.
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
    # nvcc and clang 17.
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

# Debian 12 has no clang 17. The one inside zig 0.12 has AMD's targets; it links with another clang's lld.
install_clang_17() {
    [[ ! -x ${clang_17:?}/bin/clang ]] || return 0
    echo "installing clang 17 in $clang_17"
    python3 -m venv "$clang_17"
    "$clang_17/bin/pip" install --quiet ziglang==0.12.0
    ln -sf "$(command -v lld-22 || command -v lld)" "$clang_17/bin/lld"
    cat >"$clang_17/bin/new" <<'END'
#!/bin/sh
here=$(dirname "$0")
exec "$here"/../lib/python3*/site-packages/ziglang/zig clang -B "$here" "$@"
END
    chmod +x "$clang_17/bin/new"
    mv "$clang_17/bin/new" "$clang_17/bin/clang"
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
[[ $1 != test ]] || { install_nvcc && install_clang_17; }
echo "ok: everything that make $1 needs is here ($SECONDS s)"
