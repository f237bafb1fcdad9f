#!/usr/bin/env bash
# The library is installed, programs in empty folders find it by pkg-config, by CMake and by make, and it is taken away
# again without a trace. Nothing is installed outside of a scratch folder. What is linked to the library in Cargo's
# folder looks for libgetp.so as before.
. "$(dirname "$0")/lib.sh"
need gcc "apt-get install g++"
need readelf "apt-get install binutils"
chmod 755 "$scratch"
unset LD_LIBRARY_PATH LD_RUN_PATH PKG_CONFIG_PATH CMAKE_PREFIX_PATH FEATURES DESTDIR PREFIX LIBDIR INCLUDEDIR
source=$PWD
version=$(version_here)
soname=libgetp.so.${version%%.*}
strict=(-Wall -Wextra -Wpedantic -Werror)

# install_getp VARIABLE=VALUE...
install_getp() {
    ${MAKE:-make} --no-print-directory -C "$source" install "$@"
}
uninstall_getp() {
    ${MAKE:-make} --no-print-directory -C "$source" uninstall "$@"
}

# skipped PART PROGRAM
skipped() {
    echo "SKIPPED: $1: $2 is missing; install it with: apt-get install $2" | tee -a "${SKIPPED:-/dev/null}"
}

# dynamic FILE TAG: what its dynamic section says.
dynamic() {
    readelf --dynamic "$1" | sed -n "s/.*($2).*\[\(.*\)\]/\1/p"
}

# empty NAME: a folder with the program alone, which becomes the working one.
empty() {
    mkdir -p "$scratch/$1"
    cp "$source/tests/programs/installed.c" "$scratch/$1/app.c"
    cd "$scratch/$1"
}

# answers NAME COMMAND...: a program finds the library that was installed.
answers() {
    local said
    said=$("${@:2}" 2>&1) || fail "$1: $said"
    [[ $said == *"getp $version: cpu"* ]] || fail "$1: $said"
    echo "ok: $1"
}

# A prefix with a space. Another soname is there, and an older version of the same one, with programs that need them;
# both are as they were in the end.
prefix="$scratch/the prefix"
lib=$prefix/lib
mkdir -p "$lib"
empty other
echo 'int of_another_version(void) { return 9; }' >other.c
echo 'int of_another_version(void); int main(void) { return of_another_version() != 9; }' >main.c
gcc -shared -fPIC -Wl,-soname,libgetp.so.9 -o "$lib/libgetp.so.9.0.0" other.c
ln -s libgetp.so.9.0.0 "$lib/libgetp.so.9"
gcc -o other main.c "$lib/libgetp.so.9"
echo 'const char *getp_version(void) { return "0.0.1"; }' >older.c
echo '#include <stdio.h>' >main.c
echo 'const char *getp_version(void); int main(void) { return puts(getp_version()) < 0; }' >>main.c
gcc -shared -fPIC -Wl,-soname,"$soname" -o "$lib/$soname.0.1" older.c
ln -s "$soname.0.1" "$lib/$soname"
gcc -o older main.c "$lib/$soname"
# version_of_old_program VERSION: that of the library that it finds.
version_of_old_program() {
    [[ $(LD_LIBRARY_PATH=$lib "$scratch/other/older") == "$1" ]] || fail "a program of 0.0.1 does not find $1"
    echo "ok: a program of 0.0.1 finds $1"
}
version_of_old_program 0.0.1
(cd "$prefix" && find . -printf '%p %l\n' | sort) >"$scratch/before"
# Under the strictest umask others can read it.
(umask 077 && quietly "installed where a path has a space" install_getp PREFIX="$prefix")
quietly "the program of another soname runs" env LD_LIBRARY_PATH="$lib" ./other
version_of_old_program "$version"

file=$lib/libgetp.so.$version
[[ $(dynamic "$file" SONAME) == "$soname" ]] || fail "the installed library has the soname $(dynamic "$file" SONAME)"
[[ $(dynamic "$TARGET/release/libgetp.so" SONAME) == libgetp.so ]] ||
    fail "what links to Cargo's library would look for $(dynamic "$TARGET/release/libgetp.so" SONAME)"
[[ $(readlink "$lib/libgetp.so") == "$soname" && $(readlink "$lib/$soname") == "${file##*/}" ]] || fail "the links"
for name in "$TARGET/release/libgetp.so" "$file"; do
    nm -D --defined-only "$name" | awk '{ print $NF }' | sort >"$scratch/${name##*/}.names"
