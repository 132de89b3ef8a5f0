"""MaruHandler: values under keys of the caller's choice, in shared memory.

A value is written in place (:meth:`MaruHandler.alloc`, fill, :meth:`MaruHandler.store`)
and read in place (:meth:`MaruHandler.retrieve`) by any process of the same pool.
What is stored never changes. A fault of the store (the server is away, a lost copy)
is a miss, a False and one log line; a wrong argument is an exception.

Concurrency: every method may be called by any thread at any time; none holds the
GIL while it waits. ``_state`` guards connect and close. Fork: a handler cannot be
used in a child process.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_uint32
from types import TracebackType
from typing import Any

from . import _lib
from ._regions import RegionCallback, Regions
from .api import Client, ClientConfig, Mode, Runs, Verdict
from .config import MaruConfig
from .errors import ClosedError, Code, ForkedError, MaruError
from .keys import KEY_BYTES, KeyLike, opaque_key, opaque_text
from .memory import AllocHandle, DaxMapper, MaruHandle, MemoryInfo, OwnedRegionManager, PagedMemoryAllocator

__all__ = ["MaruHandler"]

logger = logging.getLogger("maru")

# A fault that lasts is said once in this time for each operation.
_LOG_INTERVAL_S = 10.0

# How long delete waits for releases that are on their way.
_RELEASE_WAITS_S = (0.001, 0.005, 0.02)

_HIT = int(Verdict.HIT)  # comparing with an enum costs more than the key's probe

_EMPTY_VALUE = "an empty value cannot be stored: a value has 1 byte to chunk_size_bytes"

_NOT_CONNECTED = "Not connected. Call connect() first."


class MaruHandler:
    """One instance of the store in this process. See the module's text."""

    def __init__(self, config: MaruConfig | None = None) -> None:
        self._config = config if config is not None else MaruConfig()
        self._client: Client | None = None
        self._closing = False
        self._state = threading.Lock()
        self._regions = Regions(self._live, self._config.chunk_size_bytes)
        self._said: dict[str, float] = {}

    # --- life ---

    def connect(self) -> bool:
        """Opens a session and gets the first region. Idempotent; False, with the cause
        in the log, when the server or the allocation fails.

        Raises:
            OSError: the library is not there.
            ForkedError: a parent process loaded it.
        """
        with self._state:
            if self._client is not None:
                return True
            c = self._config
            try:
                client = Client(
                    ClientConfig(
                        server_address=c.server_url,
                        instance_id=c.instance_id,
                        opaque=True,
                        page_bytes=c.chunk_size_bytes,
                        region_bytes=c.pool_size,
                        expand_bytes=c.expand_size,
                        auto_expand=c.auto_expand,
                        eager_map=c.eager_map,
                        views=True,
                        rpc_timeout_ms=c.timeout_ms,
                        connect_timeout_ms=c.timeout_ms,
                    )
                )
            except ForkedError:
                raise
            except MaruError as e:
                logger.error("maru: connect to %s failed: %s", c.server_url, e)
                return False
            self._client = client
            self._closing = False
            self._regions.connected(client)
            if not self._regions.get_owned_region_ids():
                logger.error("maru: connect to %s: no region of %d bytes was granted", c.server_url, c.pool_size)
                self._close_locked()
                return False
            return True

    def close(self) -> None:
        """Gives the regions back and ends the session; idempotent. Stored values stay
        readable by others until their keys are gone; memory that is still in use here
        (a view, a tensor) stays mapped to the end of the process."""
        with self._state:
            self._close_locked()

    def _close_locked(self) -> None:
        client = self._client
        if client is None:
            return
        self._closing = True
        try:
            self._regions.closing()
            client.close()
        finally:
            self._client = None
            self._closing = False

    def __enter__(self) -> MaruHandler:
        if self._config.auto_connect and not self.connect():
            raise RuntimeError(f"maru: cannot connect to {self._config.server_url}; the log has the cause")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _live(self) -> Client | None:
        """The client, for what answers None where it cannot be used."""
        return None if self._closing or _lib.forked() else self._client

    def _open(self) -> Client:
        client = self._client
        if _lib.forked() and client is not None:
            raise ForkedError(
                Code.FORKED,
                "maru: this handler was connected before the process was forked and cannot be used in the child; "
                "start workers by spawn or forkserver, or connect after the fork",
            )
        if self._closing:
            raise RuntimeError("Handler is closing")
        if client is None:
            raise RuntimeError(_NOT_CONNECTED)
        return client

    # --- writing ---

    def alloc(self, size: int) -> AllocHandle:
        """Returns one page whose ``buf`` is ``size`` bytes long. It stays the caller's
        until store, free or close.

        Raises:
            RuntimeError: not connected.
            ValueError: ``size`` is over the chunk size, or no page is free.
        """
        client = self._open()
        chunk = self._config.chunk_size_bytes
        if size > chunk:
            raise ValueError(f"Requested size {size} exceeds chunk_size {chunk}")
        if size < 0:
            raise ValueError(f"Requested size {size} is negative")
        page, count = _lib.Page(), c_uint32()
        status = client._lib.maru_alloc(client.handle, 1, ctypes.byref(page), count, 0)
        if status:
            text = _lib.last_error(client._lib)
            if status == Code.CLOSED:
                raise RuntimeError("Handler is closing")
            raise ValueError(f"Cannot allocate page: pool exhausted ({text})")
        return AllocHandle(self._regions.page(client, page.region, page.data, size), page.region, page.index, size)

    def free(self, handle: AllocHandle) -> None:
        """Gives an unstored page back.

        Raises:
            ValueError: a double free, a bad index, or a stored page (delete its key).
            KeyError: the region is not ours.
        """
        client = self._open()
        code = c_int32()
        region, index = c_uint32(handle.region_id), c_uint32(handle.page_index)
        client._check(client._lib.maru_free(client.handle, 1, ctypes.byref(region), ctypes.byref(index), ctypes.byref(code)))
        if code.value:
            self._bad_page(code.value, handle)

    def _bad_page(self, code: int, handle: AllocHandle) -> None:
        if code == Code.NOT_FOUND:
            raise KeyError(f"region {handle.region_id} is not one of this handler's")
        if code == Code.INVALID and handle.size == 0:
            raise ValueError(_EMPTY_VALUE)
        if code == Code.INVALID:
            raise ValueError(
                f"page {handle.page_index} of region {handle.region_id} with {handle.size} bytes is not being written: "
                "freed before, stored (delete its key), out of range, or larger than a chunk"
            )
        raise RuntimeError(f"page {handle.page_index} of region {handle.region_id}: {_name(code)}")

    def store(self, key: KeyLike, handle: AllocHandle | Any = None, *, data: Any = None) -> bool:
        """Publishes a value. ``handle`` is a page from :meth:`alloc`, or any contiguous
        buffer, as ``data`` is: then the value is copied.

        True also when the key was there: the first value stays, and the page is free
        again. False when the store could not be made; the page is free, or in
        quarantine while the outcome is unknown.

        Raises:
            ValueError, TypeError: a bad key or buffer; a page that is not being written.
            KeyError: a page of a region that is not ours.
        """
        client = self._open()
        packed = opaque_key(key)
        if data is not None or not _is_handle(handle):
            if (data is None) == (handle is None):
                raise TypeError("store takes a handle or data, and exactly one of them")
            return self._store_copies(client, packed, [data if data is not None else handle])[0]
        code = self._commit(client, packed, [handle])[0]
        if code in (Code.INVALID, Code.NOT_FOUND):
            self._bad_page(code, handle)
        return self._stored(code)

    def batch_store(self, keys: Sequence[KeyLike], handles: Sequence[AllocHandle | Any]) -> list[bool]:
        """Publishes values in one call; a handle is a page or a buffer to copy, as in
        :meth:`store`. Keys that were there, also twice in one batch, count as True.

        Raises:
            ValueError: different lengths, a bad key.
        """
        client = self._open()
        if len(keys) != len(handles):
            raise ValueError(f"keys and handles must have the same length, got {len(keys)} and {len(handles)}")
        packed = _pack(keys)
        pages = [i for i, h in enumerate(handles) if _is_handle(h)]
        if len(pages) == len(handles):
            return [self._stored(c) for c in self._commit(client, packed, handles)]
        out = [False] * len(handles)
        if pages:
            codes = self._commit(client, _select(packed, pages), [handles[i] for i in pages])
            for i, c in zip(pages, codes):
                out[i] = self._stored(c)
        copies = [i for i, h in enumerate(handles) if not _is_handle(h)]
        for i, ok in zip(copies, self._store_copies(client, _select(packed, copies), [handles[i] for i in copies])):
            out[i] = ok
        return out

    def _commit(self, client: Client, packed: bytes, handles: Sequence[AllocHandle]) -> array[int]:
        n = len(handles)
        codes = array("i", bytes(4 * n))
        if n == 0:
            return codes
        try:
            regions = array("I", [h.region_id for h in handles])
            indices = array("I", [h.page_index for h in handles])
            lengths = array("Q", [h.size for h in handles])
        except (OverflowError, TypeError) as e:
            raise ValueError(f"a handle's region, page and size must be integers that are not negative: {e}") from None
        status = client._lib.maru_commit(
            client.handle,
            n,
            packed,
            None,
            regions.buffer_info()[0],
            indices.buffer_info()[0],
            lengths.buffer_info()[0],
            codes.buffer_info()[0],
            0,
        )
        if status:
            self._failed(client, "store", status)
            return array("i", [status] * n)
        return codes

    def _store_copies(self, client: Client, packed: bytes, buffers: Sequence[Any]) -> list[bool]:
        chunk = self._config.chunk_size_bytes
        try:
            runs = Runs.of(buffers)
        except (TypeError, BufferError) as e:
            raise TypeError(f"a value to copy must be a contiguous buffer or an AllocHandle: {e}") from None
        for n in itertools.islice(runs.runs, 1, None, 2):
            if n == 0:
                raise ValueError(_EMPTY_VALUE)
            if n > chunk:
                raise ValueError(f"Requested size {n} exceeds chunk_size {chunk}")
        try:
            codes = client.store(packed, runs)
        except ClosedError:
            raise RuntimeError("Handler is closing") from None
        except MaruError as e:
            self._say("store", e)
            return [False] * len(buffers)
        self._regions.sync(client)
        return [self._stored(c) for c in codes]

    def _stored(self, code: int) -> bool:
        if code in (Code.OK, Code.ALREADY_STORED):
            return True
        self._say("store", _name(code))
        return False

    # --- reading ---

    def retrieve(self, key: KeyLike) -> MemoryInfo | None:
        """Returns a stored value in place, or None. The value is protected while the
        answer, its view, or anything made of the view lives."""
        return self._retrieve(opaque_key(key), 1)[0]

    def batch_retrieve(self, keys: Sequence[KeyLike]) -> list[MemoryInfo | None]:
        """Returns a value or None for each key, in order, with one call."""
        return self._retrieve(_pack(keys), len(keys))

    def _retrieve(self, packed: bytes, n: int) -> list[MemoryInfo | None]:
        client = self._open()
        try:
            rows = client.retrieve(packed, n)
        except ClosedError:
            raise RuntimeError("Handler is closing") from None
        except MaruError as e:
            self._say("retrieve", e)
            return [None] * n
        return [None if r is None else MemoryInfo(*r) for r in rows]

    def exists(self, key: KeyLike) -> bool:
        """Whether a value can be read here now."""
        return self._exists(opaque_key(key), 1)[0]

    def batch_exists(self, keys: Sequence[KeyLike]) -> list[bool]:
        """Whether each value can be read here now; no stop at the first miss."""
        return self._exists(_pack(keys), len(keys))

    def _exists(self, packed: bytes, n: int) -> list[bool]:
        client = self._open()
        try:
            _, verdicts = client.probe(packed)
        except ClosedError:
            raise RuntimeError("Handler is closing") from None
        except MaruError as e:
            self._say("exists", e)
            return [False] * n
        return [v & 3 == _HIT for v in verdicts]

    # --- pins and deletion ---

    def pin(self, key: KeyLike) -> bool:
        """Protects a value until unpin, and says whether it is there: one step. Pins
        count up."""
        return self._pin(opaque_key(key), 1)[0]

    def batch_pin(self, keys: Sequence[KeyLike]) -> list[bool]:
        """Pins up to the first miss; everything behind it is False, present or not."""
        return self._pin(_pack(keys), len(keys))

    def _pin(self, packed: bytes, n: int) -> list[bool]:
        return self._codes("pin", n, lambda c: c.pin(packed, Mode.PREFIX))

    def unpin(self, key: KeyLike) -> bool:
        """Takes one pin back; False when this handler has none on the key."""
        return self.batch_unpin([key])[0]

    def batch_unpin(self, keys: Sequence[KeyLike]) -> list[bool]:
        """Takes one pin of each key back; no stop at the first False."""
        packed = _pack(keys)
        return self._codes("unpin", len(keys), lambda c: c.unpin(packed))

    def _codes(self, op: str, n: int, call: Callable[[Client], array[int]]) -> list[bool]:
        client = self._open()
        try:
            return [c == 0 for c in call(client)]
        except ClosedError:
            raise RuntimeError("Handler is closing") from None
        except MaruError as e:
            self._say(op, e)
            return [False] * n

    def delete(self, key: KeyLike) -> bool:
        """Removes a key, whoever stored it. False when it is absent, pinned or viewed
        by anybody, or when the server did not finish in time: then it stays hidden."""
        client, packed = self._open(), opaque_key(key)
        try:
            code = client.delete(packed)[0]
            for wait_s in _RELEASE_WAITS_S:
                if code != Code.PINNED:
                    break
                # A view that was dropped a moment ago is released in the background.
                time.sleep(wait_s)
                code = client.delete(packed)[0]
        except ClosedError:
            raise RuntimeError("Handler is closing") from None
        except MaruError as e:
            self._say("delete", e)
            return False
        if code not in (Code.OK, Code.NOT_FOUND, Code.PINNED):
            self._say("delete", f"{_name(code)}; the key stays hidden until the server ends")
        return bool(code == Code.OK)

    # --- regions ---

    def get_buffer_view(self, region_id: int, offset: int, size: int) -> memoryview | None:
        """Returns bytes of a mapped region: writable for own regions, read-only for
        others; None when it is not mapped or the range is outside."""
        return self._regions.get_buffer_view(region_id, offset, size)

    def get_region_page_count(self, region_id: int) -> int | None:
        """Pages of a region that is owned or mapped, else None."""
        return self._regions.get_region_page_count(region_id)

    def get_owned_region_ids(self) -> list[int]:
        """Own regions, oldest first; [] when not connected."""
        return self._regions.get_owned_region_ids() if self._client is not None else []

    def get_chunk_size(self) -> int:
        """The page size: the largest value."""
        return self._config.chunk_size_bytes

    def set_on_region_added(self, callback: RegionCallback | None) -> None:
        """Has ``callback(region_id, page_count)`` called for each own region: at once for
        those that exist, then in the thread whose allocation made a new one."""
        self._regions.set_on_region_added(callback)

    # --- health and counts ---

    def healthcheck(self) -> bool:
        """One round trip to the server. Never raises."""
        client = self._live()
        if client is None:
            return False
        try:
            client.ping()
        except MaruError:
            return False
        return True

    def get_stats(self) -> dict[str, Any]:
        """Counts of the server and of this handler; what the server does not answer is
        zero."""
        client = self._open()
        regions = OwnedRegionManager(self._regions).get_stats()
        out: dict[str, Any] = {
            "kv_manager": {"total_entries": 0, "total_size": 0},
            "allocation_manager": {"num_allocations": 0, "total_allocated": 0, "active_clients": 0},
            "stats_manager": {},
            "store_regions": regions,
            "client": client.stats(),
        }
        if regions["regions"]:
            out["allocator"] = regions["regions"][0]
        try:
            usage = client.usage()
        except MaruError as e:
            self._say("get_stats", e)
            return out
        pools = (usage.get("l1_storage") or {}).get("pools", [])
        sessions = usage.get("sessions", [])
        out["kv_manager"] = {
            "total_entries": int(usage.get("objects", 0)),
            "total_size": sum(int(p["ready_bytes"]) for p in pools),
        }
        out["allocation_manager"] = {
            "num_allocations": sum(int(s["regions"]) for s in sessions),
            "total_allocated": sum(int(p["granted_bytes"]) for p in pools),
            "active_clients": sum(1 for s in sessions if s.get("state") == "live"),
        }
        out["stats_manager"] = {k: int(v) for k, v in usage.get("counters", {}).items()}
        return out

    # --- properties ---

    @property
    def connected(self) -> bool:
        """Whether connect has succeeded and close was not called."""
        return self._client is not None and not self._closing

    @property
    def instance_id(self) -> str:
        """The name of this instance in logs and usage."""
        return self._config.instance_id or ""

    @property
    def pool_handle(self) -> MaruHandle | None:
        """The first region, or None when not connected."""
        client, region = self._client, self._first()
        if client is None or region is None:
            return None
        return MaruHandle(region, 0, self._regions.size(client, region), (client.handle & 0xFFFFFFFF) << 32 | region)

    @property
    def allocator(self) -> PagedMemoryAllocator | None:
        """Counts of the first region, or None when not connected."""
        region = self._first()
        return None if region is None else PagedMemoryAllocator(self._regions, region, self._config.chunk_size_bytes)

    @property
    def owned_region_manager(self) -> OwnedRegionManager | None:
        """The own regions, or None when not connected."""
        return None if self._client is None else OwnedRegionManager(self._regions)

    @property
    def mapper(self) -> DaxMapper:
        """Deprecated: call the handler's own get_buffer_view."""
        return DaxMapper(self._regions)

    @property
    def _mapper(self) -> DaxMapper:
        return self.mapper

    def _first(self) -> int | None:
        return next(iter(self.get_owned_region_ids()), None)

    # --- faults ---

    def _failed(self, client: Client, op: str, status: int) -> None:
        if status == Code.CLOSED:
            raise RuntimeError("Handler is closing")
        self._say(op, _lib.last_error(client._lib))

    def _say(self, op: str, cause: object) -> None:
        now = time.monotonic()
        if now - self._said.get(op, -_LOG_INTERVAL_S) >= _LOG_INTERVAL_S:
            self._said[op] = now
            logger.warning("maru: %s: %s (said once in %.0f s)", op, cause, _LOG_INTERVAL_S)


