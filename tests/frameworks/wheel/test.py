"""The wheel by itself: what it is, and whether it works where nothing else of dray's is: in this environment,
away from the tree, and in bare Debians that have Python and no compiler. Those are made with mmdebstrap from the
servers that this machine's apt knows, as root; of the three, `make frameworks` takes the oldest, and says so where it
cannot be made; `make soak` needs them all."""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import zipfile

TOP, WORK = pathlib.Path(os.environ["DRAY_SOURCE_DIR"]), pathlib.Path(os.environ["DRAY_WORK"])
WHEEL = pathlib.Path(os.environ["DRAY_WHEEL"])
SOAK = os.environ.get("DRAY_SOAK") == "1"
DEBIANS = {11: "bullseye", 12: "bookworm", 13: "trixie"}
BUNDLED = "event hiredis jansson pcre2 ssl uring utf8proc xxhash yaml zstd".split()
OF_GLIBC = {"linux-vdso", "libc", "libm", "libdl", "libpthread", "librt", "ld-linux-x86-64", "ld-linux-aarch64"}
SECONDS = 300  # from a bare Debian to the end of the example
# $0: the folder that is the machine.
CHROOT = """mount -t proc proc "$0/proc"; mkdir -p "$0/dev/shm"; mount -t tmpfs tmpfs "$0/dev/shm"; exec chroot "$0" "$@" """


def run(*command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, **options)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


def what_it_is(version):
    name = re.fullmatch(rf"dray_rl-{version}-py3-none-manylinux_2_(\d+)_(x86_64|aarch64)\.whl", WHEEL.name)
    assert name and int(name[1]) <= 31, WHEEL.name
    with zipfile.ZipFile(WHEEL) as archive:
        names = archive.namelist()
        archive.extractall(WORK / "wheel", [n for n in names if n in ("dray/lib/libdray.so.0", "dray/bin/dray")])
    there = {pathlib.Path(n).stem for n in names if "/licenses/" in n and not n.endswith("/")}
    assert there == {"LICENSE"} | {"lib" + library for library in BUNDLED}, there
    assert "dray/py.typed" in names
    for path in (WORK / "wheel/dray/lib/libdray.so.0", WORK / "wheel/dray/bin/dray"):
        wants = {re.match(r"\S*?([\w-]+)\.so", line.strip())[1] for line in run("ldd", path).splitlines()}
        assert wants <= OF_GLIBC, f"{path.name} wants {sorted(wants - OF_GLIBC)}"
    print(f"{WHEEL.name}, {WHEEL.stat().st_size / 1e6:.1f} MB", flush=True)
    return f"manylinux_2_{name[1]}, {WHEEL.stat().st_size / 1e6:.1f} MB"


def lay_out(folder):
    folder.mkdir(parents=True)
    for path in ("tests/frameworks/wheel/inside.py", "examples/weights.py", "examples/clock.yaml"):
        shutil.copy(TOP / path, folder)


def away_from_the_tree(version):
    lay_out(WORK / "here")
    binaries = pathlib.Path(sys.executable).parent
    return run(sys.executable, "inside.py", version, cwd=WORK / "here",
               env={"PATH": f"{binaries}:/usr/bin:/bin", "HOME": str(WORK), "LC_ALL": "C.UTF-8"})


def make_debian(release, root):
    """Made once, and kept."""
    if root.is_dir():
        return
    server = (TOP / "build/wheel/apt/sources").read_text().split()[1]
    half = root.with_suffix(".half")
    shutil.rmtree(half, ignore_errors=True)
    root.parent.mkdir(exist_ok=True)
    run("mmdebstrap", "--mode=root", "--variant=minbase", "--include=python3,python3-venv", release, half, server)
    half.rename(root)


def in_debian(number, version):
    release = DEBIANS[number]
    root = TOP / f"build/frameworks/debian/{release}"
    make_debian(release, root)
    begun = time.monotonic()
    place = root / "opt/dray"
    shutil.rmtree(place, ignore_errors=True)
    lay_out(place)
    shutil.copy(WHEEL, place)

    def inside(*command):
        return run("unshare", "-m", "sh", "-ec", CHROOT, root, "env", "-i", "-C", "/opt/dray", "HOME=/root",
                   "PATH=/opt/dray/env/bin:/usr/bin:/bin", "LC_ALL=C.UTF-8", *command)

    python = inside("python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    # The network is ours: what it installs comes along.
    platforms = [f"--platform=manylinux{tag}_{os.uname().machine}" for tag in ("2014", "_2_27", "_2_28")]
    run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", f"--python-version={python}",
        *platforms, "-d", place / "more", "numpy")
    inside("python3", "-m", "venv", "env")
    inside("env/bin/pip", "install", "-q", "--no-index", "--find-links=more", f"./{WHEEL.name}", "numpy")
    said = inside("env/bin/python", "inside.py", version)
    took = time.monotonic() - begun
    assert "no compiler" in said and took < SECONDS, (said, took)
    return f"{took:.0f} s, {said.strip()}"


def main():
    version = re.search(r"^project\(dray VERSION ([0-9.]+)", (TOP / "CMakeLists.txt").read_text(), re.M)[1]
    seen = what_it_is(version)
    print("this machine, away from the tree:", away_from_the_tree(version).strip(), flush=True)
    worked = ["this machine"]
    for number in DEBIANS if SOAK else list(DEBIANS)[:1]:
        try:
            print(f"Debian {number}:", in_debian(number, version), flush=True)
            worked.append(f"Debian {number}")
        except (OSError, RuntimeError) as error:
            if SOAK or (TOP / f"build/frameworks/debian/{DEBIANS[number]}").is_dir():
                raise
            print(f"no Debian {number}: {error}", flush=True)
            worked.append(f"no bare Debian {number} can be made here")
    print(f"{seen}; {', '.join(worked)}")


main()