done
same "it exports what Cargo's exports" "$scratch/libgetp.so.names" "$scratch/${file##*/}.names"
readelf --sections --wide "$file" >"$scratch/sections"
! grep -qE ' \.(symtab|debug_info) ' "$scratch/sections" || fail "the installed library is not stripped"
# Lines are in the other file, which is found by its name and its checksum.
address=$(nm -D "$file" | awk '$3 == "getp_version" { print $1 }')
[[ $(addr2line -e "$file" "$address") == *src/abi/library.rs:* ]] || fail "a debugger does not find the symbols"
mv "$lib/.debug" "$scratch/debug"
[[ $(addr2line -e "$file" "$address") != *src/abi/library.rs:* ]] || fail "symbols are not apart"
mv "$scratch/debug" "$lib/.debug"
echo "ok: stripped, with its symbols apart ($(stat -c %s "$file") bytes)"

if command -v pkg-config >/dev/null; then
    empty pkg-config
    # A path with a space has to be quoted, which pkg-config does for a shell that reads its words again.
    export PKG_CONFIG_PATH=$lib/pkgconfig
    [[ $(pkg-config --modversion getp) == "$version" ]] || fail "pkg-config has another version"
    eval "gcc ${strict[*]} -o app app.c $(pkg-config --cflags --libs getp)"
    [[ $(dynamic app NEEDED) == *"$soname"* ]] || fail "the program looks for $(dynamic app NEEDED)"
    answers "pkg-config" env LD_LIBRARY_PATH="$lib" ./app

    empty make
    printf '%s\n' 'CFLAGS := $(shell pkg-config --cflags getp)' \
        'LDLIBS := $(shell pkg-config --libs getp) -Wl,-rpath,$(shell pkg-config --variable=libdir getp)' \
        'app: app.c' >Makefile
    quietly "make builds a program" "${MAKE:-make}" --no-print-directory
    answers "make" ./app
    unset PKG_CONFIG_PATH
else
    skipped "programs that use pkg-config" pkg-config
fi

# cmake_app VERSION: configures the program, which asks for that version.
cmake_app() {
    printf '%s\n' 'cmake_minimum_required(VERSION 3.13)' 'project(app C)' "find_package(getp $1 REQUIRED)" \
        'add_executable(app app.c)' 'target_link_libraries(app getp::getp)' \
        'set_target_properties(app PROPERTIES INSTALL_RPATH_USE_LINK_PATH TRUE)' \
        'install(TARGETS app DESTINATION bin)' >CMakeLists.txt
    rm -rf build
    cmake -S . -B build -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_INSTALL_PREFIX="$PWD/its own"
}
if command -v cmake >/dev/null; then
    empty cmake
    for refused in 9.0 "$version.1" "0.0.1...<$version"; do
        ! cmake_app "$refused" >log 2>&1 || fail "CMake: $version is taken for $refused"
        grep -q "version: $version" log || { cat log; fail "CMake does not say which version there is"; }
    done
    for asked in "0.0.1...${version%%.*}.99" "$version EXACT" "${version%.*}"; do
        quietly "CMake: $version for $asked" cmake_app "$asked"
    done
    quietly "CMake builds a program" cmake --build build
    answers "CMake" build/app
    quietly "cmake --install" cmake --install build
    answers "CMake, installed" "its own/bin/app"
else
    skipped "a program that uses CMake" cmake
fi

if command -v meson >/dev/null; then
    empty meson
    printf '%s\n' "project('app', 'c')" "getp = dependency('getp', version: '>= ${version%.*}')" \
        "executable('app', 'app.c', dependencies: getp, install: true)" >meson.build
    quietly "Meson finds it" meson setup build --pkg-config-path "$lib/pkgconfig" --prefix "$PWD/its own"
    quietly "Meson builds a program" meson compile -C build
    answers "Meson" build/app
    quietly "meson install" meson install -C build
    answers "Meson, installed" env LD_LIBRARY_PATH="$lib" "its own/bin/app"
else
    skipped "a program that uses Meson" meson
fi

