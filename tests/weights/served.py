"""For the Python tests of weights: a coordinator of their own, processes of ranks, and errors that are expected."""
import contextlib
import os
import subprocess
import sys
import tempfile


@contextlib.contextmanager
def coordinator():
    """`dray serve` while the block runs, at $DRAY_ADDRESS; gives its folder."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(DRAY_ADDRESS=f"unix:{folder}/s", XDG_RUNTIME_DIR=folder)
        server = subprocess.Popen([os.environ["DRAY_PROGRAM"], "serve", "--listen", f"unix:{folder}/s"],
                                  stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout.readline().startswith("listening")
            yield folder
        finally:
            server.terminate()
            server.wait(timeout=60)


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
