"""What tests of the queue from Python share: a coordinator of their own, and calls that must fail."""
import contextlib
import os
import subprocess
import tempfile

import begin  # noqa: F401

import dray

program = os.environ["DRAY_PROGRAM"]


@contextlib.contextmanager
def coordinator(*arguments):
    """A coordinator in a folder of its own, which $DRAY_ADDRESS names meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(DRAY_ADDRESS=f"unix:{folder}/s", XDG_RUNTIME_DIR=folder)
        server = subprocess.Popen([program, "serve", "--listen", f"unix:{folder}/s", *arguments],
                                  stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout.readline().startswith("listening")
            yield server
        finally:
            server.terminate()
            server.wait(timeout=60)


def refused(name, function, *arguments, **more):
    """The message of the DrayError that the call must raise."""
    try:
        function(*arguments, **more)
    except dray.DrayError as error:
        assert error.name == name, (error.name, str(error))
        return str(error)
    raise AssertionError(f"{name} expected")


def wrong(kind, part, function, *arguments, **more):
    """The call must raise `kind`, with `part` in its message."""
    try:
        result = function(*arguments, **more)
    except kind as error:
        assert part in str(error), (part, str(error))
        return
    raise AssertionError(f"{kind} expected ({part}), found {result!r}")
