"""Both ends of the protocol by which checkpoint-engine hands weights to engines of its host: a buffer that both have
mapped, and what lies in it, bucket by bucket, over ZMQ. docs/checkpoint-engine.md shows how it is used.

What comes is unpickled by an allow-list: it may name types, a handle's function and errors, and calls none of them."""
from __future__ import annotations

import contextlib
import io
import math
import mmap
import os
import pickle
import re
from typing import Any, Callable, Iterable, Optional

import torch
import zmq

from .._declared import ECANCELED, ENOMEM, EPROTO, ETIMEDOUT
from .._library import DrayError, DrayTimeout

TRIED = "0.4.2"  # the version of checkpoint-engine that this was tried with
_MESSAGE_BYTES = 64 << 20
_ALIGNMENT = 256


class _Named:
    """What a pickle may name without getting it."""
    __slots__ = ("path",)

    def __init__(self, *path):
        self.path = path


def _failure(*words):
    return RuntimeError(*(str(word) for word in words))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) in _HANDLES or (module, name) in _TYPES:
            return _Named(module, name)
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "builtins" and name in ("RuntimeError", "ValueError", "AssertionError", "Exception", "TypeError"):
            return _failure
        raise pickle.UnpicklingError(f"{module}.{name}: a buffer's handle, dtypes, shapes or an error expected")


def loads(message: bytes) -> Any:
    """A message of the protocol. DrayError (EPROTO): it holds something else; nothing of it was called."""
    try:
        return _Unpickler(io.BytesIO(message)).load()
    except Exception as failure:
        raise DrayError(EPROTO, f"checkpoint-engine's message: {failure}") from None


# ---- the buffer ----------------------------------------------------------------------------------

def shared_buffer(path: str, size: int) -> torch.Tensor:
    """Of the host's memory, which Sender made."""
    if not (isinstance(path, str) and re.fullmatch(r"/dev/shm/dray-[0-9a-f]{32}", path)):
        raise DrayError(EPROTO, f"a buffer of dray in /dev/shm expected, found {path!r}")
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if found.st_uid != os.geteuid() or not 0 < size == found.st_size:
            raise DrayError(EPROTO, f"{path}: {size} bytes of this user expected, found {found.st_size} of user {found.st_uid}")
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    finally:
        os.close(file)


class _File:
    """A buffer in /dev/shm. It has memory as far as it was used: tensors of a small model need little of it."""

    def __init__(self, size):
        self.path, self.size, self._held = f"/dev/shm/dray-{os.urandom(16).hex()}", size, {}
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.truncate(self._file, size)
        except BaseException:
            self.unlink()
            self.close()
            raise

    def hold(self, begin, end):
        """Has memory for these bytes: where /dev/shm is full, a write without it would end this process. begin: where a
        half of the buffer begins."""
        held = self._held.get(begin, begin)
        if end <= held:
            return
        try:
            os.posix_fallocate(self._file, held, end - held)
        except OSError as error:
            raise DrayError(ENOMEM, f"checkpoint-engine's buffer: room for {end - begin} bytes of tensors in /dev/shm expected "
                            f"(half of Sender's bytes= at most), found: {error.strerror}") from None
        self._held[begin] = end

    def unlink(self):
        os.unlink(self.path)

    def close(self):
        os.close(self._file)


def _gpu_buffer(*arguments):
    from torch.multiprocessing.reductions import rebuild_cuda_tensor
    return rebuild_cuda_tensor(*arguments)


_HANDLES = {(__name__, "shared_buffer"): shared_buffer,
            ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): _gpu_buffer}
_TYPES = {("torch", "Tensor"): torch.Tensor, ("torch.storage", "UntypedStorage"): torch.UntypedStorage}


