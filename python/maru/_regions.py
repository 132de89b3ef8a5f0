"""Regions of a handler: its own, in the order they were granted, and views of any that is mapped here."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import c_int32, c_uint32, c_uint64, c_void_p
from typing import Any

from . import _lib
from .api import Client
from .errors import Code

__all__ = ["RegionCallback", "Regions"]

RegionCallback = Callable[[int, int], None]


class _RegionLease:
    """Owner behind the memoryviews of a region: the mapping stays, also beyond
    close(), until nothing made of them is left."""

    _client: Client
    _region: int

    def __del__(self) -> None:
        try:
            self._client._lib.maru_release_region_view(self._client.handle, self._region)
        except (AttributeError, TypeError):
            # The interpreter is ending, and the process with it.
            return


class Regions:
    """What a handler knows of regions, from one connect to the next.

    live: the handler's client, None while there is none that may be used. Concurrency:
    safe; the callback of :meth:`set_on_region_added` runs under a lock that nothing it
    needs takes.
    """

    def __init__(self, live: Callable[[], Client | None], chunk_bytes: int) -> None:
        self._live = live
        self._chunk_bytes = chunk_bytes
        self._lock = threading.RLock()
        self._on_added: RegionCallback | None = None
        # Own regions: (address, whole region as a writable memoryview).
        self._views: dict[int, tuple[int, memoryview]] = {}
        self._page_counts: dict[int, int] = {}
        self._cursor = c_uint64()

    def connected(self, client: Client) -> None:
        """Begins with the regions of a new client."""
        self._cursor, self._page_counts = c_uint64(), {}
        self.sync(client)

    def closing(self) -> None:
        """Drops the views: what a caller has keeps its own reference."""
        self._views.clear()

    def sync(self, client: Client) -> None:
        """Takes in the regions that were granted since the last call."""
        region, pages = c_uint32(), c_uint64()
        with self._lock:
            while (
                client._lib.maru_next_region(client.handle, ctypes.byref(self._cursor), ctypes.byref(region), ctypes.byref(pages))
                == Code.OK
            ):
                self._page_counts[region.value] = pages.value
                if self._on_added is not None:
                    self._on_added(region.value, pages.value)

    def set_on_region_added(self, callback: RegionCallback | None) -> None:
        """See MaruHandler."""
        with self._lock:
            self._on_added = callback
            if callback is not None:
                for region, count in list(self._page_counts.items()):
                    callback(region, count)

    def page(self, client: Client, region: int, address: int, size: int) -> memoryview:
        """The writable bytes of a page that the client has just given out."""
        known = self._views.get(region)
        if known is None:
            self.sync(client)
            known = self._own_view(client, region)
        begin, whole = known
        start = address - begin
        return whole[start : start + size]

    def get_buffer_view(self, region_id: int, offset: int, size: int) -> memoryview | None:
        """See MaruHandler."""
        client = self._live()
        if client is None or offset < 0 or size < 0:
            return None
        known = self._views.get(region_id)
        if known is None:
            if region_id not in self._page_counts:
                return _map(client, region_id, offset, size)
            known = self._own_view(client, region_id)
        if offset + size > len(known[1]):
            return None
        return known[1][offset : offset + size]

    def _own_view(self, client: Client, region: int) -> tuple[int, memoryview]:
        length = self.size(client, region)
        view = _map(client, region, 0, length)
        if view is None:
            raise RuntimeError(f"maru: own region {region} of {length} bytes is not mapped: {_lib.last_error(client._lib)}")
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
        # Of two threads that map it at once, one view is kept and the other goes.
        return self._views.setdefault(region, (address, view))

    def size(self, client: Client, region: int) -> int:
        """Bytes of an own region."""
        # A pool without hardware coherence rounds pages up.
        size = c_uint64()
        status = client._lib.maru_region_page_bytes(client.handle, region, size)
        return self._page_counts[region] * (self._chunk_bytes if status else size.value)

    def get_region_page_count(self, region_id: int) -> int | None:
        """See MaruHandler."""
        known = self._page_counts.get(region_id)
        if known is not None:
            return known
        client = self._live()
        if client is None:
            return None
        count = c_uint64()
        try:
            status = client._lib.maru_region_page_count(client.handle, region_id, count)
        except ctypes.ArgumentError:
            return None
        return None if status else count.value

    def get_region_free_count(self, region_id: int) -> int:
        """Pages of an own region that can be allocated now; 0 for others."""
        client = self._live()
        if client is None:
            return 0
        count = c_uint64()
        status = client._lib.maru_region_free_count(client.handle, region_id, count)
        return 0 if status else count.value

    def get_owned_region_ids(self) -> list[int]:
        """Own regions, oldest first."""
        return list(self._page_counts)

    def get_chunk_size(self) -> int:
        """The page size that was asked for: the largest value."""
        return self._chunk_bytes


def _map(client: Client, region: int, offset: int, size: int) -> memoryview | None:
    data, writable = c_void_p(), c_int32()
    try:
        status = client._lib.maru_region_view(client.handle, region, offset, size, data, writable)
    except (ctypes.ArgumentError, OverflowError):
        return None
    if status:
        return None
    owner_type: Any = type("_RegionOwner", (_RegionLease, ctypes.c_ubyte * size), {})
    owner = owner_type.from_address(data.value) if size else owner_type()
    owner._client, owner._region = client, region
    view = memoryview(owner).cast("B")
    return view if writable.value else view.toreadonly()
