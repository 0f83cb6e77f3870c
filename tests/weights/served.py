"""For the Python tests of weights: a coordinator of their own, and errors that are expected."""
import contextlib
import os
import subprocess
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


def refused(kind, part, function, *arguments, **more):
    """Calls it; returns the error, of which the message has the part."""
    try:
        function(*arguments, **more)
    except kind as error:
        assert part in str(error), error
        return error
    raise AssertionError(f"{kind.__name__} expected, with {part!r}")