# The header, in all standards that each compiler has.
cd "$scratch"
for language in c c++; do
    cp "$source/tests/programs/installed.c" "app.$language"
    echo "int nothing;" >"nothing.$language"
    standards=()
    numbers=(90 99 11 17 2x 23)
    compilers=(gcc clang clang-22)
    [[ $language == c ]] || { numbers=(11 14 17 20 2b 23) && compilers=(g++ clang++ clang++-22); }
    for compiler in "${compilers[@]}"; do
        for number in "${numbers[@]}"; do
            flags=("-std=$language$number" "${strict[@]}" -fsyntax-only -I"$prefix/include")
            "$compiler" "${flags[@]}" "nothing.$language" 2>/dev/null || continue
            "$compiler" "${flags[@]}" "app.$language" || fail "$compiler ${flags[*]}"
            standards+=("$compiler $number")
        done
    done
    ((${#standards[@]} >= 4)) || fail "the compilers know only ${standards[*]}"
    echo "ok: the header in $language: ${standards[*]}"
done

# What was made is installed without Cargo, as long as it is what the sources and FEATURES ask for.
cd "$source"
mkdir -p "$scratch/target" "$scratch/copy"
cp -rp "$TARGET/installable" "$scratch/target"
copy() {
    env TARGET="$scratch/target" CARGO=false PREFIX="$scratch/copy" LIBDIR="$scratch/copy/lib" \
        INCLUDEDIR="$scratch/copy/include" "$@" packaging/install.sh install
}
quietly "installed without Cargo" copy
! copy FEATURES=of-another-build >"$scratch/log" 2>&1 || fail "installed with other features than asked for"
touch -d @0 "$scratch/target/installable/features"
! copy >"$scratch/log" 2>&1 || fail "installed although a source is newer"
echo "ok: what is not as asked for is made anew"

# Where root installs and others run, and the other way round.
if ((EUID == 0)); then
    nobody=(setpriv --reuid=65534 --regid=65534 --clear-groups)
    empty another-user
    gcc -o app app.c -I"$prefix/include" -L"$lib" -lgetp
    answers "another user runs it" env LD_LIBRARY_PATH="$lib" "${nobody[@]}" ./app
    # What is made is only copied: that user has no Rust.
    mkdir "$scratch/checkout" "$scratch/theirs"
    (cd "$source" && cp -rp Makefile Cargo.toml Cargo.lock build.rs build_support include kernels packaging src \
        "$TARGET/installable" "$scratch/checkout")
    mkdir "$scratch/checkout/target"
    mv "$scratch/checkout/installable" "$scratch/checkout/target"
    chmod -R a+rX "$scratch/checkout"
    chown 65534 "$scratch/theirs"
    quietly "another user installs what was made" "${nobody[@]}" env -i PATH=/usr/bin:/bin \
        make --no-print-directory -C "$scratch/checkout" install PREFIX="$scratch/theirs"
    answers "and runs it" env LD_LIBRARY_PATH="$scratch/theirs/lib" ./app
else
    echo "not tried: another user, without root"
fi

quietly "taken away" uninstall_getp PREFIX="$prefix"
(cd "$prefix" && find . -printf '%p %l\n' | sort) >"$scratch/after"
same "nothing is left, and other versions are as they were" "$scratch/before" "$scratch/after"
version_of_old_program 0.0.1
quietly "the program of another soname runs" env LD_LIBRARY_PATH="$lib" "$scratch/other/other"

# Where nothing is, for everybody under the strictest umask.
fresh=$scratch/fresh
(umask 077 && quietly "installed where no folder is" install_getp PREFIX="$fresh" LIBDIR="$fresh/lib/of-this-machine")
closed=$(find "$fresh" -type d -not -perm -555 -o -type f -not -perm -444)
[[ -z $closed ]] || fail "others cannot read $closed"
quietly "taken away" uninstall_getp PREFIX="$fresh" LIBDIR="$fresh/lib/of-this-machine"
[[ ! -e $fresh ]] || fail "left: $(find "$fresh")"

# As packagers do it: below another root, with the libraries two folders down; then it is moved.
where=(DESTDIR="$scratch/root" PREFIX=/usr LIBDIR=/usr/lib/x86_64-linux-gnu)
quietly "installed below DESTDIR" install_getp "${where[@]}"
[[ $(ls "$scratch/root") == usr ]] || fail "DESTDIR has more than the prefix"
! grep -rIl "$scratch" "$scratch/root" || fail "a file names DESTDIR"
mv "$scratch/root" "$scratch/moved"
lib=$scratch/moved/usr/lib/x86_64-linux-gnu
empty moved-app
if command -v pkg-config >/dev/null; then
    # As README says it.
    # shellcheck disable=SC2046
    PKG_CONFIG_PATH=$lib/pkgconfig eval 'gcc -o app app.c $(pkg-config --cflags --libs getp)'
    answers "pkg-config, moved" env LD_LIBRARY_PATH="$lib" ./app
fi
if command -v cmake >/dev/null; then
    prefix=$scratch/moved/usr
    quietly "CMake, moved" cmake_app "$version"
    quietly "CMake builds a program" cmake --build build
    answers "CMake, moved" build/app
fi
quietly "taken away below DESTDIR" uninstall_getp DESTDIR="$scratch/moved" "${where[@]:1}"
[[ -z $(find "$scratch/moved" -not -type d) ]] || fail "left: $(find "$scratch/moved" -not -type d)"
! uninstall_getp PREFIX=relative 2>"$scratch/log" || fail "a relative PREFIX is taken"
grep -q "are absolute paths, and relative is not" "$scratch/log" || fail "a relative PREFIX is refused by name"
echo "ok: nothing is left below DESTDIR, and a relative PREFIX is refused"
