# `pip install .` gives a package that works by itself, with the library, the program and a coordinator,
# and leaves no file in the tree.
set -u
python=${DRAY_TEST_PYTHON:-}
if [ -z "$python" ] || ! work=$(mktemp -d); then
    echo 'skipped: no DRAY_TEST_PYTHON'
    exit 77
fi
trap 'rm -rf "$work"' EXIT
git clone -q "$DRAY_SOURCE_DIR" "$work/top" || exit 77
cd "$work/top" || exit 1
# CMake calls this in front of the compiler. An object that the build under test compiled already is copied, and nvcc
# compiles nothing, as that is most of the time. `make soak` compiles everything, and so does the part `wheel` of
# `make frameworks`.
cat >"$work/launcher" <<'END'
#!/bin/sh
for word; do
    [ "${before:-}" != -o ] || object=$word
    before=$word
done
[ ! -e "$DRAY_BUILD_DIR/$object" ] || exec cp "$DRAY_BUILD_DIR/$object" "$object"
exec "$@"
END
chmod +x "$work/launcher"
set -- -C cmake.define.CMAKE_C_COMPILER_LAUNCHER="$work/launcher" -C cmake.define.DRAY_NVCC=OFF
[ "${DRAY_SOAK:-0}" != 1 ] || set --
# Debug: the compiler takes a third of the time.
if ! "$python" -m pip install -qq --retries 2 --target "$work/site" -C cmake.build-type=Debug \
    "$@" . >"$work/log" 2>&1; then
    cat "$work/log"
    grep -qiE 'connection|could not find a version|temporary failure' "$work/log" && [ "${CI:-}" != true ] && exit 77
    exit 1
fi
left=$(git status --porcelain --ignored)
[ -z "$left" ] || { echo "left in the tree: $left"; exit 1; }
cd "$work" || exit 1
# Neither the tree nor the machine's own dray, and no second terminal.
alone() { env -i PATH="$work/site/bin:/usr/bin:/bin" HOME="$work" PYTHONPATH="$work/site" "$@"; }
cat >meet.py <<'END'
import os
import resource
import tempfile

import dray
from dray.weights import Context

print(dray.__version__, dray.library_path(), dray.program(), flush=True)
with dray.serve() as server:
    assert os.environ["DRAY_ADDRESS"] == server.address
    with dray.serve() as same:  # there is one already
        assert same.address == server.address
    child = os.fork()
    if not child:
        raise SystemExit  # out of the block: the coordinator is the parent's
    assert os.waitpid(child, 0)[1] == 0
    with Context(role="trainer", rank=0):
        pass
    pid = server._process.pid
assert "DRAY_ADDRESS" not in os.environ and not os.path.exists(f"/proc/{pid}")
try:
    dray.serve(listen="unix:/no/such/folder/socket")
except dray.DrayError as error:
    print(error)
# What is no program leaves nothing behind; a process may have any number of files open.
tempfile.tempdir = tempfile.mkdtemp()
for program, code in (("/no/such/dray", "ENOENT"), (__file__, "ESYS"), ("/bin/echo", "ESYS")):
    os.environ["DRAY_PROGRAM"] = program
    try:
        dray.serve()
    except dray.DrayError as error:
        assert error.name == code and program in str(error), error
    assert not os.listdir(tempfile.tempdir), program
del os.environ["DRAY_PROGRAM"]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 4096, hard))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
with dray.serve():
    pass
for file in files:
    os.close(file)
assert not os.listdir(tempfile.tempdir)
os.rmdir(tempfile.tempdir)
tempfile.tempdir = None
dray.serve()  # ends with this process, which is killed
print(next(int(p) for p in os.listdir("/proc") if p.isdigit() and
           f"PPid:\t{os.getpid()}\n" in open(f"/proc/{p}/status").read()), flush=True)
os.kill(os.getpid(), 9)
END
said=$(alone "$python" meet.py 2>&1)
version=$(sed -n 's/^project(dray VERSION \([0-9.]*\).*/\1/p' "$DRAY_SOURCE_DIR/CMakeLists.txt")
expected="$version $work/site/dray/lib/libdray.so.0 $work/site/dray/bin/dray"
[ "$(echo "$said" | head -n 1)" = "$expected" ] || { echo "expected '$expected', found: $said"; exit 1; }
echo "$said" | sed -n 2p | grep -q '^dray serve ended: .*/no/such/folder' || { echo "an address that is not there: $said"; exit 1; }
server=$(echo "$said" | sed -n 3p)
for _ in $(seq 100); do
    [ -e "/proc/$server" ] || break
    sleep 0.1
done
[ -n "$server" ] && [ ! -e "/proc/$server" ] || { echo "the coordinator outlives its process: $said"; exit 1; }
said=$(alone dray --version)
[ "$said" = "dray $version" ] || { echo "dray --version: $said"; exit 1; }
