#!/bin/sh
# deps.sh build|check|frameworks|soak: says which packages are missing for building (or for `make frameworks`,
# or also for `make check`, or for `make soak`, too) and why, and installs them with apt as root or through sudo. DRAY_NO_INSTALL=1 only says it.
# Packages are looked for by what they bring (a command, a pkg-config module), so that a library
# from elsewhere counts too.
set -eu

for_build='
gcc            cmd:cc|cmd:gcc        compiles the C code
libc6-dev      hdr:stdio.h           the C library to compile against
cmake          cmake:3.22            drives the build (3.22 or newer)
ninja-build    cmd:ninja             runs the build
pkg-config     cmd:pkg-config        finds the libraries
libevent-dev   pc:libevent_core      event loop of the coordinator
libjansson-dev pc:jansson            JSON: checkpoint headers, metrics, --json
libxxhash-dev  pc:libxxhash          checksums of messages
libssl-dev     pc:openssl            TLS of connections between hosts
liburing-dev   pc:liburing           files, read and written many ranges at once
libzstd-dev    pc:libzstd            what changed between two versions, compressed on the wire
libhiredis-dev pc:hiredis            queues whose bytes Redis holds
libopenblas0   so:libopenblas.so.0   matrix products of the reference engine, at run time
libcurl4       so:libcurl.so.4       checkpoints in object stores, at run time
libpcre2-dev   pc:libpcre2-8         patterns by which tokenizers cut text
libutf8proc-dev pc:libutf8proc       normal forms of Unicode text, for tokenizers
libyaml-dev    pc:yaml-0.1           job files
'
for_check='
g++            cmd:c++|cmd:g++       compiles the public headers as C++
libcmocka-dev  pc:cmocka             the C tests
clang-format-14 cmd:clang-format-14  formatting (its version decides the result)
clang-tidy-14  cmd:clang-tidy-14     lint
cppcheck       cmd:cppcheck          lint
mandoc         cmd:mandoc            checks the manual
binutils       cmd:nm                reads the exported symbols
redis-server   cmd:redis-server      a store of samples, for the tests of that backend
redis-tools    cmd:redis-cli         looks into it from outside
libucx-dev     pc:ucx                headers of UCX: updates between hosts over RDMA
iproute2       cmd:ip                network namespaces, whose link a test cuts
iperf3         cmd:iperf3            what a link between them carries
util-linux     cmd:setarch           runs thread-sanitizer tests at fixed addresses
python3        python                the test oracles: PyTorch, transformers, safetensors
python3-venv   python                the same: makes their environment under build/venv
ca-certificates file:/etc/ssl/certs/ca-certificates.crt  lets pip fetch them
'
for_frameworks='
pkg-config     cmd:pkg-config        finds the libraries that a wheel is made with
dpkg-dev       cmd:dpkg-source       unpacks the sources of two of them
mmdebstrap     cmd:mmdebstrap        makes the bare Debians that a wheel is tried in
python3        python                the same as for the test oracles: makes each part its environment
python3-venv   python                the same
ca-certificates file:/etc/ssl/certs/ca-certificates.crt  lets pip fetch what is in them
'
for_soak='
clang-14       cmd:clang-14          compiles the fuzz targets for libFuzzer
libclang-rt-14-dev package           libFuzzer itself, and its sanitizers
'

here=$(dirname "$0")
case ${1:-} in
build) table=$for_build ;;
check) table="$for_build$for_check" ;;
frameworks) table=$for_frameworks ;;
soak) table="$for_build$for_check$for_frameworks$for_soak" ;;
*)
    echo 'usage: scripts/deps.sh build|check|frameworks|soak' >&2
    exit 2
    ;;
esac

has_package()
{
    command -v dpkg-query >/dev/null &&
        dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed
}

cmake_at_least()
{
    command -v cmake >/dev/null || return 1
    found=$(cmake --version | sed -n '1s/[^0-9]*\([0-9]*\.[0-9]*\).*/\1/p')
    [ "$(printf '%s\n%s\n' "$1" "$found" | sort -V | head -n 1)" = "$1" ]
}

# has PACKAGE PROBE[|PROBE]
has()
{
    for probe in $(echo "$2" | tr '|' ' '); do
        what=${probe#*:}
        case $probe in
        cmd:*) command -v "$what" >/dev/null && return 0 ;;
        pc:*) command -v pkg-config >/dev/null && pkg-config --exists "$what" && return 0 ;;
        hdr:*) [ -e "/usr/include/$what" ] && return 0 ;;
        file:*) [ -e "$what" ] && return 0 ;;
        so:*) ldconfig -p 2>/dev/null | grep -qF "$what " && return 0 ;;
        cmake:*) cmake_at_least "$what" && return 0 ;;
        python) "$here/python.sh" >/dev/null 2>&1 && return 0 ;;
        esac
    done
    has_package "$1"
}

missing=
while read -r package probe why; do
    [ -n "$package" ] || continue
    if ! has "$package" "$probe"; then
        [ -n "$missing" ] || echo 'Missing packages:'
        printf '  %-16s %s\n' "$package" "$why"
        missing="$missing $package"
    fi
done <<END
$table
END
[ -n "$missing" ] || exit 0

sudo=
if [ "$(id -u)" != 0 ]; then
    sudo=sudo
fi
install="apt-get install -y --no-install-recommends$missing"
if [ "${DRAY_NO_INSTALL:-0}" != 0 ]; then
    echo "Not installed (DRAY_NO_INSTALL is set). To install them: ${sudo:+sudo }$install"
    exit 1
fi
if ! command -v apt-get >/dev/null; then
    echo 'There is no apt-get here: install what brings the same on this system, then try again.' >&2
    exit 1
fi
if [ -n "$sudo" ] && ! command -v sudo >/dev/null; then
    echo "Neither root nor sudo: as root run: $install" >&2
    exit 1
fi
echo "Installing: ${sudo:+sudo }$install"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Only installs; packages that are there stay as they are. Lists are fetched when installing fails
# without them (a fresh container has none).
apt()
{
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get "$@" >"$log" 2>&1
}
# shellcheck disable=SC2086 # the list of packages is split on purpose
if ! apt install -y --no-install-recommends $missing; then
    if ! { apt update && apt install -y --no-install-recommends $missing; }; then
        cat "$log" >&2
        echo 'apt-get could not install them (its words stand above).' >&2
        exit 1
    fi
fi