def _buffer_of(handle, device_id):
    """What a handle, which came from the other end, stands for."""
    if not (isinstance(handle, tuple) and len(handle) == 2 and isinstance(handle[0], _Named) and
            handle[0].path in _HANDLES and isinstance(handle[1], tuple)):
        raise DrayError(EPROTO, f"checkpoint-engine's handle: (function, arguments) of a buffer expected, found {handle!r:.200}")
    arguments = [_TYPES.get(each.path) if isinstance(each, _Named) else each for each in handle[1]]
    if device_id is not None and len(arguments) > 6:
        arguments[6] = device_id  # devices may be numbered in another way there
    buffer = _HANDLES[handle[0].path](*arguments)
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise DrayError(EPROTO, f"a buffer of bytes expected, found {buffer.dtype} {tuple(buffer.shape)}")
    return buffer


def _tensors(listed, buffer):
    """(name, tensor) of what lies in the buffer."""
    found = []
    for item in listed:
        try:
            name, shape, dtype, offset = item["name"], tuple(item["shape"]), item["dtype"], item["offset"]
            right = isinstance(name, str) and isinstance(dtype, torch.dtype) and \
                all(type(n) is int and n >= 0 for n in (offset, *shape))
        except (TypeError, KeyError):
            right = False
        if not right:
            raise DrayError(EPROTO, f"name, shape, dtype and offset of a tensor expected, found {item!r:.200}")
        end = offset + math.prod(shape) * dtype.itemsize
        if end > len(buffer) or offset % dtype.itemsize:
            raise DrayError(EPROTO, f"{name}: a place within {len(buffer)} bytes expected, found {offset} to {end}")
        found.append((name, buffer[offset:end].view(dtype).view(shape)))
    return found


def _synchronize():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


# ---- an engine's end -----------------------------------------------------------------------------

def _socket(kind, timeout):
    socket = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES)
    for side in (zmq.RCVTIMEO, zmq.SNDTIMEO):
        socket.setsockopt(side, int(timeout * 1000))
    return socket


def _late(handle, timeout):
    return DrayTimeout(ETIMEDOUT, f"checkpoint-engine's {handle}: nothing came for {timeout:g} s")


def receive(handle: str, run: Callable, post_hook: Optional[Callable] = None, device_id: Optional[int] = None,
            timeout: float = 300.0) -> int:
    """Takes what a parameter server sends to a ZMQ address: run([(name, tensor), ...]) for each bucket, whose tensors are
    good until it returns, then post_hook(). device_id: of this process's GPU. timeout: seconds of a wait. How many
    tensors came. What run raises goes to the sender, who ends it on all ranks."""
    count, failure, buffer, over = 0, None, None, False
    with _socket(zmq.REP, timeout) as socket:
        socket.connect(handle)
        owed = False  # an answer, for which the sender waits

        def heard():
            nonlocal owed
            message, owed = socket.recv(), True
            return loads(message)

        def answer(text=""):
            nonlocal owed
            socket.send_string(text)
            owed = False

        try:
            buffer = _buffer_of(heard(), device_id)
            answer()
            while True:
                told = heard()
                if isinstance(told, Exception):
                    owed = False
                    raise failure or DrayError(ECANCELED, f"checkpoint-engine's {handle}: {told}")
                if told is None and failure is not None:
                    raise failure
                if told is None and over:
                    if post_hook is not None:
                        post_hook()
                    _synchronize()
                    answer()
                    return count
                if told is None:
                    over, buffer = True, None
                elif over or not isinstance(told, list):
                    raise DrayError(EPROTO, f"checkpoint-engine's {handle}: tensors or None expected, found {told!r:.200}")
                else:
                    try:
                        run(_tensors(told, buffer))
                        count += len(told)
                    except Exception as error:
                        failure = error
                        answer(_said(error))
                        continue
                _synchronize()
                answer()
        except zmq.Again:
            raise _late(handle, timeout) from None
        except BaseException as error:
            if owed:  # else the sender would wait until its time is over
                with contextlib.suppress(zmq.ZMQError):
                    answer(_said(error))
            raise


