"""The connector's use of the Maru library: one client a role.

Nothing is loaded before a role is opened, in the process that uses it (R22). A
server that is away is no error: the client connects later and everything misses.
"""

from __future__ import annotations

import select
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from maru.api import Blocks, Client, ClientConfig, Code, Layer
from maru.errors import MaruError
from maru.keys import Namespace, piece_bytes
from maru_vllm.geometry import LayerRuns
from maru_vllm.identity import Ranks
from maru_vllm.lookup import ClientLookup
from maru_vllm.settings import Settings

__all__ = ["ClientTransfers", "open_scheduler", "open_worker", "piece_bytes"]


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
    settings: Settings, fields: dict[str, Any], piece: int, value_bytes: int, *, rank: int, ranks: Ranks
) -> ClientTransfers:
    """Opens the session of a worker: memory, mappings, transfers."""
    config = _config(settings, Namespace(**fields), "worker", piece)
    config.rank, config.world_size = rank, ranks.size
    config.value_bytes = value_bytes
    config.cpu_bytes = settings.cpu_pool_bytes or None
    if settings.cpu_numa_nodes:
        nodes = settings.cpu_numa_nodes
        config.cpu_numa_node = nodes[rank if len(nodes) > 1 else 0]
    if settings.cpu_hugepages != "auto":
        config.cpu_hugepages = settings.cpu_hugepages
    config.cxl_bytes = settings.cxl_pool_bytes or None
    config.region_bytes = settings.region_bytes or None
    config.write_order, config.read_order = settings.write_order, settings.read_order
    config.copy_threads = settings.copy_threads
    config.eager_map = settings.eager_map
    if settings.device_copy != "auto":
        config.device_copy = settings.device_copy
    if settings.staging_bytes:
        config.device_staging_bytes = settings.staging_bytes
    config.views = False  # engine adapters copy; they never export a page
    return ClientTransfers(Client(config))


def open_scheduler(settings: Settings, fields: dict[str, Any], piece: int, ranks: Ranks) -> ClientLookup:
    """Opens the session of a scheduler: metadata only (VL-02)."""
    namespace = Namespace(**fields)
    config = _config(settings, namespace, "scheduler", piece)
    config.world_size = ranks.size  # the same for all sessions of an engine
    client = Client(config)
    return ClientLookup(client, namespace.id(), ranks.size, ranks.replicas, settings.lookup_timeout_ms / 1000)


class ClientTransfers:
    """Transfers of one worker over its client.

    Tensors in GPU memory (place) are another layout of the library and the engine's
    stream with each submission; all else is the same.
    """

    submit_error = MaruError
    already_code = int(Code.ALREADY_STORED)

    def __init__(self, client: Client) -> None:
        self.client = client
        self._poll = select.poll()
        self._poll.register(client.event_fd, select.POLLIN)
        # Arguments that only layouts on a device have.
        self._device: dict[str, Any] = {}
        self._stream: Callable[[], int] | None = None

    def place(self, device: str, stream: Callable[[], int]) -> None:
        """The tensors lie on this device ("cuda:N"); stream: raw handle of the engine's stream at
        the moment, behind which blocks may be read and overwritten."""
        self._device, self._stream = {"device": device}, stream

    def register_layout(self, layers: Sequence[LayerRuns], block_count: int) -> int:
        rows = [Layer(r.base, r.block_stride, r.run_bytes, tuple(r.offsets)) for r in layers]
        return self.client.register_layout(rows, block_count, **self._device)

    def _order(self) -> dict[str, Any]:
        return {"stream": self._stream()} if self._stream is not None else {}

    def submit_store(self, layout: int, keys: bytes, parents: bytes, blocks: array[int], ends: array[int]) -> int:
        return self.client.submit_store(keys, Blocks(layout, blocks, ends), parents, **self._order())

    def submit_load(self, layout: int, keys: bytes, blocks: array[int], ends: array[int], offsets: array[int]) -> int:
        return self.client.submit_load(keys, Blocks(layout, blocks, ends), offsets, **self._order())

    def ready(self) -> bool:
        # The library makes the descriptor readable before anybody can see that a job has ended, and
        # clears it with the last one that completed() hands out.
        return bool(self._poll.poll(0))

    def completed(self) -> list[int]:
        return self.client.completed()

    def copied(self, job: int) -> bool:
        return self.client.job_copied(job)

    def job_codes(self, job: int) -> Sequence[int]:
        codes = self.client.job_result(job)
        assert codes is not None, "a completed job has a result"
        return codes

    def wait(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1000)

    def close(self, timeout_s: float) -> None:
        self.client.close(timeout_s)
