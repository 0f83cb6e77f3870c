"""What Python tests begin with. The package is found in the tree; random cases are drawn from `seed`, which is said; and where
this machine lacks a module, the test is skipped:

    from begin import needs, rng, seed

    with needs:
        import torch
"""
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback

sys.path.insert(1, os.path.join(os.environ["DRAY_SOURCE_DIR"], "python"))  # behind the test's own folder

seed = int(os.environ.get("DRAY_TEST_SEED") or time.time_ns() % 2**31)
scale = int(os.environ.get("DRAY_TEST_SCALE", 1))
rng = random.Random(seed)
print(f"DRAY_TEST_SEED={seed}", file=sys.stderr)


class Needs:
    def __enter__(self):
        return self

    def __exit__(self, kind, missing, trace):
        if kind and issubclass(kind, ImportError):
            print("skipped:", missing)
            sys.exit(77)


needs = Needs()


def forked(body, *arguments):
    """The pid of a fork that calls body; its exit status is 1 when that raises."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return pid


def end_well(pids):
    """Waits for the processes, all of which must end with exit status 0."""
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert not any(ended), ended


@contextlib.contextmanager
def coordinator(*arguments):
    """`dray serve` in a folder of its own, which is given, while the block runs; $DRAY_ADDRESS names it."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(DRAY_ADDRESS=f"unix:{folder}/s", XDG_RUNTIME_DIR=folder)
        server = subprocess.Popen([os.environ["DRAY_PROGRAM"], "serve", "--listen", f"unix:{folder}/s", *arguments],
                                  stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout.readline().startswith("listening")
            yield folder
        finally:
            server.terminate()
            status = server.wait(timeout=60)
        assert status == 0, status
