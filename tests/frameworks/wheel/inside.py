"""inside.py VERSION: what somebody sees who has installed the wheel and numpy, and has nothing else of dray's.
Run in an empty folder with examples/weights.py and clock.yaml."""
import os
import pathlib
import shutil
import subprocess
import sys
import time

BEGUN = time.monotonic()
MEET = """
import sys, time
begun = time.process_time() # as others may have the cores
import dray
took = time.process_time() - begun
print(took, *(name in sys.modules for name in ("torch", "numpy")), dray.__version__, dray.version(),
      dray.library_path(), dray.program())
"""


def said(*command, status=0):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, timeout=300)
    assert done.returncode == status, f"{command}: {status} expected, ended with {done.returncode}: {done.stdout}"
    return done.stdout


def meets(version):
    """import dray: from this environment, quickly, without what it does not need yet."""
    seen = [said(sys.executable, "-c", MEET).split() for _ in range(5)]
    package = pathlib.Path(subprocess.check_output(
        [sys.executable, "-c", "import dray; print(dray.__file__)"], universal_newlines=True)).parent
    assert str(package).startswith(sys.prefix), package
    for line in seen:
        assert line[1:] == ["False", "False", version, version, str(package / "lib/libdray.so.0"),
                            str(package / "bin/dray")], line
    assert (package / "py.typed").is_file()
    seconds = min(float(line[0]) for line in seen)
    assert seconds < 0.2, f"import dray takes {seconds:.3f} s"
    return seconds


def main():
    version = sys.argv[1]
    assert not [name for name in os.environ if name.startswith(("DRAY_", "PYTHON", "LD_"))]
    seconds = meets(version)
    assert said("dray", "--version") == f"dray {version}\n"
    doctor = said("dray", "doctor")
    lines = said(sys.executable, "weights.py").splitlines()
    assert len(lines) == 6 and all("2 tensors verified" in line for line in lines), lines
    # The loop itself: it computes, or says what to compute with.
    alone = "libopenblas.so.0 is not there" in doctor
    looped = said("dray", "run", "clock.yaml", "--out", "clock", "--set", "steps=2", status=1 if alone else 0)
    assert not alone or "pip install scipy-openblas32" in looped, looped
    import numpy
    print(f"Python {sys.version_info[0]}.{sys.version_info[1]}, numpy {numpy.__version__}, import "
          f"{seconds * 1e3:.0f} ms, {'a' if shutil.which('cc') else 'no'} compiler, "
          f"{time.monotonic() - BEGUN:.0f} s")


main()
