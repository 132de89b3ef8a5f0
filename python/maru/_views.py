"""Memoryviews of stored objects, each the owner of a view lease."""

from __future__ import annotations

import ctypes
import struct
from array import array
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

__all__ = ["VIEW", "Leases", "owner_type_of", "release_now", "release_views", "waiting"]

# maru_view: id, data, bytes, region, index.
VIEW = struct.Struct("<QQQII")
# Views released with one call.
_RELEASE_COUNT = 4096


class Leases:
    """Objects under view leases, as a context manager.

    ``views[i]`` is a read-only memoryview of object i, None for a miss. Leaving the
    context ends the leases: the views must not be used any more, and those that are
    still exported (a slice, a tensor) keep their own lease until they are gone.
    """

    def __init__(self, views: list[memoryview | None]) -> None:
        self.views = views

    def __enter__(self) -> Leases:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        """Ends every lease that is not exported."""
        for view in self.views:
            if view is not None:
                try:
                    view.release()
                except BufferError:
                    # Somebody made a tensor of it: the lease ends with that.
                    continue
        self.views = []


class _Lease:
    """Ends a view lease when the last reference to it is gone. It is the owner
    behind every memoryview that leaves the client, so slices, casts and tensors
    keep it as well."""

    # Made into a subclass of a ctypes array per object size by owner_type_of.
    __slots__ = ()
    _release: tuple[SimpleQueue[int], int]

    def __del__(self) -> None:
        # It runs in whatever thread and at whatever place: it takes no lock of ours,
        # and SimpleQueue.put may be interrupted by itself. One of the client's
        # threads collects the ids of a burst and makes one call for them.
        queue, view_id = self._release
        queue.put(view_id)


_owner_types: dict[int, Any] = {}


def owner_type_of(size: int) -> Any:
    # Few sizes occur (the page of a namespace); the bound is against a process
    # that opens clients of ever new ones.
    t = _owner_types.get(size)
    if t is None:
        if len(_owner_types) > 256:
            _owner_types.clear()
        t = type("_Owner", (_Lease, ctypes.c_ubyte * size), {"__slots__": ("_release",)})
        _owner_types[size] = t
    return t


def waiting(queue: SimpleQueue[int]) -> list[int]:
    out: list[int] = []
    try:
        while len(out) < _RELEASE_COUNT:
            out.append(queue.get_nowait())
    except Empty:
        pass
    return out


def release_now(lib: ctypes.CDLL, handle: int, ids: list[int]) -> None:
    packed = array("Q", filter(None, ids))  # 0 ends the thread and is no view
    if packed:
        # Of a closed client they are gone already.
        lib.maru_release_views(handle, len(packed), packed.buffer_info()[0])


def release_views(lib: ctypes.CDLL, handle: int, queue: SimpleQueue[int]) -> None:
    while True:
        ids = [queue.get(), *waiting(queue)]
        release_now(lib, handle, ids)
        if 0 in ids:
            return
