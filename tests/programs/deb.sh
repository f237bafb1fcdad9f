#!/usr/bin/env bash
# Debian's packages are built, and installed in a clean root of the release that runs here: a program from elsewhere
# runs there, others are compiled there, and in the end nothing is left. The root is made once, in build/, of what
# Debian's mirror has; this, and to change into it, only root may.
. "$(dirname "$0")/lib.sh"
need dpkg-shlibdeps "apt-get install dpkg-dev"
version=$(version_here)
quietly "Debian's packages" "${MAKE:-make}" --no-print-directory deb

# skipped REASON
skipped() {
    echo "SKIPPED: the packages are not installed: $1" | tee -a "${SKIPPED:-/dev/null}"
    exit
}
((EUID == 0)) || skipped "only root may change into a clean root"
command -v mmdebstrap >/dev/null || skipped "mmdebstrap is missing; install it with: apt-get install mmdebstrap"
clean=$BUILD/clean-root.tar
if [[ ! -e $clean ]]; then
    # Essential packages, and what compiles a program.
    mmdebstrap --variant=essential --include=gcc,libc6-dev,pkg-config --aptopt='APT::Install-Recommends "false"' \
        --aptopt='Acquire::Languages "none"' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' "$(. /etc/os-release && echo "$VERSION_CODENAME")" \
        "$BUILD/clean-root.new.tar" >"$scratch/log" 2>&1 ||
        skipped "mmdebstrap makes no root: $(tail -n 1 "$scratch/log")"
    mv "$BUILD/clean-root.new.tar" "$clean"
    echo "ok: a clean root is made ($SECONDS s)"
fi
root=$scratch/root
mkdir "$root"
tar -C "$root" -xf "$clean"
gcc -Wall -Wextra -Werror -Iinclude -o "$root/tmp/elsewhere" tests/programs/installed.c -L"$TARGET/installable" \
    -l:"libgetp.so.$version"
cp "$BUILD"/debian/*.deb tests/programs/installed.c "$root/tmp"

# inside USER COMMAND: in the clean root, with nothing of this environment.
inside() {
    env -i PATH=/usr/bin:/bin:/usr/sbin:/sbin LC_ALL=C DEBIAN_FRONTEND=noninteractive \
        chroot --userspec="$1" "$root" bash -euc "cd /tmp && $2"
}
# says NAME USER COMMAND: the library's version.
says() {
    local said
    said=$(inside "$2" "$3" 2>&1) || fail "$1: $said"
    [[ $said == *"getp $version: cpu"* ]] || fail "$1: $said"
    echo "ok: $1"
}
# Files of packages, and which are installed; what dpkg and the dynamic loader remember are other ones.
files() {
    (cd "$root" && find . -path ./tmp -prune -o -path ./var/lib/dpkg -prune -o -type f -o -type l | sort |
        grep -vE '^\./(etc/ld\.so\.cache|var/cache/ldconfig/|var/log/)')
    inside root "dpkg-query -W"
}

files >"$scratch/before"
! inside nobody ./elsewhere >"$scratch/log" 2>&1 || fail "the root is not clean"
quietly "the library's package" inside root "dpkg -i libgetp0_*.deb"
says "a program from elsewhere" nobody ./elsewhere
quietly "its soname is a file of the package" inside root "dpkg -S '*/libgetp.so.0'"
! inside nobody "echo '#include <getp.h>' | cc -fsyntax-only -x c -" >"$scratch/log" 2>&1 ||
    fail "the header is in the library's package"
quietly "the other packages" inside root "dpkg -i libgetp-dev_*.deb libgetp0-dbgsym_*.deb"
# As README says it.
says "a program compiled there" nobody \
    'cc -o by-pkg-config installed.c $(pkg-config --cflags --libs getp) && ./by-pkg-config'
says "by its name alone" nobody "cc -o by-name installed.c -lgetp && ./by-name"
[[ $(inside nobody "pkg-config --modversion getp") == "$version" ]] || fail "pkg-config says another version"
quietly "all files are as packed" inside root "dpkg --verify libgetp0 libgetp-dev libgetp0-dbgsym"
address=$(nm -D "$root"/usr/lib/*/libgetp.so.0 | awk '$3 == "getp_version" { print $1 }')
[[ $(inside nobody "addr2line -e /usr/lib/*/libgetp.so.0 $address") == *src/abi/library.rs:* ]] ||
    fail "a debugger does not find the symbols"
echo "ok: a debugger finds the symbols"
! inside root "dpkg -r libgetp0" >"$scratch/log" 2>&1 || fail "what the others need is taken away"
quietly "taken away" inside root "dpkg --purge libgetp0-dbgsym libgetp-dev libgetp0"
files >"$scratch/after"
same "nothing is left" "$scratch/before" "$scratch/after"
