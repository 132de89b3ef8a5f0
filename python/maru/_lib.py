"""The shared library: found, loaded and declared once, at the first open.

Nothing here runs at import. Loading starts the Go runtime and its threads, which
do not survive a fork; a child of a process that has loaded it gets ForkedError
from every call (the library's own guard) and from :func:`load`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Union

from .errors import Code, ForkedError, MaruError, error_of

__all__ = ["ABI_VERSION", "Batch", "Layer", "Page", "Run", "View", "address", "check", "forked", "load", "read_text"]

ABI_VERSION = 1

# What batches take: bytes are passed as they are, anything else by its address.
Buffer = Union[bytes, bytearray, memoryview, "array[int]"]


class Page(ctypes.Structure):
    """maru_page."""

    _fields_ = (("data", c_void_p), ("bytes", c_uint64), ("region", c_uint32), ("index", c_uint32))


class View(ctypes.Structure):
    """maru_view."""

    _fields_ = (
        ("id", c_uint64),
        ("data", c_void_p),
        ("bytes", c_uint64),
        ("region", c_uint32),
        ("index", c_uint32),
    )


class Run(ctypes.Structure):
    """maru_run."""

    _fields_ = (("data", c_void_p), ("bytes", c_uint64))


class Layer(ctypes.Structure):
    """maru_layer."""

    _fields_ = (
        ("base", c_void_p),
        ("block_stride_bytes", c_int64),
        ("run_bytes", c_uint64),
        ("run_count", c_uint32),
        ("reserved", c_uint32),
    )


class Batch(ctypes.Structure):
    """maru_batch."""

    _fields_ = (
        ("struct_bytes", c_uint32),
        ("count", c_uint32),
        ("keys", c_void_p),
        ("parents", c_void_p),
        ("ends", c_void_p),
        ("runs", c_void_p),
        ("layout", c_uint64),
        ("blocks", c_void_p),
        ("offsets", c_void_p),
        ("stream", c_uint64),
    )


_U64P, _U32P, _I32P = POINTER(c_uint64), POINTER(c_uint32), POINTER(c_int32)
_SIZEP = POINTER(c_size_t)

# name -> (result, arguments), in the order of include/maru.h. Arrays are void
# pointers, so that bytes and addresses both pass without a conversion.
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "maru_abi_version": (c_uint32, ()),
    "maru_version_string": (c_char_p, ()),
    "maru_last_error": (c_int32, (c_void_p, c_size_t, _SIZEP)),
    "maru_opaque_keys": (c_int32, (c_uint64, c_void_p, c_void_p, c_void_p, c_void_p)),
    "maru_namespace": (c_int32, (c_void_p, c_size_t, c_void_p, c_size_t, _SIZEP)),
    "maru_root": (c_int32, (c_void_p, c_void_p, c_size_t, c_void_p)),
    "maru_chain_keys": (
        c_int32,
        (
            c_void_p,
            c_uint64,
            c_uint64,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_uint16,
            c_uint16,
            c_void_p,
            c_void_p,
            c_void_p,
        ),
    ),
    "maru_open": (c_int32, (c_void_p, c_size_t, _U64P)),
    "maru_close": (c_int32, (c_uint64, c_int64)),
    "maru_client_info": (c_int32, (c_uint64, c_void_p, c_size_t, _SIZEP)),
    "maru_stats": (c_int32, (c_uint64, c_void_p, c_size_t, _SIZEP)),
    "maru_usage": (c_int32, (c_uint64, c_void_p, c_size_t, _SIZEP, c_int64)),
    "maru_ping": (c_int32, (c_uint64, c_int64)),
    "maru_wait_log": (c_int32, (c_uint64, c_int64, c_void_p, c_size_t, _SIZEP)),
    "maru_probe": (
        c_int32,
        (
            c_uint64,
            c_uint64,
            c_void_p,
            c_uint32,
            c_uint32,
            c_void_p,
            c_uint64,
            c_void_p,
            _U64P,
            c_int64,
        ),
    ),
    "maru_requests": (c_int32, (c_uint64, c_uint32, c_uint64, c_void_p, c_int64)),
    "maru_targets": (c_int32, (c_uint64, c_uint32, c_void_p, _U32P, c_int64)),
    "maru_submit_lookup": (
        c_int32,
        (c_uint64, c_uint64, c_void_p, c_uint32, c_uint32, c_uint64, c_int64, _U64P),
    ),
    "maru_submit_requests": (c_int32, (c_uint64, c_uint32, c_uint64, c_void_p)),
    "maru_delete": (c_int32, (c_uint64, c_uint64, c_void_p, c_void_p, c_int64)),
    "maru_alloc": (c_int32, (c_uint64, c_uint32, c_void_p, _U32P, c_int64)),
    "maru_free": (c_int32, (c_uint64, c_uint64, c_void_p, c_void_p, c_void_p)),
    "maru_commit": (
        c_int32,
        (
            c_uint64,
            c_uint64,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_int64,
        ),
    ),
    "maru_retrieve": (c_int32, (c_uint64, c_uint64, c_void_p, c_uint32, c_void_p, c_int64)),
    "maru_release_views": (c_int32, (c_uint64, c_uint64, c_void_p)),
    "maru_pin": (c_int32, (c_uint64, c_uint64, c_void_p, c_uint32, c_void_p, c_int64)),
    "maru_unpin": (c_int32, (c_uint64, c_uint64, c_void_p, c_void_p, c_int64)),
    "maru_region_view": (c_int32, (c_uint64, c_uint32, c_uint64, c_uint64, POINTER(c_void_p), _I32P)),
    "maru_release_region_view": (c_int32, (c_uint64, c_uint32)),
    "maru_region_page_count": (c_int32, (c_uint64, c_uint32, _U64P)),
    "maru_region_page_bytes": (c_int32, (c_uint64, c_uint32, _U64P)),
    "maru_region_free_count": (c_int32, (c_uint64, c_uint32, _U64P)),
    "maru_owned_regions": (c_int32, (c_uint64, c_uint32, c_void_p, _U32P)),
    "maru_next_region": (c_int32, (c_uint64, _U64P, _U32P, _U64P)),
    "maru_register_layout": (
        c_int32,
        (c_uint64, c_uint32, c_void_p, c_void_p, c_uint64, c_uint32, _U64P),
    ),
    "maru_register_device_layout": (
        c_int32,
        (c_uint64, c_uint32, c_uint32, c_void_p, c_void_p, c_uint64, c_uint32, _U64P),
    ),
    "maru_device_info": (c_int32, (c_uint64, c_void_p, c_size_t, POINTER(c_size_t))),
    "maru_unregister_layout": (c_int32, (c_uint64, c_uint64)),
    "maru_store": (c_int32, (c_uint64, c_void_p, c_void_p, c_int64)),
    "maru_load": (c_int32, (c_uint64, c_void_p, c_void_p, c_int64)),
    "maru_submit_store": (c_int32, (c_uint64, c_void_p, _U64P)),
    "maru_submit_load": (c_int32, (c_uint64, c_void_p, _U64P)),
    "maru_event_fd": (c_int32, (c_uint64, _I32P)),
    "maru_completed": (c_int32, (c_uint64, c_uint32, c_void_p, _U32P)),
    "maru_job_copied": (c_int32, (c_uint64, c_uint64)),
    "maru_job_result": (c_int32, (c_uint64, c_uint64, c_uint32, c_void_p)),
}

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_forked = False


def _after_fork() -> None:
    # Runs in the child, where only this thread is left. A lock that another
    # thread held in the parent would never be given back.
    global _forked, _lock
    _forked = True
    _lock = threading.Lock()


def forked() -> bool:
    """Reports whether a parent process loaded the library before this one began."""
    return _forked


def library_path() -> Path:
    """Returns the library to load: MARU_LIBRARY, or the one in the package.

    Raises:
        OSError: it is not there.
    """
    named = os.environ.get("MARU_LIBRARY")
    path = Path(named) if named else Path(__file__).parent / "lib" / "libmaru.so"
    if not path.is_file():
        origin = "named by MARU_LIBRARY" if named else "of the package"
        raise OSError(
            f"maru: the library {origin} is not there: {path}. "
            "Install the wheel, run 'make build' in the source tree, or set MARU_LIBRARY to libmaru.so"
        )
    return path


def load() -> ctypes.CDLL:
    """Returns the library, loaded at the first call.

    Raises:
        ForkedError: a parent process loaded it.
        OSError: it is not there or cannot be loaded.
        MaruError: it has another ABI version.
    """
    global _library
    if _forked:
        raise ForkedError(
            Code.FORKED,
            "maru: the library was loaded before this process was forked, and its runtime does not survive a fork; "
            "start worker processes by spawn or forkserver, or open the client after the fork",
        )
    if _library is not None:
        return _library
    with _lock:
        if _library is None:
            path = library_path()
            lib = ctypes.CDLL(str(path))
            lib.maru_abi_version.restype = c_uint32
            version = lib.maru_abi_version()
            if version != ABI_VERSION:
                raise MaruError(
                    Code.MISMATCH,
                    f"maru: {path} has ABI version {version}, this package needs {ABI_VERSION}; install them together",
                )
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(lib, name, None)
                if function is None:
                    raise MaruError(
                        Code.MISMATCH, f"maru: {path} is older than this package, it has no {name}; install them together"
                    )
                function.restype, function.argtypes = result, arguments
            os.register_at_fork(after_in_child=_after_fork)
            _library = lib
        return _library


def last_error(lib: ctypes.CDLL) -> str:
    """Returns the text of the last failed call of this thread."""
    needed = c_size_t()
    buf = ctypes.create_string_buffer(1024)
    if lib.maru_last_error(buf, len(buf), needed) == Code.LIMIT:
        buf = ctypes.create_string_buffer(needed.value + 1)
        lib.maru_last_error(buf, len(buf), needed)
    return buf.value.decode("utf-8", "replace")


def check(lib: ctypes.CDLL, status: int) -> None:
    """Raises the exception of a status that is not OK."""
    if status:
        raise error_of(status, last_error(lib))


def read_text(lib: ctypes.CDLL, function: Any, *arguments: Any, after: tuple[Any, ...] = ()) -> bytes:
    """Calls a function that writes text into a buffer, with as large a one as it
    needs. ``after`` are its arguments behind the buffer's."""
    needed, cap = c_size_t(), 4096
    while True:
        buf = ctypes.create_string_buffer(cap)
        status = function(*arguments, buf, cap, needed, *after)
        if status == Code.LIMIT and needed.value >= cap:
            cap = needed.value + 1024  # it may grow between two calls
            continue
        check(lib, status)
        return buf.raw[: needed.value]


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", c_char_p),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("suboffsets", c_void_p),
        ("internal", c_void_p),
    )


class Pinned:
    """Holds the memory of any contiguous buffer, read-only ones too, at its address
    for as long as this object lives.

    Raises:
        TypeError: no buffer. BufferError: not contiguous, or not writable although
        that is asked for.
    """

    __slots__ = ("_view", "address", "bytes")

    def __init__(self, buffer: Any, writable: bool = False) -> None:
        self._view: _PyBuffer | None = None
        view = _PyBuffer()
        flags = 1 if writable else 0  # PyBUF_WRITABLE, PyBUF_SIMPLE
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(view), flags)
        self._view = view
        self.address: int = view.buf or 0
        self.bytes: int = view.len

    def __del__(self) -> None:
        view, self._view = getattr(self, "_view", None), None
        if view is not None and ctypes is not None:
            ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))


def address(buffer: Buffer | None) -> Any:
    """Returns what a pointer argument takes for a buffer. The caller keeps the
    buffer alive, and does not resize it, until the call has returned."""
    if buffer is None or isinstance(buffer, bytes):
        return buffer
    if isinstance(buffer, array):
        return buffer.buffer_info()[0]
    pinned = Pinned(buffer)
    # The pin goes before the call is made; the memory stays where it is because
    # the caller has the buffer.
    return pinned.address
