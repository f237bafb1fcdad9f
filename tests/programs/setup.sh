#!/usr/bin/env bash
# setup.sh run|check|test: installs what `make run`, `make check` or `make test` needs and is not here: Debian's
# packages, as root or where sudo asks for nothing, and for `make test` nvcc in build/nvidia. Where it may not install
# it says what to install.
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
    # nvcc.
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
[[ $1 != test ]] || install_nvcc
echo "ok: everything that make $1 needs is here ($SECONDS s)"
