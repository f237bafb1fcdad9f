#!/usr/bin/env bash
# install.sh build|install|uninstall: what `make installable`, `make install` and `make uninstall` do. The Makefile sets
# TARGET, FEATURES, DESTDIR, PREFIX, LIBDIR and INCLUDEDIR.
#
# The library is linked twice from the same machine code. Cargo's target folder has libgetp.so, which programs find by
# that name. The installed one has a versioned soname, so that several versions can be installed beside each other; a
# program that is linked to it looks for libgetp.so.0. rustc links it in seconds, from the libgetp.rlib that Cargo has
# compiled beside the first. cargo-c would do this, too, but whoever installs would first have to download and compile
# it, and it compiles all a second time in folders of its own.
#
# With the feature cli the program getp is installed, too; it has the library within itself.
. "$(dirname "$0")/package.sh"

# has_program FEATURES: whether these make the program getp.
has_program() { [[ ,${1// /,}, == *,cli,* ]]; }

build() {
    need cargo "rustup (Rust 1.95 or later); or whoever has it runs make installable first"
    need objcopy binutils
    # Cargo says in which folders build scripts have found libraries, such as MPI.
    local messages folders=() folder
    local program=()
    ! has_program "${FEATURES:-}" || program=(--bin getp)
    messages=$("${CARGO:-cargo}" build --release --locked --lib ${program[@]+"${program[@]}"} \
        ${FEATURES:+--features "$FEATURES"} \
        --message-format=json-render-diagnostics)
    while IFS= read -r folder; do
        [[ -z $folder ]] || folders+=(-L "$folder")
    done < <(sed -n 's/.*"reason":"build-script-executed".*"linked_paths":\[\([^]]*\)\].*/\1/p' <<<"$messages" |
        tr ',' '\n' | sed 's/^"//; s/"$//')
    rm -rf "$made"
    mkdir -p "$made"
    # RUSTFLAGS are words, as they are to Cargo.
    # shellcheck disable=SC2086
    "${RUSTC:-rustc}" ${RUSTFLAGS:-} --edition 2024 --crate-name getp_shared --crate-type cdylib \
        -C opt-level=3 -C "link-arg=-Wl,-soname,$soname" -L "dependency=$TARGET/release/deps" \
        --extern "getp=$TARGET/release/libgetp.rlib" ${folders[@]+"${folders[@]}"} \
        -o "$made/linked" packaging/shared_library.rs
    objcopy --only-keep-debug --compress-debug-sections "$made/linked" "$made/$file.debug"
    chmod 644 "$made/$file.debug"
    (cd "$made" && objcopy --strip-all --add-gnu-debuglink="$file.debug" linked "$file")
    rm "$made/linked"
    ((${#program[@]} == 0)) || objcopy --strip-all "$TARGET/release/getp" "$made/getp"
    # What it contains, for whoever passes it on.
    "${CARGO:-cargo}" tree --locked --edges normal,no-proc-macro --prefix none --format '{p}: {l}' \
        ${FEATURES:+--features "$FEATURES"} | sed '1d; s/ (\*)$//' | sort -u >"$made/crates"
    echo "${FEATURES:-}" >"$made/features"
}

# Whether `build` has made what is asked for, from the sources as they are now. FEATURES not set are those that it had.
is_made() {
    [[ -e $made/$file && -e $made/features ]] || return 1
    [[ -z ${FEATURES:-} || $FEATURES == "$(<"$made/features")" ]] || return 1
    [[ -z $(find src program kernels build_support packaging build.rs Cargo.toml Cargo.lock -type f \
        -newer "$made/features" -print -quit) ]]
}

destination() {
    local path
    for path in "$PREFIX" "$LIBDIR" "$INCLUDEDIR"; do
        [[ $path == /* ]] || fail "PREFIX, LIBDIR and INCLUDEDIR are absolute paths, and $path is not"
    done
    lib=${DESTDIR:-}$LIBDIR
    include=${DESTDIR:-}$INCLUDEDIR
    bin=${DESTDIR:-}$PREFIX/bin
    pc=$lib/pkgconfig
    cmake=$lib/cmake/getp
}

# from FOLDER TO: the way.
from() {
    realpath --canonicalize-missing --no-symlinks --relative-to="$1" "$2"
}

# fill IN OUT: a file with its @WORDS@ replaced.
fill() {
    local text word
    text=$(<"packaging/$1")
    for word in VERSION="$version" MAJOR="$major" SONAME="$soname" FILE="$file" DESCRIPTION="$(field description)" \
        PREFIX_FROM_PC="$(from "$pc" "${DESTDIR:-}$PREFIX")" INCLUDE_FROM_PC="$(from "$pc" "$include")" \
        INCLUDE_FROM_CMAKE="$(from "$cmake" "$include")"; do
        text=${text//"@${word%%=*}@"/"${word#*=}"}
    done
    echo "$text" >"$scratch/$1"
    install -m 644 "$scratch/$1" "$2"
}

# The dynamic loader's cache, if the files are where it looks.
renew_cache() {
    [[ -n ${DESTDIR:-} || $EUID != 0 ]] || ! command -v ldconfig >/dev/null || ldconfig
}

install_files() {
    destination
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    # install sets modes by itself: folders and files are readable for everybody, whatever the umask.
    install -d "$lib/.debug" "$pc" "$cmake" "$include"
    # Renamed into its place: programs that run keep the file that they have mapped.
    install -m 755 "$made/$file" "$lib/.$file.new"
    mv -f "$lib/.$file.new" "$lib/$file"
    ln -sfn "$file" "$lib/$soname"
    ln -sfn "$soname" "$lib/libgetp.so"
    install -m 644 "$made/$file.debug" "$lib/.debug/$file.debug"
    install -m 644 include/getp.h "$include/getp.h"
    if [[ -e $made/getp ]]; then
        install -d "$bin"
        install -m 755 "$made/getp" "$bin/.getp.new"
        mv -f "$bin/.getp.new" "$bin/getp"
    fi
    fill getp.pc.in "$pc/getp.pc"
    fill getpConfig.cmake.in "$cmake/getpConfig.cmake"
    fill getpConfigVersion.cmake.in "$cmake/getpConfigVersion.cmake"
    renew_cache
    local features
    features=$(<"$made/features")
    echo "getp $version (features: ${features:-none; it runs on the CPU}) is in ${DESTDIR:-}$PREFIX"
}

# What other versions have is left, and so are folders that hold more than this. The header and what finds the library
# belong to the version that was installed last. Programs find the newest version of this soname that is left.
uninstall_files() {
    destination
    [[ $(readlink "$lib/libgetp.so") != "$soname" || $(readlink "$lib/$soname") != "$file" ]] || rm -f "$lib/libgetp.so"
    rm -f "$lib/$file" "$lib/.debug/$file.debug"
    if [[ $(readlink "$lib/$soname") == "$file" ]]; then
        local left
        left=$(find "$lib" -maxdepth 1 -type f -name "$soname.*" -printf '%f\n' | sort --version-sort | tail -n 1)
        if [[ -n $left ]]; then ln -sfn "$left" "$lib/$soname"; else rm "$lib/$soname"; fi
    fi
    if grep -qsx "Version: $version" "$pc/getp.pc"; then
        rm -f "$bin/getp" "$include/getp.h" "$pc/getp.pc" "$cmake/getpConfig.cmake" "$cmake/getpConfigVersion.cmake"
    fi
    local folder top=${DESTDIR:-}${PREFIX%/}
    for folder in "$cmake" "$lib/cmake" "$pc" "$lib/.debug" "$lib" "$include" "$bin"; do
        # Up to the prefix. The system has its own folders also where they are empty.
        while [[ -d $folder && ($folder == "$lib"/* || $folder/ == "$top"/*) ]]; do
            [[ ! $folder =~ /usr(/local)?(/[^/]*)?$ ]] || break
            rmdir --ignore-fail-on-non-empty "$folder"
            folder=${folder%/*}
        done
    done
    renew_cache
    echo "getp $version is not in ${DESTDIR:-}$PREFIX any more"
}

case $1 in
    build) build ;;
    install)
        is_made || build
        install_files
        ;;
    uninstall) uninstall_files ;;
esac