def _is_handle(value: object) -> bool:
    return isinstance(value, AllocHandle) or hasattr(value, "page_index")


def _name(code: int) -> str:
    try:
        return Code(code).name.lower()
    except ValueError:
        return f"code {code}"


def _select(packed: bytes, rows: Sequence[int]) -> bytes:
    return b"".join([packed[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in rows])


def _pack(keys: Sequence[KeyLike]) -> bytes:
    """Packs a batch: the library hashes them, in one call."""
    n = len(keys)
    if n < 4:
        return b"".join([opaque_key(k) for k in keys])
    if isinstance(keys, (str, bytes)):
        raise TypeError("keys must be a list of keys, not one key")
    if set(map(type, keys)) == {str}:
        try:
            raws = [k.encode() for k in keys]  # type: ignore[union-attr]
        except UnicodeEncodeError:
            raws = [opaque_text(k)[0] for k in keys]  # raises, and says which
        tags = b"s" * n
    else:
        pairs = [opaque_text(k) for k in keys]
        raws, tags = [p[0] for p in pairs], bytes([p[1] for p in pairs])
    ends = array("Q", itertools.accumulate(map(len, raws)))
    lib = _lib.load()
    out = ctypes.create_string_buffer(n * KEY_BYTES)
    _lib.check(lib, lib.maru_opaque_keys(n, b"".join(raws), ends.buffer_info()[0], tags, out))
    return out.raw
