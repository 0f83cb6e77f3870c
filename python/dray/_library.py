"""The library, as _declared.py says what it has, and its errors as an exception."""
import contextlib
import ctypes as c
import functools
import operator
import os
import pathlib
import struct
import sys
import threading

from . import _declared as declared
from ._declared import *  # structs, and constants without their DRAY_

FOR_EVER = 10 * 365 * 86400.0
CODES = [name[1:] for name, value in vars(declared).items()
         if name[0] == "E" and isinstance(value, int) and value < 0]


def words(prefix):
    """The names of an enum's values, in lower case and in order: words("POLICY_")."""
    return [name[len(prefix):].lower() for name in vars(declared) if name.startswith(prefix)]


POLICIES = words("POLICY_")


class DrayError(Exception):
    """What a call of the library answered: `code` (negative) and `name` ("ESTALE")."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code
        self.name = "E" + CODES[-code - 1] if 0 < -code <= len(CODES) else "E?"

    def __reduce__(self):  # into other processes, as it is
        return type(self), (self.code, str(self))


class DrayTimeout(DrayError, TimeoutError):
    """ETIMEDOUT: a deadline passed; the message says what was missing."""


# dray_column_part: dtype, content, ndim, copied, shape, bytes, values
COLUMN_PART = struct.Struct(f"@iiII{MAX_DIMS}qQP")


_ASK = InterruptFn
_library = None


def library_path():
    """$DRAY_LIBRARY; else that of the source folder, or of the prefix where this package is
    installed; else the system's."""
    given = os.environ.get("DRAY_LIBRARY")
    if given:
        return given
    folders = list(pathlib.Path(__file__).resolve().parents)[0:6]  # first, that of the package
    built = folders[2] / "include/dray/dray.h", folders[2] / "build/release/libdray.so.0"
    if all(path.is_file() for path in built):
        return str(built[1])
    for folder in folders:
        for place in (".", "lib", "lib64"):
            library = folder / place / "libdray.so.0"
            if library.is_file():
                return str(library)
    return "libdray.so.0"


def library():
    """The library, loaded at the first call."""
    global _library
    if _library is None:
        try:
            loaded = c.CDLL(library_path())
        except OSError as error:
            raise OSError(f"{error}: `make build` makes the library, or $DRAY_LIBRARY names it where "
                          "it is not installed, as in build/release/libdray.so.0") from None
        for name, (result, arguments) in declared.FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype = c.c_int if result is declared.CODE else result
            function.argtypes = arguments + ([c.c_void_p] if result is declared.CODE else [])
        _library = loaded
    return _library


# ---- waiting: the library asks every 0.2 s, and after signals, whether it shall go on ----

_errors = []  # pointers to some that no call has set: making one takes as long as a small call
_caught = []  # what handlers of signals raised while the library waited
_NOBODY = _ASK()


def _attend():
    """Python runs the handlers of signals, and raises what they raise, where this generator goes on:
    within the try. Answers 1 from then on until it was raised by call()."""
    while True:
        try:
            while True:
                yield 1 if _caught else 0
        except GeneratorExit:
            return
        except BaseException as error:
            _caught.append(error)


def _watch():
    """Has the main thread asked, which is the one that Python gives signals to."""
    global _attending, _asks, _watched
    _attending = _attend()
    next(_attending)
    _asks = _ASK(_attending.__next__)
    library().dray_set_interrupt(_asks)
    _watched = True


def _unwatch():
    """A fork's main thread is another one."""
    global _watched
    _watched = False


def interrupt(error):
    """What a signal's handler may do instead of raising the error: a call that waits, or the next one, of the main
    thread raises it. So it cannot come between taking a lock and being sure of it."""
    _caught.append(error)


def forget(kind):
    """Errors of the kind that no call has raised."""
    _caught[:] = [error for error in _caught if not isinstance(error, kind)]


_attending, _asks, _watched = None, None, False
os.register_at_fork(after_in_child=_unwatch)


def _within_handler(function, *arguments):
    """A signal's handler may call the library while that asks whether to go on: that is not asked again."""
    library().dray_set_interrupt(_NOBODY)
    try:
        return function(*arguments)
    finally:
        library().dray_set_interrupt(_asks)


def call(name, *arguments):
    """Calls a function that returns a code; raises DrayError, and what a signal's handler raised."""
    function = getattr(_library or library(), name)
    error = _errors.pop() if _errors else c.byref(Error())
    if not _watched and threading.current_thread() is threading.main_thread():
        _watch()
    if _watched and _attending.gi_running and \
            threading.current_thread() is threading.main_thread():
        code = _within_handler(function, *arguments, error)
    else:
        code = function(*arguments, error)
        if _caught and threading.current_thread() is threading.main_thread():
            raise _caught.pop()
    if code:
        raise_code(code, error._obj.message.decode("utf-8", "replace"))
    _errors.append(error)


def raise_code(code, message):
    raise (DrayTimeout if code == declared.ETIMEDOUT else DrayError)(code, message)


async def in_thread(function, *arguments, **options):
    """Calls it in a thread, while the event loop goes on. asyncio takes longer to import than all of dray."""
    import asyncio
    return await asyncio.to_thread(function, *arguments, **options)


# ---- threads and closing: nothing is freed under a call ----

