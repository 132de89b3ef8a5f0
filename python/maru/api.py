"""The typed API: one client of the store, batches of packed keys, transfers.

This is what engine adapters are built on. A batch is one call of the library, one
round trip at most, and no Python object a key: keys are packed (32 bytes each,
:mod:`maru.keys`), verdicts one byte each, codes one ``int`` each in an ``array``.
Every call releases the GIL.

Faults of the store are answers, not exceptions: a miss, a code of an item. An
exception says that the call was not made (:mod:`maru.errors`).

Concurrency: a Client may be used by any thread. Fork: not in a child of the
process that opened it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import json
import logging
import threading
from array import array
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_size_t, c_uint32, c_uint64
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from . import _lib
from ._lib import Buffer
from ._transfer import Blocks, Device, Layer, Memory, Runs, batch_of, codes_of, count_of, ordinal_of
from ._views import VIEW, Leases, owner_type_of, release_now, release_views, waiting
from .errors import Code, InvalidError, NotFoundError, error_of
from .keys import KEY_BYTES, OPAQUE_NAMESPACE, Chain, Namespace

__all__ = [
    "LOOKUP_AWAY",
    "Blocks",
    "Chain",
    "Client",
    "ClientConfig",
    "Code",
    "Layer",
    "Leases",
    "Mode",
    "Namespace",
    "Runs",
    "Verdict",
]

logger = logging.getLogger("maru")


# A code of a lookup that had no answer (Client.submit_lookup).
LOOKUP_AWAY = -1


class Mode(enum.IntEnum):
    """How a batch goes on after a miss."""

    EACH = 0
    PREFIX = 1


class Verdict(enum.IntEnum):
    """Status of a key in the answer of a probe: ``verdict & 3``. The medium of a
    hit is ``verdict >> 2 & 7``: 1 cpu, 2 cxl, 3 ssd."""

    MISS = 0
    PENDING = 1
    HIT = 2
    NOT_TRIED = 3


@dataclasses.dataclass
class ClientConfig:
    """Settings of a client; None is the library's default. Sizes in bytes.

    A worker needs ``namespace`` and ``value_bytes`` (size of one whole object of
    this shard) and ``piece_bytes``; a scheduler needs the namespace. ``opaque``
    takes the reserved namespace and needs ``page_bytes``.
    """

    server_address: str
    namespace: Namespace | bytes | None = None
    opaque: bool = False
    instance_id: str | None = None
    engine_id: str | None = None
    role: str = "worker"
    rank: int = 0
    world_size: int = 1
    page_bytes: int | None = None
    value_bytes: int | None = None
    piece_bytes: int | None = None
    cpu_bytes: int | None = None
    cpu_numa_node: int | None = None
    cpu_hugepages: str | None = None
    segment_bytes: int | None = None
    cxl_bytes: int | None = None
    region_bytes: int | None = None
    expand_bytes: int | None = None
    auto_expand: bool | None = None
    write_order: Sequence[str] | None = None
    read_order: Sequence[str] | None = None
    checksums: bool | None = None
    view_checksums: bool | None = None
    copy_threads: int | None = None
    queue_jobs: int | None = None
    eager_map: bool | None = None
    idle_mappings: int | None = None
    agent_socket: str | None = None
    views: bool | None = None
    overcommit: bool | None = None
    prefault: bool | None = None
    device_copy: str | None = None
    device_staging_bytes: int | None = None
    connect_later: bool | None = None
    hot_connections: int | None = None
    rpc_timeout_ms: int | None = None
    connect_timeout_ms: int | None = None
    go_max_procs: int | None = None

    def to_json(self) -> bytes:
        """Returns the configuration as the library reads it."""
        out: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is None or f.name in ("namespace", "opaque"):
                continue
            out[f.name] = list(value) if f.name in ("write_order", "read_order") else value
        if self.opaque:
            if self.namespace is not None and self.namespace != OPAQUE_NAMESPACE:
                raise ValueError("namespace: opaque values have the reserved namespace, leave it out")
            out["opaque"] = True
            out["namespace_hex"] = OPAQUE_NAMESPACE.hex()
        elif isinstance(self.namespace, Namespace):
            out["namespace_hex"] = self.namespace.encode().hex()
        elif self.namespace is not None:
            out["namespace_hex"] = bytes(self.namespace).hex()
        return json.dumps(out).encode("utf-8")


class Client:
    """One session at a maru-server.

    Raises (constructor):
        InvalidError: the configuration; the text names every field.
        UnavailableError: the server does not answer (unless ``connect_later``).
        ForkedError: the library was loaded by a parent process.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self._closed = True  # until there is something to close
        lib = _lib.load()
        text = config.to_json()
        handle = c_uint64()
        _lib.check(lib, lib.maru_open(text, len(text), handle))
        self._lib = lib
        self._handle: int = handle.value
        self._jobs_lock = threading.Lock()
        self._jobs: dict[int, tuple[int, Memory | None]] = {}  # codes, and what must live until then
        self._released: SimpleQueue[int] = SimpleQueue()
        self._logs = threading.Thread(target=_forward_logs, args=(lib, self._handle), name="maru-log", daemon=True)
        self._releaser = threading.Thread(
            target=release_views, args=(lib, self._handle, self._released), name="maru-release", daemon=True
        )
        self._logs.start()
        self._releaser.start()
        self._closed = False
        self._info = self.info()
        self.page_bytes: int = self._info["page_bytes"]

    # --- life ---

    def close(self, timeout: float = 10.0) -> None:
        """Ends the session; idempotent. With views out the mappings stay to the end
        of the process."""
        if self._closed:
            return
        self._closed = True
        # Whatever was dropped before is no view that is out. The last reference to a
        # client can be dropped anywhere, also in the thread that is joined here.
        self._released.put(0)
        if threading.current_thread() is not self._releaser:
            self._releaser.join(timeout)
        while ids := waiting(self._released):
            release_now(self._lib, self._handle, ids)
        status = self._lib.maru_close(self._handle, max(1, int(timeout * 1000)))
        if status and status != Code.CLOSED:
            logger.warning("maru: close: %s", _lib.last_error(self._lib))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not _lib.forked():
            logger.warning("maru: a client was dropped without close(); its session ends now")
            self.close(timeout=1.0)

    @property
    def handle(self) -> int:
        """The handle in the C ABI."""
        return self._handle

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    @property
    def connected(self) -> bool:
        """Whether the session is valid now."""
        return not self._closed and bool(self.info()["connected"])

    @property
    def session(self) -> bytes:
        """The session's 16-byte id, which schedulers name as a target."""
        return bytes.fromhex(self._info["session"].replace("-", ""))

    def info(self) -> dict[str, Any]:
        """Session, epoch, connected, sizes."""
        out: dict[str, Any] = json.loads(_lib.read_text(self._lib, self._lib.maru_client_info, self._handle))
        return out

    def stats(self) -> dict[str, Any]:
        """Counters of this client since it was opened."""
        out: dict[str, Any] = json.loads(_lib.read_text(self._lib, self._lib.maru_stats, self._handle))
        return out

    def usage(self, timeout: float | None = None) -> dict[str, Any]:
        """Capacity and counts of the server; 64-bit numbers are strings."""
        lib = self._lib
        out: dict[str, Any] = json.loads(_lib.read_text(lib, lib.maru_usage, self._handle, after=(_ms(timeout),)))
        return out

    def ping(self, timeout: float | None = None) -> None:
        """One round trip.

        Raises:
            UnavailableError: no answer.
        """
        self._check(self._lib.maru_ping(self._handle, _ms(timeout)))

    # --- metadata ---

    def probe(
        self,
        keys: Buffer,
        mode: Mode = Mode.EACH,
        *,
        targets: bytes = b"",
        request_id: int = 0,
        timeout: float | None = None,
    ) -> tuple[int, bytearray]:
        """Returns how many keys hit before the first that does not, and a verdict
        byte a key. With ``targets`` (packed 16-byte sessions) shard s of each key is
        judged for target s. While the server is away everything is a miss."""
        n = count_of(keys, KEY_BYTES, "keys")
        verdicts = bytearray(n)
        if n == 0:
            return 0, verdicts
        leading = c_uint64()
        self._check(
            self._lib.maru_probe(
                self._handle,
                n,
                _lib.address(keys),
                mode,
                count_of(targets, 16, "targets"),
                targets or None,
                request_id,
                (ctypes.c_char * n).from_buffer(verdicts),
                leading,
                _ms(timeout),
            )
        )
        return leading.value, verdicts

    def submit_lookup(
        self, keys: Buffer, workers: int, replicas: int = 1, request_id: int = 0, timeout: float | None = None
    ) -> int:
        """Queues a scheduler's lookup and returns its job: which leading keys could each of
        the ``workers`` of this client's engine read, of which ``replicas`` neighbours share
        a shard. :meth:`completed` hands the job out.

        Its codes (:meth:`job_result`) are a verdict a key as of ``Mode.PREFIX``, or
        ``LOOKUP_AWAY`` for each when there was no answer; and behind them the microseconds
        until it was there.
        """
        n = count_of(keys, KEY_BYTES, "keys")
        call = self._lib.maru_submit_lookup
        packed = _lib.address(keys)
        return self._queue(
            n, n + 1, None, lambda job: call(self._handle, n, packed, workers, replicas, request_id, _ms(timeout), job)
        )

    def refresh_requests(self, ids: Sequence[int], timeout: float | None = None, *, wait: bool = True) -> None:
        """Keeps the request leases of engine requests; without ``wait`` nobody hears how it went."""
        self._requests(1, ids, timeout, wait)

    def end_requests(self, ids: Sequence[int], timeout: float | None = None, *, wait: bool = True) -> None:
        """Ends the request leases of engine requests; without ``wait`` behind the lookups of
        theirs that were submitted, and nobody hears how it went."""
        self._requests(2, ids, timeout, wait)

    def _requests(self, action: int, ids: Sequence[int], timeout: float | None, wait: bool) -> None:
        packed = array("Q", ids)
        if not packed:
            return
        arguments = self._handle, action, len(packed), _lib.address(packed)
        if wait:
            self._check(self._lib.maru_requests(*arguments, _ms(timeout)))
        else:
            self._check(self._lib.maru_submit_requests(*arguments))

    def targets(self, timeout: float | None = None) -> bytes:
        """Returns the packed sessions of the live workers of this client's engine."""
        cap, count = 64, c_uint32()
        while True:
            buf = ctypes.create_string_buffer(16 * cap)
            status = self._lib.maru_targets(self._handle, cap, buf, count, _ms(timeout))
            if status == Code.LIMIT and count.value > cap:
                cap = count.value
                continue
            self._check(status)
            return buf.raw[: 16 * count.value]

    def delete(self, keys: Buffer, timeout: float | None = None) -> array[int]:
        """Hides keys for good. Codes: OK, NOT_FOUND, PINNED, UNKNOWN (hidden, but not
        acknowledged in time)."""
        n = count_of(keys, KEY_BYTES, "keys")
        codes = codes_of(n)
        if n:
            self._check(self._lib.maru_delete(self._handle, n, _lib.address(keys), _lib.address(codes), _ms(timeout)))
        return codes

    # --- views ---

    def acquire(self, keys: Buffer, mode: Mode = Mode.EACH, timeout: float | None = None) -> Leases:
        """Takes a view lease on each object and returns them, zero copy."""
        n = count_of(keys, KEY_BYTES, "keys")
        return Leases([row[0] if row else None for row in self.retrieve(keys, n, mode, timeout)])

    def retrieve(
        self, keys: Buffer, count: int, mode: Mode = Mode.EACH, timeout: float | None = None
    ) -> list[tuple[memoryview, int, int] | None]:
        """Returns (read-only view, region, page) for each key, None for a miss. The
        lease of a view ends when nothing made of it is left."""
        if count == 0:
            return []
        if count_of(keys, KEY_BYTES, "keys") != count:
            raise ValueError(f"keys have {len(keys)} bytes, {count} keys have {count * KEY_BYTES}")
        rows = bytearray(VIEW.size * count)
        self._check(
            self._lib.maru_retrieve(
                self._handle, count, _lib.address(keys), mode, (ctypes.c_char * len(rows)).from_buffer(rows), _ms(timeout)
            )
        )
        out: list[tuple[memoryview, int, int] | None] = []
        append, page_bytes = out.append, self.page_bytes
        owner_type = owner_type_of(page_bytes) if page_bytes else None
        released = self._released
        for view_id, data, size, region, index in VIEW.iter_unpack(rows):
            if not view_id:
                append(None)
                continue
            if owner_type is None or size > page_bytes:
                owner = owner_type_of(max(size, 1)).from_address(data)
            else:
                owner = owner_type.from_address(data)
            owner._release = (released, view_id)
            append((memoryview(owner).cast("B")[:size].toreadonly(), region, index))
        return out

    def pin(self, keys: Buffer, mode: Mode = Mode.PREFIX, timeout: float | None = None) -> array[int]:
        """Counts up a view lease on each key. Codes: OK or why not; in PREFIX mode
        everything behind the first miss is a MISS."""
        n = count_of(keys, KEY_BYTES, "keys")
        codes = codes_of(n)
        if n:
            self._check(self._lib.maru_pin(self._handle, n, _lib.address(keys), mode, _lib.address(codes), _ms(timeout)))
        return codes

    def unpin(self, keys: Buffer, timeout: float | None = None) -> array[int]:
        """Counts down. Codes: OK, NOT_FOUND for a key that this client has not
        pinned."""
        n = count_of(keys, KEY_BYTES, "keys")
        codes = codes_of(n)
        if n:
            self._check(self._lib.maru_unpin(self._handle, n, _lib.address(keys), _lib.address(codes), _ms(timeout)))
        return codes

    # --- transfers ---

    def register_layout(self, layers: Sequence[Layer], block_count: int, device: Device = None) -> int:
        """Makes the tensors of an engine known, so that transfers name block ids. The
        tensors must stay until :meth:`unregister_layout` or :meth:`close` returned.

        ``device`` is where they lie: None or "cpu" for memory of the host, else "cuda",
        "cuda:N" or N as torch counts GPUs in this process. The first layout on a GPU
        opens it, which takes up to half a second; never while a graph is captured.

        Raises:
            UnsupportedError: no driver, no such GPU, MPS, runs that are no multiple of 16.
            InvalidError: memory that is not the device's.
        """
        ordinal = ordinal_of(device)
        rows = (_lib.Layer * len(layers))()
        offsets = array("q")
        for row, layer in zip(rows, layers):
            row.base, row.block_stride_bytes = layer.base, layer.block_stride_bytes
            row.run_bytes, row.run_count = layer.run_bytes, len(layer.run_offsets)
            offsets.extend(layer.run_offsets)
        out = c_uint64()
        rest = (len(layers), rows, _lib.address(offsets), len(offsets), block_count, out)
        if ordinal is None:
            self._check(self._lib.maru_register_layout(self._handle, *rest))
        else:
            self._check(self._lib.maru_register_device_layout(self._handle, ordinal, *rest))
        return out.value

    def device_info(self) -> dict[str, Any] | None:
        """The GPU of this client's layouts and its counters; None before the first."""
        try:
            text = _lib.read_text(self._lib, self._lib.maru_device_info, self._handle)
        except NotFoundError:
            return None
        info: dict[str, Any] = json.loads(text)
        return info

    def unregister_layout(self, layout: int) -> None:
        """Forgets a layout after the last transfer that uses it."""
        self._check(self._lib.maru_unregister_layout(self._handle, layout))

    def store(
        self,
        keys: Buffer,
        source: Memory,
        parents: Buffer | None = None,
        timeout: float | None = None,
        stream: int = 0,
    ) -> array[int]:
        """Copies objects into the store and publishes them. Codes: OK,
        ALREADY_STORED, FULL (skipped), UNKNOWN, UNAVAILABLE, FAULT, INVALID. ``stream``
        is as of :meth:`submit_store`."""
        n, batch, keep = batch_of(keys, source, parents, None, stream)
        codes = codes_of(n)
        if n:
            self._check(self._lib.maru_store(self._handle, batch, _lib.address(codes), _ms(timeout)))
        del keep
        return codes

    def load(
        self,
        keys: Buffer,
        target: Memory,
        offsets: array[int] | None = None,
        timeout: float | None = None,
        stream: int = 0,
    ) -> array[int]:
        """Copies objects, or parts from ``offsets`` (u64) on, out of the store and
        verifies them. Codes: OK, MISS, CORRUPT, FAULT, INVALID; except with OK the
        content of the destination is undefined. ``stream`` is as of
        :meth:`submit_store`."""
        n, batch, keep = batch_of(keys, target, None, offsets, stream)
        codes = codes_of(n)
        if n:
            self._check(self._lib.maru_load(self._handle, batch, _lib.address(codes), _ms(timeout)))
        del keep
        return codes

    def submit_store(self, keys: Buffer, source: Memory, parents: Buffer | None = None, stream: int = 0) -> int:
        """Queues a store and returns its job. The memory must stay until the job is
        handed out by :meth:`completed`.

        With a layout on a GPU, ``stream`` is the raw handle of the engine's stream
        (``torch.cuda.current_stream().cuda_stream``): the copy begins behind what is
        queued there at this call. 0 is the default stream.

        Raises:
            BusyError: ``queue_jobs`` jobs are out.
            UnsupportedError: the stream is being captured.
        """
        n, batch, keep = batch_of(keys, source, parents, None, stream)
        return self._submit(self._lib.maru_submit_store, n, batch, source, keep)

    def submit_load(self, keys: Buffer, target: Memory, offsets: array[int] | None = None, stream: int = 0) -> int:
        """Queues a load and returns its job, as :meth:`submit_store`. When it is handed
        out, the bytes are in the blocks for whatever is queued afterwards."""
        n, batch, keep = batch_of(keys, target, None, offsets, stream)
        return self._submit(self._lib.maru_submit_load, n, batch, target, keep)

    def _submit(self, function: Any, n: int, batch: Any, memory: Memory, keep: object) -> int:
        job = self._queue(n, n, memory, lambda job: function(self._handle, batch, job))
        del keep
        return job

    def _queue(self, n: int, codes: int, memory: Memory | None, submit: Callable[[c_uint64], int]) -> int:
        if n == 0:
            raise InvalidError(Code.INVALID, "maru: a job needs at least one item")
        job = c_uint64()
        with self._jobs_lock:
            self._check(submit(job))
            self._jobs[job.value] = (codes, memory)
        return job.value

    @property
    def event_fd(self) -> int:
        """A descriptor that is readable while finished jobs wait; the library's."""
        fd = c_int32()
        self._check(self._lib.maru_event_fd(self._handle, fd))
        return fd.value

    def completed(self, limit: int = 256) -> list[int]:
        """Returns finished jobs, each once. It never waits."""
        jobs, count = array("Q", bytes(8 * limit)), c_uint32()
        self._check(self._lib.maru_completed(self._handle, limit, _lib.address(jobs), count))
        return jobs[: count.value].tolist()

    def job_copied(self, job: int) -> bool:
        """Whether the memory of a job's items is the caller's again: a store has read it, though
        its outcome may not be known yet. ``event_fd`` becomes readable then.

        Raises:
            NotFoundError: no such job.
        """
        status = self._lib.maru_job_copied(self._handle, job)
        if status == Code.PENDING:
            return False
        self._check(status)
        return True

    def job_result(self, job: int) -> array[int] | None:
        """Returns a job's codes and forgets the job; None while it runs.

        Raises:
            NotFoundError: no such job.
        """
        with self._jobs_lock:
            n = self._jobs[job][0] if job in self._jobs else 0
        codes = codes_of(n)
        status = self._lib.maru_job_result(self._handle, job, n, _lib.address(codes) if n else None)
        if status == Code.PENDING:
            return None
        with self._jobs_lock:
            self._jobs.pop(job, None)
        self._check(status)
        return codes

    def _check(self, status: int) -> None:
        if status:
            raise error_of(status, _lib.last_error(self._lib))


def _forward_logs(lib: ctypes.CDLL, handle: int) -> None:
    # The library never prints; its records come out here, in the process's own
    # logging. The call waits without the GIL.
    cap, needed = 8192, c_size_t()
    buf = ctypes.create_string_buffer(cap)
    while True:
        status = lib.maru_wait_log(handle, 60_000, buf, cap, needed)
        if status == Code.PENDING:
            continue
        if status == Code.LIMIT and needed.value >= cap:
            cap = needed.value + 1
            buf = ctypes.create_string_buffer(cap)
            continue
        if status:
            return
        record = json.loads(buf.raw[: needed.value])
        attrs = "".join(f" {k}={v}" for k, v in record.get("attrs", {}).items())
        level = {"DEBUG": logging.DEBUG, "WARN": logging.WARNING, "ERROR": logging.ERROR}
        logger.log(level.get(record["level"], logging.INFO), "%s%s", record["msg"], attrs)


def _ms(timeout: float | None) -> int:
    if timeout is None:
        return 0
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout} s, must be above 0; None is the client's rpc_timeout_ms")
    return max(1, int(timeout * 1000))
