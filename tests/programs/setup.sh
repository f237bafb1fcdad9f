#!/usr/bin/env bash
# setup.sh run|check|mlperf|test: installs what `make run`, `make check`, `make mlperf` or `make test` needs and is not
# here: Debian's packages, as root or where sudo asks for nothing, for `make mlperf` and `make test` LoadGen in build/,
# and for `make test` nvcc, older clangs and openai-harmony in build/. Where it may not install it says what to install.
. "$(dirname "$0")/lib.sh"

packages=(make g++ libc6-dev)
# What looks at scripts, C++ and documents.
quick_checks=(git shellcheck clang-format-22 python3)
all_checks=(
    "${quick_checks[@]}"
    # The programs, under another compiler and sanitizers.
    binutils clang libclang-rt-14-dev valgrind libc6-dbg
    # What finds an installed library for a program.
    cmake meson pkg-config
    # What compares an interface with an older one, and installs packages in a clean root.
    abigail-tools dpkg-dev mmdebstrap
    # AMD's kernels; its LLVM also instruments Rust's standard library (threads.sh).
    clang-22 lld-22 llvm-22
    # Both MPIs.
    libopenmpi-dev openmpi-bin libmpich-dev mpich
    # nvcc, the older clangs and openai-harmony.
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

# From its source package on PyPI; the hash is that file's. pip also looks at the package's metadata, for which it gets
# what LoadGen's own build needs; that goes with the scratch folder.
install_loadgen() {
    [[ ! -e ${loadgen:?}/$loadgen_version ]] || return 0
    echo "building LoadGen $loadgen_version in $loadgen"
    local hash=a2e85d09e3cc0c606f89bfe1fbf97537c8b5b238ae0afbd923ad9c710fcf2ca8
    echo "mlcommons-loadgen==$loadgen_version --hash=sha256:$hash" >"$scratch/requirements"
    python3 -m venv "$scratch/pip"
    "$scratch/pip/bin/pip" download --quiet --no-deps --no-binary mlcommons-loadgen --require-hashes \
        -r "$scratch/requirements" -d "$scratch" >"$scratch/log" 2>&1 || {
        cat "$scratch/log" >&2
        fail "pip cannot get mlcommons-loadgen $loadgen_version from PyPI"
    }
    tar -C "$scratch" -xzf "$scratch/mlcommons_loadgen-$loadgen_version.tar.gz"
    loadgen_source=$scratch/mlcommons_loadgen-$loadgen_version
    (cd "$loadgen_source" && side_by_side compile_loadgen ./*.cc generated/*.cc)
    rm -rf "$loadgen"
    mkdir -p "$loadgen/include"
    ar rcs "$loadgen/libmlperf_loadgen.a" "$loadgen_source"/*.o
    cp "$loadgen_source"/*.h "$loadgen/include"
    touch "$loadgen/$loadgen_version"
}

# Not our code: its warnings are of no use here.
compile_loadgen() {
    g++ -std=c++17 -O2 -fPIC -w -I. -c "$1" -o "$(basename "$1" .cc).o"
}

# What renders conversations as the models were trained on them.
install_harmony() {
    [[ ! -e ${harmony:?}/$harmony_version ]] || return 0
    echo "installing openai-harmony $harmony_version in $harmony"
    rm -rf "$harmony"
    python3 -m venv "$harmony"
    "$harmony/bin/pip" install --quiet --only-binary :all: "openai-harmony==$harmony_version"
    touch "$harmony/$harmony_version"
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
    mlperf) packages+=(binutils clang python3-venv) ;;
    test) packages+=("${all_checks[@]}") ;;
esac
if command -v dpkg-query >/dev/null; then
    install_packages
else
    echo "not Debian: each check says which program it misses" >&2
fi
[[ $1 != mlperf && $1 != test ]] || install_loadgen
if [[ $1 == test ]]; then
    install_harmony
    install_nvcc
    install_clang 17 0.12.0
    install_clang 20 0.15.1
fi
echo "ok: everything that make $1 needs is here ($SECONDS s)"
