"""The connector's use of the Maru library: one client a role.

Nothing is loaded before a role is opened, in the process that uses it (R22). A
server that is away is no error: the client connects later and everything misses.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import select
import threading
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from maru.api import Blocks, Client, ClientConfig, Code, Layer, Mode
from maru.errors import MaruError
from maru.keys import Chain, Namespace, piece_bytes, root
from maru_vllm.geometry import LayerRuns
from maru_vllm.settings import Settings

__all__ = ["ClientLookup", "ClientTransfers", "open_scheduler", "open_worker", "piece_bytes"]

logger = logging.getLogger("maru.vllm")

# Request leases last tens of seconds at the server; refreshing each few seconds
# survives a lost call.
_REFRESH_S = 3.0


def _config(settings: Settings, namespace: Namespace, role: str, piece: int) -> ClientConfig:
    return ClientConfig(
        server_address=settings.server_url,
        namespace=namespace,
        instance_id=settings.instance_id,
        engine_id=settings.engine_id,
        role=role,
        piece_bytes=piece,
        checksums=settings.checksums,
        rpc_timeout_ms=settings.timeout_ms,
        connect_timeout_ms=settings.timeout_ms,
        connect_later=True,
    )


def open_worker(
    settings: Settings, fields: dict[str, Any], piece: int, value_bytes: int, *, rank: int, world_size: int
) -> ClientTransfers:
    """Opens the session of a worker: memory, mappings, transfers."""
    config = _config(settings, Namespace(**fields), "worker", piece)
    config.rank, config.world_size = rank, world_size
    config.value_bytes = value_bytes
    config.cpu_bytes = settings.cpu_pool_bytes or None
    config.cxl_bytes = settings.cxl_pool_bytes or None
    config.region_bytes = settings.region_bytes or None
    config.write_order, config.read_order = settings.write_order, settings.read_order
    config.copy_threads = settings.copy_threads
    config.eager_map = settings.eager_map
    config.views = False  # engine adapters copy; they never export a page
    return ClientTransfers(Client(config))


def open_scheduler(settings: Settings, fields: dict[str, Any], piece: int, world_size: int = 1) -> ClientLookup:
    """Opens the session of a scheduler: metadata only (VL-02)."""
    namespace = Namespace(**fields)
    return ClientLookup(Client(_config(settings, namespace, "scheduler", piece)), namespace.id(), world_size)


class ClientTransfers:
    """Transfers of one worker over its client."""

    submit_error = MaruError
    already_code = int(Code.ALREADY_STORED)

    def __init__(self, client: Client) -> None:
        self.client = client
        self._poll = select.poll()
        self._poll.register(client.event_fd, select.POLLIN)

    def register_layout(self, layers: Sequence[LayerRuns], block_count: int) -> int:
        return self.client.register_layout(
            [Layer(r.base, r.block_stride, r.run_bytes, tuple(r.offsets)) for r in layers], block_count
        )

    def submit_store(self, layout: int, keys: bytes, parents: bytes, blocks: array[int], ends: array[int]) -> int:
        return self.client.submit_store(keys, Blocks(layout, blocks, ends), parents)

    def submit_load(
        self, layout: int, keys: bytes, blocks: array[int], ends: array[int], offsets: array[int]
    ) -> int:
        return self.client.submit_load(keys, Blocks(layout, blocks, ends), offsets)

    def completed(self) -> list[int]:
        return self.client.completed()

    def job_codes(self, job: int) -> Sequence[int]:
        codes = self.client.job_result(job)
        assert codes is not None, "a completed job has a result"
        return codes

    def wait(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1000)

    def close(self, timeout_s: float) -> None:
        self.client.close(timeout_s)


class _Probe:
    """The result of one lookup; written by the lookup thread, once."""

    __slots__ = ("_leading",)

    def __init__(self) -> None:
        self._leading: int | None = None

    def done(self) -> bool:
        return self._leading is not None

    def leading(self) -> int:
        assert self._leading is not None
        return self._leading

    def finish(self, leading: int) -> None:
        self._leading = leading


class ClientLookup:
    """Lookups of one scheduler, by one background thread.

    Its queue is bounded by what the engine has: at most a probe per request and
    change, an end per request, one refresh at a time.
    """

    def __init__(self, client: Client, namespace_id: bytes, world_size: int) -> None:
        self.client = client
        self._namespace_id = namespace_id
        self._world_size = world_size
        self._tasks: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._refreshed = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="maru-lookup", daemon=True)
        self._thread.start()

    def new_chain(self, salt: bytes) -> Chain:
        return Chain(root(self._namespace_id, salt))

    def probe(self, request_id: str, keys: bytes) -> _Probe:
        result = _Probe()
        self._tasks.put((self._probe, result, request_id, keys))
        return result

    def keep(self, request_ids: Iterable[str]) -> None:
        now = time.monotonic()
        if now - self._refreshed < _REFRESH_S:
            return
        self._refreshed = now
        ids = [lease_id(r) for r in request_ids]
        if ids:
            self._tasks.put((self.client.refresh_requests, ids))

    def end(self, request_id: str) -> None:
        self._tasks.put((self.client.end_requests, [lease_id(request_id)]))

    def close(self) -> None:
        """Ends the thread and the session."""
        self._tasks.put((None,))
        self._thread.join(timeout=2.0)
        self.client.close(2.0)

    def _run(self) -> None:
        while True:
            function, *args = self._tasks.get()
            if function is None:
                return
            try:
                function(*args)
            except MaruError as e:
                # The client logs each outage once; a failed refresh or end costs at most an early eviction.
                logger.debug("lookup thread: %s", e)
            except Exception:
                # A thread that ended would leave every later lookup open for ever.
                logger.exception("lookup failed; its request is computed")

    def _probe(self, result: _Probe, request_id: str, keys: bytes) -> None:
        leading = 0
        try:
            targets = self.client.targets()
            if len(targets) == 16 * self._world_size:
                leading, _ = self.client.probe(
                    keys, Mode.PREFIX, targets=targets, request_id=lease_id(request_id)
                )
        finally:
            result.finish(leading)


def lease_id(request_id: str) -> int:
    """The 64-bit id under which the server keeps a request's leases; never 0."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little") or 1
