"""The program `dray`, and a coordinator of one's own: `with dray.serve(): ...`."""
import atexit
import ctypes
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Optional, Sequence

from ._library import CODES, DrayError, DrayTimeout

_PR_SET_PDEATHSIG = 1


def _failed(name: str, message: str) -> DrayError:
    kind = DrayTimeout if name == "ETIMEDOUT" else DrayError
    return kind(-1 - CODES.index(name[1:]), message)


def program() -> str:
    """The path of the program `dray`: $DRAY_PROGRAM; that of this package, or of the source folder or prefix that
    it is in; else the one on PATH. DrayError (ENOENT): there is none."""
    given = os.environ.get("DRAY_PROGRAM")
    if given:
        return given
    here = pathlib.Path(__file__).resolve().parent
    places = [here / "bin/dray", here.parents[1] / "build/release/dray",
              *(folder / "bin/dray" for folder in list(here.parents)[1:5])]
    for place in places:
        if os.access(place, os.X_OK) and place.is_file():
            return str(place)
    found = shutil.which("dray")
    # The console script is this package again: it would ask itself.
    if found and pathlib.Path(found).read_bytes()[:4] == b"\x7fELF":
        return found
    raise _failed("ENOENT", f"the program dray is neither in {here} nor on PATH: `pip install` of this package "
                    "brings it, `make build` makes it, $DRAY_PROGRAM names it")


def _environment() -> dict:
    """Ours; where the system has no OpenBLAS, PyPI's scipy-openblas32 will do for the built-in engine."""
    environment = dict(os.environ)
    if "DRAY_OPENBLAS_LIBRARY" not in environment and not _system_has_openblas():
        for folder in sys.path:
            found = pathlib.Path(folder) / "scipy_openblas32/lib/libscipy_openblas.so"
            if found.is_file():
                environment["DRAY_OPENBLAS_LIBRARY"] = str(found)
                break
    return environment


def _system_has_openblas() -> bool:
    try:
        ctypes.CDLL("libopenblas.so.0")
    except OSError:
        return False
    return True


def main() -> int:
    """The console script: becomes the program."""
    try:
        path = program()
    except DrayError as error:
        print(f"dray: {error}", file=sys.stderr)
        return 1
    os.execve(path, ["dray", *sys.argv[1:]], _environment())


class Server:
    """A coordinator that `serve` started, or found. address: what $DRAY_ADDRESS is while it runs. metrics: the
    address of its metrics, where it was started with --metrics."""

    def __init__(self, address: str, process: Optional[subprocess.Popen] = None, folder: Optional[str] = None):
        self.address, self._process, self._folder, self.metrics = address, process, folder, None
        self._pid = os.getpid()

    def close(self, timeout: float = 10.0) -> None:
        """Stops the coordinator, if `serve` started it, and forgets its address. Twice is fine. In a process that was
        forked it does nothing: the coordinator is the parent's."""
        process, self._process = self._process, None
        if process is None or os.getpid() != self._pid:
            return
        if os.environ.get("DRAY_ADDRESS") == self.address:
            del os.environ["DRAY_ADDRESS"]
        process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _end_with(parent: int):
    """For the child: the kernel ends it with us, however we end. Made before the fork."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def before_exec():
        os.setpgid(0, 0)  # Ctrl-C is for us: what still speaks to the server may end in peace
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
    return before_exec


def _begun(server: Server, command: Sequence[str], timeout: float) -> dict:
    """Starts the server's process; what it says of itself."""
    log = pathlib.Path(server._folder) / "log"
    with log.open("wb") as errors:
        try:
            process = server._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                preexec_fn=_end_with(os.getpid()), env=_environment())
        except OSError as error:
            raise _failed("ENOENT" if isinstance(error, FileNotFoundError) else "ESYS", f"{command[0]}: "
                          f"{error.strerror}") from None
    poll = select.poll()  # select() refuses descriptors from 1024 on, which a large process has
    poll.register(process.stdout, select.POLLIN)
    deadline, line = time.monotonic() + timeout, b""
    while not line.endswith(b"\n"):
        ready = poll.poll(1000 * max(0, deadline - time.monotonic()))
        piece = os.read(process.stdout.fileno(), 4096) if ready else b""
        line += piece
        if piece:
            continue
        said = log.read_text(errors="replace").strip() or "it said nothing"
        if ready:
            raise _failed("ESYS", f"dray serve ended: {said}")
        raise _failed("ETIMEDOUT", f"dray serve does not listen after {timeout:g} s: {said}")
    try:
        return json.loads(line.split(b"\n")[0])
    except ValueError:
        raise _failed("ESYS", f"{command[0]}: the address of dray serve expected, found {line[:80]!r}") from None


def serve(listen: Optional[str] = None, arguments: Sequence[str] = (), timeout: float = 30.0) -> Server:
    """Starts a coordinator for this process and those that it starts, and sets $DRAY_ADDRESS to where it listens,
    which Context, Queue and Role take for theirs. Where $DRAY_ADDRESS is set there is one already, and nothing is
    started.

    listen: an address as `dray serve --listen` takes them; without one, a Unix socket of its own. arguments: more
    of `dray serve`'s (`["--journal", FOLDER]`). It ends with `close()`, with the `with` block, and with the thread
    that called this, however that ends: call it on the main thread. DrayError: it cannot listen there, and why;
    DrayTimeout: it does not after `timeout` seconds."""
    there = os.environ.get("DRAY_ADDRESS")
    if there:
        return Server(there)
    path = program()
    folder = tempfile.mkdtemp(prefix="dray-serve-")
    server = Server("", None, folder)
    try:
        listen = listen or f"unix:{folder}/socket"
        told = _begun(server, [path, "serve", "--json", "--listen", listen, *arguments], timeout)
        server.address, server.metrics = told["unix"] or told["tcp"], told.get("metrics")
    except BaseException:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    os.environ["DRAY_ADDRESS"] = server.address
    atexit.register(server.close)
    return server
