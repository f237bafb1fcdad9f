#!/usr/bin/env bash
# debian.sh: what `make deb` does: Debian's packages of the library, in build/debian. The Makefile sets TARGET, BUILD
# and FEATURES; DEBFULLNAME and DEBEMAIL name who packs it. It needs dpkg-dev, and what install.sh needs.
#
# What install.sh installs is shared out to three packages, as Debian's policy has it. Their versions and dependencies
# are what Debian's own tools make of debian/control.
. "$(dirname "$0")/package.sh"
need dpkg-shlibdeps dpkg-dev
packages=${BUILD:?}/debian
library=libgetp$major
multiarch=$(dpkg-architecture -qDEB_HOST_MULTIARCH)
libdir=usr/lib/$multiarch
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

DESTDIR=$work/installed PREFIX=/usr LIBDIR=/$libdir INCLUDEDIR=/usr/include packaging/install.sh install >/dev/null
# These packages are the library's.
rm -rf "$work/installed/usr/bin"
copyright() {
    echo "Copyright (C) 2026 the authors of getp"
    echo "License: Apache-2.0, the text of which is /usr/share/common-licenses/Apache-2.0"
    echo
    echo "The library contains Rust's standard library, under MIT or Apache-2.0, and these crates of https://crates.io,"
    echo "each under its own license:"
    echo
    cat "$made/crates"
}
copyright >"$work/copyright"
gzip -9n <CHANGELOG.md >"$work/changelog.gz"
mkdir "$work/debian"
maintainer="${DEBFULLNAME:-The maintainers of getp} <${DEBEMAIL:-getp@localhost}>"
control=$(<packaging/debian/control)
echo "${control/Maintainer:/"Maintainer: $maintainer"}" >"$work/debian/control"
printf '%s\n\n  * changelog.gz says what is new.\n\n -- %s  %s\n' "getp ($version-1) unstable; urgency=medium" \
    "$maintainer" "$(date -R)" >"$work/debian/changelog"
gzip -9n <"$work/debian/changelog" >"$work/changelog.Debian.gz"

# pack PACKAGE: what is in the folder of that name, as a package.
pack() {
    local doc=$1/usr/share/doc/$1
    install -D -m 644 copyright changelog.gz changelog.Debian.gz -t "$doc"
    mkdir -p "$1/DEBIAN"
    dpkg-gencontrol -p"$1" -P"$1" -T"$1.substvars" -O"$1/DEBIAN/control"
    (cd "$1" && find usr -type f -exec md5sum {} +) >"$1/DEBIAN/md5sums"
    chmod -R u=rwX,go=rX "$1"
    dpkg-deb --root-owner-group --build "$1" "$packages" >/dev/null
}

rm -rf "$packages"
mkdir -p "$packages"
cd "$work"
mkdir -p "$library/$libdir" "$library/DEBIAN" "$library-dbgsym/usr/lib/debug/$libdir"
mv "installed/$libdir/$soname" "installed/$libdir/$file" "$library/$libdir"
mv "installed/$libdir/.debug/$file.debug" "$library-dbgsym/usr/lib/debug/$libdir"
rmdir "installed/$libdir/.debug"
mv installed libgetp-dev
chmod 644 "$library/$libdir/$file"
dpkg-shlibdeps -T"$library.substvars" "$library/$libdir/$file"
# What packages of programs that use it depend on, and who renews the dynamic loader's cache.
echo "libgetp $major $library (>= $version)" >"$library/DEBIAN/shlibs"
echo "activate-noawait ldconfig" >"$library/DEBIAN/triggers"
for package in "$library" libgetp-dev "$library-dbgsym"; do pack "$package"; done
ls "$packages"