def _said(error):
    """What the sender is told of an error; an empty text would tell it that all is well."""
    return f"{type(error).__name__}: {error}"


# ---- a parameter server's end --------------------------------------------------------------------

class Sender:
    """Hands weights to one worker of an engine that speaks checkpoint-engine's protocol, in the place of its parameter
    server: what is called with lists of (name, tensor), as Subscriber's load= is.

        with Sender(handle) as sender:
            dray.Subscriber(load=sender, tensors=tensors).update()
    bytes: of the buffer, one half of which is filled while the worker takes the other one. device: of the buffer; "cpu":
    memory of this host. Leaving the block without an exception tells the worker that it has all."""

    def __init__(self, handle: str, bytes: int = 512 << 20, device: Any = "cpu", timeout: float = 300.0):
        self._handle, self._half, self._timeout = handle, bytes // 2 // _ALIGNMENT * _ALIGNMENT, timeout
        self._device, self._turn, self._waiting, self._silent = torch.device(device), 0, False, False
        if self._half < _ALIGNMENT:
            raise ValueError(f"bytes: at least {2 * _ALIGNMENT} expected, found {bytes}")

    def __enter__(self):
        self._file, self._socket = None, _socket(zmq.REQ, self._timeout)
        try:
            if self._device.type == "cpu":
                self._file = _File(2 * self._half)
                place = self._file.path, self._file.size
                self._buffer, handle = shared_buffer(*place), (shared_buffer, place)
            else:
                from torch.multiprocessing.reductions import reduce_tensor
                self._buffer = torch.empty(2 * self._half, dtype=torch.uint8, device=self._device)
                handle = reduce_tensor(self._buffer)
            self._socket.bind(self._handle)
            self._say(handle)
            self._answer()
        except BaseException as error:
            self._end(error)
            self._close()
            raise
        finally:
            if self._file:
                self._file.unlink()
        return self

    def _close(self):
        self._socket.close()
        if self._file:
            self._file.close()
        self._buffer = None

    def _say(self, what):
        try:
            self._socket.send(pickle.dumps(what))
        except zmq.Again:
            self._silent = True
            raise _late(self._handle, self._timeout) from None
        self._waiting = True

    def _answer(self):
        """What the worker says of the last thing that it was told."""
        if not self._waiting:
            return
        try:
            said = self._socket.recv()
        except zmq.Again:
            self._silent = True
            raise _late(self._handle, self._timeout) from None
        self._waiting = False
        if said:
            raise DrayError(ECANCELED, f"checkpoint-engine's worker at {self._handle}: {said.decode('utf-8', 'replace')}")

    def __call__(self, named: Iterable) -> None:
        listed, at = [], 0
        for name, tensor in named:
            size = tensor.numel() * tensor.element_size()
            if size > self._half:
                raise ValueError(f"{name}: at most {self._half} bytes expected (half of the buffer), found {size}")
            if at + size > self._half:
                self._send(listed)
                listed, at = [], 0
            start = self._turn * self._half + at
            if self._file:
                self._file.hold(self._turn * self._half, start + size)
            self._buffer[start:start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            listed.append({"name": name, "shape": torch.Size(tensor.shape), "dtype": tensor.dtype, "offset": start})
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        if listed:
            self._send(listed)

    def _send(self, listed):
        _synchronize()
        self._answer()
        self._say(listed)
        self._turn = 1 - self._turn

    def __exit__(self, kind, error, _):
        try:
            if kind is None:
                for _ in range(2):
                    self._answer()
                    self._say(None)
                self._answer()
        except DrayError as failure:
            kind, error = type(failure), failure
            raise
        finally:
            if kind is not None:
                self._end(error)
            self._close()

    def _end(self, error):
        """The worker ends by the same error, if it still listens."""
        if self._silent:  # it was waited for already
            return
        try:
            if self._waiting:
                self._socket.recv()
            self._socket.send(pickle.dumps(RuntimeError(str(error))))
        except zmq.ZMQError:
            pass