class Use:
    """Who is in an object's calls: one thread at a time (`with use:`), and any that are beside() it or look in
    briefly(). Others are refused (EBUSY), and so is the end while anybody is in a call."""

    def __init__(self, name: str):
        self.name, self.using, self.user = name, threading.Lock(), 0
        self.closed = self._ending = False
        self.counting, self._beside = threading.RLock(), 0

    def __enter__(self) -> None:
        self._enter()
        if self.closed:
            self.__exit__()
            self._refuse_closed()

    def __exit__(self, *_) -> None:
        self.user = 0
        self.using.release()

    def _enter(self):
        if not self.using.acquire(False):
            self._refuse(self.user == threading.get_ident())
        self.user = threading.get_ident()

    def _refuse(self, own=False):
        raise DrayError(declared.EBUSY, f"{self.name} is in use " +
                        ("already, by what this call came into" if own else
                         "by another thread: one at a time may use it; wait for its call, or open one for each"))

    def _refuse_closed(self):
        raise DrayError(declared.ECLOSED, f"{self.name} is closed")

    @contextlib.contextmanager
    def briefly(self):
        """For calls that any thread may make at any time, and that do not wait; and to change what they use."""
        with self.counting:
            if self.closed or self._ending:
                self._refuse_closed()
            yield

    @contextlib.contextmanager
    def beside(self):
        """For calls that any thread may make at any time."""
        with self.briefly():
            self._beside += 1
        try:
            yield
        finally:
            with self.counting:
                self._beside -= 1

    def check_idle(self) -> None:
        """Is refused as the end would be."""
        if self.using.locked():
            self._refuse(self.user == threading.get_ident())
        self._check_beside()

    def _check_beside(self):
        if self._beside:
            self._refuse()

    def end(self, free) -> None:
        """Calls free(), once, and the object is closed; what free() raises leaves it open."""
        if self.closed:
            return
        self._enter()
        try:
            with self.counting:
                self._check_beside()
                self._ending = True
            if not self.closed:
                free()
                self.closed = True
        finally:
            self._ending = False
            self.user = 0
            self.using.release()


def alone(method):
    """Of an Opened: one thread at a time is in the method."""
    @functools.wraps(method)
    def within(self, *arguments, **options):
        with self._use:
            return method(self, *arguments, **options)
    return within


class Opened:
    """What the library opened, used until it is closed. `_frees`: the function that frees it."""
    _use, _frees = None, ""

    def _open_as(self, name):
        self.pointer, self._use, self._pid = c.c_void_p(), Use(name), os.getpid()

    def _call(self, name, *arguments):
        with self._use:
            self._within(name, *arguments)

    def _within(self, name, *arguments):
        """Within `with self._use:`."""
        if not self.pointer:
            self._use._refuse_closed()
        call(name, self.pointer, *arguments)

    def _number(self, name):
        """What a function that does not wait says of it."""
        with self._use.briefly():
            return getattr(library(), name)(self.pointer)

    def _beside(self, name, *arguments):
        with self._use.beside():
            self._within(name, *arguments)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """Frees it, once. DrayError (EBUSY): a call is under way in another thread."""
        if self._use is not None and os.getpid() == self._pid:
            self._use.end(self._end)

    def _end(self):
        pointer, self.pointer = self.pointer, None
        if pointer:
            getattr(library(), self._frees)(pointer)


def take(out, size=None):
    """The bytes of a malloc'ed result (size None: a string), which is freed."""
    try:
        return c.string_at(out) if size is None else c.string_at(out, size)
    finally:
        library().dray_free(out)


@functools.lru_cache(maxsize=1024)
def text(value):
    """A name for the library, whose strings end at their first NUL byte: none is cut. None: NULL."""
    if value is None:
        return None
    found = value.encode()
    if b"\0" in found:
        raise ValueError(f"{value!r:.80} has a NUL byte in it")
    return found


def reason(why):
    """Why something failed, for the library, which takes any text but NUL bytes."""
    return str(why).encode("utf-8", "replace").replace(b"\0", b" ")


def nanoseconds(seconds):
    """None: what the session was opened with; math.inf, and what is longer than ten years: ten years."""
    if seconds is None:
        return WAIT_DEFAULT
    if not seconds >= 0:
        raise ValueError(f"a time of at least 0 seconds expected, found {seconds}")
    return int(min(seconds, FOR_EVER) * 1e9)


def number(what, value, bits=64):
    """A version, or another number without a sign. ctypes would give the library the lowest bits of any other."""
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{what}: a whole number expected, found {value!r:.80}") from None
    if not 0 <= found < 1 << bits:
        raise ValueError(f"{what}: a number from 0 to 2**{bits} - 1 expected, found {found}")
    return found


def options(kind, **values):
    """A structure of the library's with these values. ValueError: a number does not fit its field, which would get its
    lowest bits from ctypes."""
    made = kind(**values)
    for name, value in values.items():
        if hasattr(value, "__index__") and getattr(made, name) != operator.index(value):
            raise ValueError(f"{name}: a number of {8 * getattr(kind, name).size} bits expected, found {value}")
    return made


def known_options(kind, given, own=()):
    """Refuses names that the options do not have (a structure of the library's), which ctypes would take for other
    attributes. own: those that are set in another way."""
    known = [name for name, _ in kind._fields_ if name not in ("size", *own)]
    for name in given:
        if name not in known:
            raise TypeError(f"unknown keyword {name!r}; known: {', '.join(sorted(known))}")


def program_name():
    """The name of this process where none is given: its script's; None: what the library finds, "python"."""
    script = os.path.basename((getattr(sys, "argv", None) or [""])[0])
    known = script.isprintable() and script[:1] not in ("", "-") and len(script.encode(errors="replace")) <= 256
    return script if known else None


def check_word(what, word, known):
    if word not in known:
        raise ValueError(f"{what}: one of {', '.join(known)} expected, found {word!r}")


def version() -> str:
    """The library's."""
    return library().dray_version().decode()
