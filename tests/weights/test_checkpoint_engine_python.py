"""What the checkpoint-engine plug-in takes from the other end: messages by an allow-list, handles of buffers, places in
them. With the package itself: tests/frameworks/ce_real."""
import contextlib
import errno
import os
import pickle
import sys
import tempfile
import types
import unittest.mock

from begin import needs

with needs:
    import torch

class Late(Exception):
    """The stand-in's zmq.Again."""


sys.modules.setdefault("zmq", types.SimpleNamespace(REP=1, REQ=2, Again=Late, ZMQError=Late))  # nothing is sent here
import dray
from dray.integrations import checkpoint_engine as plugin


def refused(what, words):
    try:
        what()
    except dray.DrayError as failure:
        assert words in str(failure) and failure.name == "EPROTO", failure
        return
    raise AssertionError(f"not refused: {words}")


class Hostile:
    def __init__(self, *call):
        self._call = call

    def __reduce__(self):
        return self._call


def hostile(folder):
    """A pickle that calls something is refused before it does."""
    mark = os.path.join(folder, "called")
    calls = [(os.system, (f"touch {mark}",)), (eval, (f"open({mark!r}, 'w')",)), (os.mkdir, (mark,)),
             (getattr, ("os", "system")), (torch.load, (mark,)), (torch.empty, ((1 << 40,),)), (dray.serve, ()),
             (plugin.shared_buffer, (mark, 1)), (torch.Tensor, (1 << 40,)), (__import__, ("this",))]
    for call in calls:
        for message in (Hostile(*call), [Hostile(*call)], (plugin.shared_buffer, (Hostile(*call), 1)), {"name": Hostile(*call)}):
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
                refused(lambda: plugin.loads(pickle.dumps(message, protocol)), "checkpoint-engine's message")
    assert not os.path.exists(mark)


def handles():
    for handle in [("x", ()), None, (plugin.shared_buffer, ("/etc/passwd", 1)), (plugin.shared_buffer, ("/dev/shm/../x", 1)),
                   (torch.Tensor, ())]:
        refused(lambda: plugin._buffer_of(plugin.loads(pickle.dumps(handle)), None), "expected")


def places():
    """Tensors lie within the buffer."""
    buffer, good = torch.zeros(1024, dtype=torch.uint8), {"name": "a", "shape": (8,), "dtype": torch.float32, "offset": 32}
    assert plugin._tensors([good], buffer)[0][1].shape == (8,)
    for wrong in [dict(offset=1000), dict(offset=-4), dict(offset=2), dict(shape=(1 << 62, 4)), dict(shape=(-8,)), dict(name=3),
                  dict(dtype="float32"), dict(shape=None), dict(offset=True)]:
        refused(lambda: plugin._tensors([{**good, **wrong}], buffer), "expected, found")
    refused(lambda: plugin._tensors([3], buffer), "expected, found")


def messages():
    """What upstream sends is taken, in each of pickle's protocols."""
    listed = [{"name": "a", "shape": torch.Size([2, 3]), "dtype": torch.float8_e4m3fn, "offset": 0}]
    for protocol in range(3, pickle.HIGHEST_PROTOCOL + 1):
        assert plugin.loads(pickle.dumps(listed, protocol)) == listed
        assert plugin.loads(pickle.dumps(None, protocol)) is None
        assert "it failed" in str(plugin.loads(pickle.dumps(RuntimeError("it failed"), protocol)))


class Socket:
    """coming: what the other end says, one message for each wait; then nothing comes. told: what it was told."""

    def __init__(self, *coming):
        self.coming, self.told, self.late = [pickle.dumps(each) for each in coming], [], 0

    def recv(self):
        if not self.coming:
            self.late += 1
            raise plugin.zmq.Again
        return self.coming.pop(0)

    def send(self, message):
        self.told.append(message)

    def send_string(self, text):
        self.send(text.encode())

    def connect(self, _):
        pass

    bind, close = connect, lambda self: None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@contextlib.contextmanager
def buffer_of(size):
    path = f"/dev/shm/dray-{os.urandom(16).hex()}"
    with open(path, "wb") as file:
        file.truncate(size)
    try:
        yield plugin.shared_buffer, (path, size)
    finally:
        os.unlink(path)


def answered():
    """Whatever ends a worker, the sender is told of it where it waits for an answer, once."""
    def fails(*_):
        raise ValueError("it failed")

    def takes(named):
        assert named[0][0] == "a"

    one, gone = {"name": "a", "shape": (8,), "dtype": torch.float32, "offset": 0}, f"/dev/shm/dray-{'0' * 32}"
    with buffer_of(1024) as handle:
        for coming, run, hook, words in (
                ([handle, [one], None, None], takes, fails, "ValueError: it failed"),
                ([handle, [one], None], fails, None, "ValueError: it failed"),
                ([handle, [one], [one], 3], takes, None, "tensors or None expected"),
                ([handle, [one], os.system], takes, None, "checkpoint-engine's message"),
                ([(plugin.shared_buffer, (gone, 1024))], takes, None, "FileNotFoundError"),
                ([(plugin.shared_buffer, (3, 4, 5))], takes, None, "TypeError")):
            socket = Socket(*coming)
            with unittest.mock.patch.object(plugin, "_socket", lambda *_: socket):
                try:
                    plugin.receive("it", run, hook, timeout=1)
                except Exception as failure:
                    assert not isinstance(failure, plugin.zmq.Again) and not socket.late, failure
                else:
                    raise AssertionError(f"not refused: {words}")
            assert len(socket.told) == len(coming) and words in socket.told[-1].decode(), (words, socket.told)
        socket = Socket(handle, [one], RuntimeError("another rank's"))  # the sender has ended it, and waits no more
        with unittest.mock.patch.object(plugin, "_socket", lambda *_: socket):
            try:
                plugin.receive("it", lambda named: None, timeout=1)
            except dray.DrayError as failure:
                assert failure.name == "ECANCELED" and "another rank's" in str(failure)
        assert socket.told == [b"", b""]


def sender():
    """It waits once for a worker that says nothing, and has memory for what it writes, and no more."""
    socket = Socket()
    with unittest.mock.patch.object(plugin, "_socket", lambda *_: socket):
        try:
            plugin.Sender("it", bytes=1024, timeout=1).__enter__()
        except dray.DrayTimeout as failure:
            assert "nothing came" in str(failure)
        assert socket.late == 1 and len(socket.told) == 1, (socket.late, socket.told)

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")
        begun = plugin.Sender("it", bytes=64 << 20, timeout=1)
        begun._answer = lambda: None  # a worker that takes everything
        with begun:
            begun([("a", torch.ones(1000)), ("b", torch.ones(500))])
            begun([("a", torch.ones(1000))])
            held = os.fstat(begun._file._file)
            assert held.st_size == 64 << 20 and held.st_blocks * 512 <= 16384, held
            assert begun._buffer[:4000].view(torch.float32).eq(1).all()
            with unittest.mock.patch.object(os, "posix_fallocate", full):
                try:
                    begun([("a", torch.ones(3000))])
                except dray.DrayError as failure:
                    assert failure.name == "ENOMEM" and "room for 12000 bytes" in str(failure), failure
                else:
                    raise AssertionError("a buffer without memory was written to")
        assert not [name for name in os.listdir("/dev/shm") if os.path.join("/dev/shm", name) == begun._file.path]


with tempfile.TemporaryDirectory() as folder:
    hostile(folder)
handles()
places()
messages()
answered()
sender()
