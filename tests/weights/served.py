"""For the Python tests of weights: processes of ranks, errors that are expected, cases of which all are tried."""
import contextlib
import subprocess
import sys
import tempfile
import time
import traceback


@contextlib.contextmanager
def ranks(count, seconds):
    """This program again, once for each rank, with the rank and a folder as arguments: all end well after the block."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [subprocess.Popen([sys.executable, sys.argv[0], str(rank), folder]) for rank in range(count)]
        try:
            yield
            ended = [process.wait(seconds) for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert ended == [0] * count, ended


def refused(kind, words, function, *arguments, **more):
    """Calls it; returns the error, whose message has the words: one part of it, or several."""
    try:
        function(*arguments, **more)
    except kind as error:
        assert all(part in str(error) for part in ([words] if isinstance(words, str) else words)), error
        return error
    raise AssertionError(f"{kind.__name__} expected, with {words!r}")


def try_all(cases):
    """Calls them all; what sys.exit takes then: 0, or the names of those that failed."""
    failed = []
    for case in cases:
        begun = time.monotonic()
        try:
            case()
        except Exception:
            failed.append(case.__name__)
            traceback.print_exc()
        print(f"{case.__name__}: {time.monotonic() - begun:.1f} s")
    return f"failed: {', '.join(failed)}" if failed else 0
