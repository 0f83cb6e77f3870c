"""The library, its structs as include/dray/ declares them, and its errors as an exception."""
import ctypes as c
import functools
import os
import pathlib
import struct
import threading

MAX_DIMS = 4
WAIT_DEFAULT = -1
FOR_EVER = 10 * 365 * 86400.0
TIMEDOUT = -13
BUSY = -23
CODES = ("INVALID NOMEM NOENT EXIST SYS FORMAT VERSION CHECKSUM DTYPE SHAPE HOLE OVERLAP TIMEDOUT "
         "AGAIN CLOSED DEAD STALE GONE END FULL TORN PERM BUSY PROTO CANCELED UNSUPPORTED "
         "INTERNAL").split()
POLICIES = "fifo ordered group oldest_version priority token_balanced lockstep".split()


class DrayError(Exception):
    """What a call of the library answered: `code` (negative) and `name` ("ESTALE")."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code
        self.name = "E" + CODES[-code - 1] if 0 < -code <= len(CODES) else "E?"


class DrayTimeout(DrayError, TimeoutError):
    """ETIMEDOUT: a deadline passed; the message says what was missing."""


class Error(c.Structure):
    _fields_ = [("code", c.c_int32), ("origin", c.c_int32), ("raw", c.c_int64),
                ("message", c.c_char * 496)]


class Sized(c.Structure):
    """A struct that begins with its own size."""

    def __init__(self, **values):
        super().__init__(size=c.sizeof(type(self)), **values)


class Options(Sized):
    _fields_ = [("size", c.c_size_t), ("address", c.c_char_p), ("name", c.c_char_p),
                ("role", c.c_char_p), ("host", c.c_char_p), ("rank", c.c_uint32),
                ("timeout_ns", c.c_int64), ("trusted_networks", c.c_char_p)]


class Block(c.Structure):
    _fields_ = [("tensor", c.c_uint32), ("region", c.c_uint32), ("start", c.c_int64 * MAX_DIMS),
                ("extent", c.c_int64 * MAX_DIMS), ("offset", c.c_uint64),
                ("stride", c.c_int64 * MAX_DIMS)]


class ColumnData(c.Structure):
    _fields_ = [("name", c.c_char_p), ("dtype", c.c_int32), ("content", c.c_int32),
                ("ndim", c.c_uint32), ("shape", c.c_int64 * MAX_DIMS), ("offsets", c.c_void_p),
                ("values", c.c_void_p), ("bytes", c.c_uint64)]


# dray_column_part: dtype, content, ndim, copied, shape, bytes, values
COLUMN_PART = struct.Struct(f"@iiII{MAX_DIMS}qQP")


class Claim(Sized):
    _fields_ = [("size", c.c_size_t), ("task", c.c_char_p), ("partition", c.c_char_p),
                ("count", c.c_uint32), ("up_to", c.c_int32), ("policy", c.c_int32),
                ("timeout_ns", c.c_int64), ("max_hold_ns", c.c_int64), ("fresh", c.c_int32),
                ("staleness", c.c_uint32), ("version", c.c_uint64), ("group", c.c_char_p),
                ("group_epoch", c.c_uint64), ("round", c.c_uint64), ("token_cap", c.c_uint64),
                ("cost", c.c_char_p), ("dp_rank", c.c_uint32), ("dp_size", c.c_uint32),
                ("peer", c.c_uint32), ("peers", c.c_uint32), ("micro_rows", c.c_uint32),
                ("unused", c.c_uint32)]


class QueueTask(c.Structure):
    _fields_ = [("name", c.c_char_p), ("needs", c.POINTER(c.c_char_p)), ("needs_count", c.c_uint32),
                ("writes", c.POINTER(c.c_char_p)), ("writes_count", c.c_uint32)]


class QueueOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("tasks", c.POINTER(QueueTask)), ("task_count", c.c_uint32),
                ("capacity_rows", c.c_uint64), ("capacity_bytes", c.c_uint64),
                ("max_attempts", c.c_uint32), ("timeout_ns", c.c_int64), ("on_loss", c.c_int32),
                ("provisional_count", c.c_uint32), ("provisional", c.POINTER(c.c_char_p)),
                ("batch_rows", c.c_uint32), ("open_batches", c.c_uint32),
                ("checkpoint_batches", c.c_uint32), ("row_bytes", c.c_uint64),
                ("durability", c.c_int32), ("reserved", c.c_uint32), ("restore", c.c_char_p),
                ("backend", c.c_int32), ("backend_address", c.c_char_p)]


class Tag(c.Structure):
    _fields_ = [("key", c.c_char_p), ("number", c.c_double)]


class RowTag(c.Structure):
    _fields_ = [("row", c.c_uint32), ("reserved", c.c_uint32), ("key", c.c_char_p),
                ("number", c.c_double)]


class Insert(Sized):
    _fields_ = [("size", c.c_size_t), ("partition", c.c_char_p), ("rows", c.c_uint32),
                ("group_size", c.c_uint32), ("once_per_group", c.c_int32),
                ("columns", c.POINTER(ColumnData)), ("column_count", c.c_uint32),
                ("tags", c.POINTER(Tag)), ("tag_count", c.c_uint32), ("row_bytes", c.c_uint64),
                ("timeout_ns", c.c_int64), ("at_slot", c.c_uint64), ("refill", c.c_uint64),
                ("row_tags", c.POINTER(RowTag)), ("row_tag_count", c.c_uint32),
                ("known_only", c.c_uint32)]


class Refill(Sized):
    _fields_ = [("size", c.c_size_t), ("id", c.c_uint64), ("rows", c.c_uint32),
                ("slot", c.c_uint32), ("group", c.c_uint32), ("attempts", c.c_uint32),
                ("cause", c.c_int32), ("partition", c.c_char * 256), ("task", c.c_char * 256),
                ("reason", c.c_char * 208)]


class Admission(Sized):
    _fields_ = [("size", c.c_size_t), ("task", c.c_char_p), ("batch_rows", c.c_uint32),
                ("staleness", c.c_uint32), ("concurrency", c.c_uint32), ("resume", c.c_int32),
                ("version", c.c_uint64)]


class LoaderOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("claim", c.POINTER(Claim)), ("ahead", c.c_uint32),
                ("ahead_rows", c.c_uint32), ("ahead_bytes", c.c_uint64), ("micro", c.c_int32),
                ("unused", c.c_uint32)]


class Load(Sized):
    _fields_ = [("size", c.c_size_t), ("batch", c.c_void_p), ("number", c.c_uint64),
                ("first", c.c_uint32), ("rows", c.c_uint32), ("micro", c.c_uint32),
                ("micros", c.c_uint32)]


class Counts(Sized):
    _fields_ = [("size", c.c_size_t), ("batches", c.c_uint64), ("rows", c.c_uint64),
                ("committed", c.c_uint64), ("lost", c.c_uint64), ("waits", c.c_uint64),
                ("waited_ns", c.c_int64), ("ready", c.c_uint32), ("unfinished", c.c_uint32)]


_P = c.c_void_p
_E = c.POINTER(Error)
_OUT = c.POINTER(c.c_void_p)
_ASK = c.CFUNCTYPE(c.c_int)
_CODE = "0 or a negative code, and the error as the last argument"
# name: (what it returns, its arguments before the error)
_FUNCTIONS = {
    "dray_version": (c.c_char_p, []),
    "dray_dtype_parse": (c.c_int, [c.c_char_p]),
    "dray_dtype_name": (c.c_char_p, [c.c_int32]),
    "dray_set_interrupt": (None, [_ASK]),
    "dray_report_post": (_CODE, [_P, c.c_char_p, c.c_char_p]),
    "dray_context_status": (_CODE, [_P, _OUT]),
    "dray_barrier": (_CODE, [_P, c.c_char_p, c.c_uint32, c.c_int64]),
    "dray_lease_acquire": (_CODE, [_P, c.POINTER(c.c_char_p), c.c_uint32, _P, _OUT]),
    "dray_lease_number": (c.c_uint64, [_P]),
    "dray_lease_check": (_CODE, [_P, c.POINTER(c.c_uint32)]),
    "dray_lease_release": (_CODE, [_P]),
    "dray_trace_open": (_CODE, [c.c_char_p, c.c_char_p]),
    "dray_trace_span": (None, [c.c_int, _P, c.c_int64, c.c_int64, c.c_int64]),
    "dray_trace_enter": (None, [c.c_int, _P, c.c_int64]),
    "dray_trace_wait": (None, [c.c_int, _P, c.c_int64]),
    "dray_trace_worked": (None, [c.c_int64, c.c_int64]),
    "dray_trace_leave": (None, []),
    "dray_trace_is_on": (c.c_int, []),
    "dray_trace_now": (c.c_int64, []),
    "dray_trace_flush": (_CODE, []),
    "dray_trace_merge": (_CODE, [c.c_char_p, c.c_char_p]),
    "dray_open": (_CODE, [c.POINTER(Options), _OUT]),
    "dray_close": (None, [_P]),
    "dray_queue_open": (_CODE, [_P, c.c_char_p, _P, _OUT]),
    "dray_queue_close": (None, [_P]),
    "dray_queue_fd": (c.c_int, [_P]),
    "dray_queue_wait": (_CODE, [_P, c.c_char_p, c.c_char_p, c.c_int64]),
    "dray_queue_end": (_CODE, [_P]),
    "dray_queue_admit": (_CODE, [_P, c.POINTER(Admission)]),
    "dray_queue_version": (_CODE, [_P, c.c_uint64]),
    "dray_queue_cursor": (_CODE, [_P, c.c_uint64, _OUT, c.POINTER(c.c_size_t)]),
    "dray_queue_covered": (_CODE, [_P, c.c_char_p, c.c_size_t]),
    "dray_queue_resume": (_CODE, [_P, c.c_char_p, c.c_size_t, c.POINTER(c.c_uint32)]),
    "dray_queue_checkpoint": (_CODE, [_P, c.c_char_p]),
    "dray_queue_status": (_CODE, [_P, _OUT]),
    "dray_queue_insert": (_CODE, [_P, c.POINTER(Insert), c.POINTER(c.c_uint32)]),
    "dray_queue_seal": (_CODE, [_P, c.c_char_p, c.c_uint32]),
    "dray_queue_clear": (_CODE, [_P, c.c_char_p]),
    "dray_queue_refill_wait": (_CODE, [_P, c.c_int64, c.POINTER(Refill)]),
    "dray_queue_refill_decline": (_CODE, [_P, c.c_uint64]),
    "dray_queue_claim_any": (_CODE, [_P, c.POINTER(Claim), c.c_uint32, c.POINTER(c.c_uint32), _OUT]),
    "dray_batch_commit": (_CODE, [_P]),
    "dray_batch_export": (_CODE, [_P, _OUT, c.POINTER(c.c_size_t)]),
    "dray_batch_import": (_CODE, [_P, c.c_char_p, c.c_size_t, _OUT]),
    "dray_batch_fail": (_CODE, [_P, _P, c.c_uint32, c.c_char_p]),
    "dray_batch_leave_open": (_CODE, [_P, _P, c.c_uint32]),
    "dray_batch_hold": (_CODE, [_P, c.c_int64]),
    "dray_batch_partition": (c.c_char_p, [_P]),
    "dray_batch_row": (c.c_void_p, [_P, c.c_uint32]),
    "dray_batch_rows": (c.c_uint32, [_P]),
    "dray_batch_weights": (_CODE, [_P, c.c_uint32, c.c_uint32, _P]),
    "dray_batch_tags": (_CODE, [_P, c.c_char_p, c.c_uint32, c.c_uint32, _P]),
    "dray_batch_gather_rows": (_CODE, [_P, c.c_char_p, c.c_uint32, c.c_uint32, _P, c.c_size_t, _P]),
    "dray_batch_give_back": (_CODE, [_P]),
    "dray_batch_read": (_CODE, [_P, c.c_char_p, c.c_uint32, c.c_uint32, _P, _P, _P,
                                c.c_size_t]),
    "dray_batch_set": (_CODE, [_P, c.POINTER(ColumnData)]),
    "dray_batch_set_tags": (_CODE, [_P, c.c_char_p, c.c_uint32, c.c_uint32, _P]),
    "dray_batch_free": (None, [_P]),
    "dray_gpu_count": (_CODE, [_P, _P]),
    "dray_gpu_get": (_CODE, [c.c_int32, _P]),
    "dray_gpu_storage_of": (_CODE, [c.c_uint64, _P]),
    "dray_arena_alloc": (_CODE, [_P, c.c_uint64, _P]),
    "dray_arena_free": (_CODE, [_P, c.c_uint64]),
    "dray_arena_get_status": (_CODE, [_P, _P]),
    "dray_arena_prepare": (_CODE, [c.c_char_p, _P]),
    "dray_arena_release": (_CODE, [c.c_char_p, _P, _P]),
    "dray_arena_resume": (_CODE, [c.c_char_p, _P, _P]),
    "dray_torch_use": (_CODE, [c.c_char_p]),
    "dray_torch_arena": (_CODE, [c.c_char_p, c.c_int, _P, _OUT]),
    "dray_handle_packed_size": (c.c_size_t, []),
    "dray_handle_describe": (_CODE, [_P, _P]),
    "dray_handle_pack": (_CODE, [_P, _P, c.c_size_t]),
    "dray_handle_unpack": (_CODE, [c.c_char_p, c.c_size_t, _P]),
    "dray_model_config_load": (_CODE, [c.c_char_p, _P]),
    "dray_engine_parameter": (_CODE, [_P, _P, c.c_char_p, _P, _P, _P]),
    "dray_layout_full": (_CODE, [_P, c.c_int, c.c_int, _OUT]),
    "dray_layout_engine": (_CODE, [_P, _P, _OUT]),
    "dray_layout_add_module": (_CODE, [_P, _P, c.c_char_p, c.c_int, c.c_uint32, c.c_uint64, _P, _P,
                                       _P]),
    "dray_layout_tensor_count": (c.c_uint32, [_P]),
    "dray_layout_tensor": (c.c_void_p, [_P, c.c_uint32]),
    "dray_layout_block_count": (c.c_uint32, [_P]),
    "dray_layout_block": (c.c_void_p, [_P, c.c_uint32]),
    "dray_region_alloc": (_CODE, [c.c_int, c.c_uint64, c.c_char_p, _OUT]),
    "dray_region_wrap": (_CODE, [_P, c.c_uint64, c.c_char_p, _OUT]),
    "dray_region_wrap_cuda": (_CODE, [c.c_uint64, c.c_uint64, c.c_char_p, _OUT]),
    "dray_region_import": (_CODE, [_P, c.c_int, c.c_int, _OUT]),
    "dray_region_free": (None, [_P]),
    "dray_region_bytes": (c.c_uint64, [_P]),
    "dray_region_base": (c.c_void_p, [_P]),
    "dray_region_device_address": (c.c_uint64, [_P]),
    "dray_region_fd": (c.c_int, [_P]),
    "dray_region_check": (_CODE, [_P]),
    "dray_region_withdrawn": (None, [_P]),
    "dray_layout_new": (_CODE, [_OUT]),
    "dray_layout_free": (None, [_P]),
    "dray_layout_add_region": (_CODE, [_P, _P, _P]),
    "dray_layout_add_tensor": (_CODE, [_P, c.c_char_p, c.c_int, c.c_uint32, _P, _P]),
    "dray_layout_add_block": (_CODE, [_P, _P]),
    "dray_layout_add_dense": (_CODE, [_P, c.c_uint32, c.c_uint32, _P, _P, c.c_uint64]),
    "dray_layout_add_range": (_CODE, [_P, c.c_uint32, c.c_uint32, c.c_uint64, c.c_int64, c.c_int64]),
    "dray_layout_add_dtensor": (_CODE, [_P, c.c_uint32, c.c_uint32, c.c_uint64, _P, _P, _P]),
    "dray_layout_prove": (_CODE, [_P, _P, c.c_char_p, _P, _P]),
    "dray_layout_find": (_CODE, [_P, c.c_char_p, _P]),
    "dray_layout_pack": (_CODE, [_P, _OUT, c.POINTER(c.c_size_t)]),
    "dray_free": (None, [_P]),
    "dray_checkpoint_save": (_CODE, [_P, c.c_char_p, _P, _P, _P]),
    "dray_checkpoint_read": (_CODE, [c.c_char_p, _P, _P]),
    "dray_checkpoint_latest": (_CODE, [c.c_char_p, _P, _OUT]),
    "dray_publisher_open": (_CODE, [_P, c.c_char_p, _P, _P, _OUT]),
    "dray_publisher_publish": (_CODE, [_P, c.c_uint64, _P]),
    "dray_publisher_deliver": (_CODE, [_P, c.c_uint64, _P, c.c_uint32, c.c_int64]),
    "dray_publisher_wait": (_CODE, [_P, c.c_uint64, c.c_int64, _P]),
    "dray_publisher_move": (_CODE, [_P, _P]),
    "dray_publisher_relay": (_CODE, [_P, _P, _P]),
    "dray_publisher_release": (_CODE, [_P, c.c_int64, _P, c.c_uint32, _P]),
    "dray_publisher_close": (None, [_P]),
    "dray_subscriber_open": (_CODE, [_P, c.c_char_p, _P, _P, _OUT]),
    "dray_subscriber_close": (None, [_P]),
    "dray_subscriber_fd": (c.c_int, [_P]),
    "dray_subscriber_attend": (_CODE, [_P]),
    "dray_subscriber_verify": (_CODE, [_P]),
    "dray_subscriber_version": (_CODE, [_P, _P, _P, _P]),
    "dray_subscriber_leave": (_CODE, [_P, c.c_int64, _P]),
    "dray_subscriber_note_step": (_CODE, [_P, c.c_int64]),
    "dray_prefetch_weights": (_CODE, [_P, _P, _P]),
    "dray_prefetch_start": (_CODE, [_P, _P]),
    "dray_prefetch_drop": (_CODE, [_P]),
    "dray_commit_weights": (_CODE, [_P, _P, _P]),
    "dray_update_weights": (_CODE, [_P, _P, _P]),
    "dray_update_start": (_CODE, [_P, _P]),
    "dray_update_poll": (_CODE, [_P]),
    "dray_update_finish": (_CODE, [_P, _P]),
    "dray_update_report_json": (_CODE, [_P, _P, c.c_size_t]),
    "dray_loader_open": (_CODE, [_P, c.POINTER(LoaderOptions), _OUT]),
    "dray_loader_close": (None, [_P]),
    "dray_loader_next": (_CODE, [_P, c.c_int64, c.POINTER(Load)]),
    "dray_loader_done": (_CODE, [_P, c.POINTER(Load)]),
    "dray_loader_fail": (_CODE, [_P, c.POINTER(Load), c.c_char_p]),
    "dray_loader_flush": (_CODE, [_P]),
    "dray_loader_hold": (_CODE, [_P, c.POINTER(Load)]),
    "dray_loader_unhold": (None, [_P, _P]),
    "dray_loader_count": (_CODE, [_P, c.POINTER(Counts)]),
}
_library = None


def library_path():
    """$DRAY_LIBRARY; else that of the source folder, or of the prefix where this package is
    installed; else the system's."""
    given = os.environ.get("DRAY_LIBRARY")
    if given:
        return given
    folders = pathlib.Path(__file__).resolve().parents[1:6]
    built = folders[1] / "include/dray/dray.h", folders[1] / "build/release/libdray.so.0"
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
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype = c.c_int if result is _CODE else result
            function.argtypes = arguments + ([_E] if result is _CODE else [])
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


_attending, _asks, _watched = None, None, False
os.register_at_fork(after_in_child=_unwatch)


def _within_handler(function, *arguments):
    """A handler of a signal calls the library while that asks for it: nobody is asked meanwhile."""
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
    raise (DrayTimeout if code == TIMEDOUT else DrayError)(code, message)


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


def check_word(what, word, known):
    if word not in known:
        raise ValueError(f"{what}: one of {', '.join(known)} expected, found {word!r}")


def version() -> str:
    """The library's."""
    return library().dray_version().decode()
