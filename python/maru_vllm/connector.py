"""MaruKVConnector: vLLM's connector interface over the two roles.

This module touches vLLM; what it decides lies in scheduler.py and worker.py. It
uses the abstract methods, and optional ones of the installed release where they
exist (span.py), so newer and older releases load it too. Layer hooks are not used: whole blocks are moved between steps (R25).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from maru_vllm import span
from maru_vllm.content import ContentRules
from maru_vllm.geometry import GeometryError, TensorShape, plan_layers
from maru_vllm.identity import (
    KVShape,
    Ranks,
    Unsupported,
    device_type,
    kv_ranks,
    kv_shape,
    namespace_fields,
    unsupported_features,
)
from maru_vllm.journal import Journal, default_directory
from maru_vllm.messages import StepOrders, StepReport
from maru_vllm.metrics import MaruPromMetrics, MaruStats
from maru_vllm.scheduler import SchedulerRole
from maru_vllm.settings import Settings, SettingsError, parse_settings
from maru_vllm.store import ClientTransfers, open_scheduler, open_worker, piece_bytes
from maru_vllm.worker import Budgets, WorkerRole

if TYPE_CHECKING:
    import torch

__all__ = ["MaruKVConnector"]

logger = logging.getLogger("maru.vllm")

_SHUTDOWN_S = 3.0  # the engine kills its workers 5 s after it asked them to end
_WAITING_FACTOR = 4  # stores that wait behind those under way, in bytes of the latter
# What is copied at a time, by the device of the KV: some tenths of a second. The worker
# looks after copies once a step, and a step of a long prefill takes as long.
_INFLIGHT_BYTES = {"cpu": 1 << 30, "cuda": 16 << 30}


@dataclass
class _Metadata(KVConnectorMetadata):
    orders: StepOrders


@dataclass
class _WorkerMetadata(KVConnectorWorkerMetadata):
    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, _WorkerMetadata)
        return _WorkerMetadata(self.report.add(other.report))


class MaruKVConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM has no types for us
    """Stores the KV of prompt prefixes in Maru and loads it back.

    Made twice per engine, once for each role, in one process or two. Raises
    SettingsError with every problem when the configuration cannot be used; a server
    that is away is no problem: the engine runs without hits until it comes.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings, self._shape, self._ranks, self._chunk_blocks = _configure(vllm_config, kv_cache_config)
        settings, shape = self._settings, self._shape
        piece = piece_bytes(shape.page_bytes)
        fields = namespace_fields(
            vllm_config,
            shape,
            weights=settings.cache_namespace,
            chunk_tokens=self._chunk_blocks * shape.block_tokens,
            piece_bytes=piece,
        )
        value_bytes = self._chunk_blocks * len(shape.layer_names) * shape.page_bytes
        self._scheduler: SchedulerRole | None = None
        self._worker: WorkerRole | None = None
        self._transfers: ClientTransfers | None = None
        self._journal: Journal | None = None
        self._tables: dict[str, list[int]] = {}
        self._timed_step = 0
        if role == KVConnectorRole.SCHEDULER:
            self._lookup = open_scheduler(settings, fields, piece, self._ranks)
            self._journal = _open_journal(settings, str(transfer.engine_id), fields)
            self._scheduler = SchedulerRole(
                self._lookup,
                block_tokens=shape.block_tokens,
                chunk_blocks=self._chunk_blocks,
                min_hit_tokens=settings.min_hit_tokens,
                worker_count=int(vllm_config.parallel_config.world_size),
                rules=ContentRules(
                    settings.lora_digests,
                    settings.multimodal and span.identifiers_are_content(vllm_config),
                    span.extra_key_check(),
                ),
                waits=bool(vllm_config.cache_config.enable_prefix_caching),
                lookup_timeout_s=settings.lookup_timeout_ms / 1000,
                journal=self._journal.put if self._journal is not None else None,
            )
            logger.info("%s; node total of memory: %s", span.detect(KVConnectorBase_V1), _memory_line(settings, self._ranks))
        else:
            rank = span.tensor_rank(self._ranks.size)
            shard, replica = self._ranks.place(rank)
            # Ranks with the same KV share the work where each reads what another stored.
            stripe = self._ranks.replicas > 1 and settings.write_order == ("cxl",)
            self._transfers = open_worker(settings, fields, piece, value_bytes, rank=rank, ranks=self._ranks)
            self._worker = WorkerRole(
                self._transfers,
                chunk_blocks=self._chunk_blocks,
                submit_error=self._transfers.submit_error,
                already_code=self._transfers.already_code,
                async_store=settings.async_store,
                budgets=_budgets(settings, device_type(vllm_config)),
                shard=shard,
                replica=replica if stripe else 0,
                replicas=self._ranks.replicas if stripe else 1,
            )
        for note in settings.notes:
            logger.warning("%s", note)
        logger.info(
            "Maru connector (%s) for engine %s: backend %s, chunks of %d tokens (%d blocks, %d bytes a shard), server %s",
            role.name.lower(),
            settings.engine_id or transfer.engine_id,
            settings.backend,
            self._chunk_blocks * shape.block_tokens,
            self._chunk_blocks,
            value_bytes,
            settings.server_url,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost store is a later miss, nothing that a request waits for."""
        return False

    # -- scheduler role ---------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        if num_external_tokens > 0:
            self._scheduler.update_state_after_alloc(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self._scheduler is not None
        scheduled = scheduler_output.num_scheduled_tokens
        tables = self._block_tables(scheduler_output)
        preempted = sorted(getattr(scheduler_output, "preempted_req_ids", None) or ())
        return _Metadata(self._scheduler.build_orders(scheduled, preempted, tables))

    def _block_tables(self, output: Any) -> Callable[[str], Sequence[int] | None]:
        """Whole block tables of the scheduled requests: from the engine, or tracked by hand before 0.32 (R17)."""
        state = getattr(output, "kv_connector_block_state", None)
        if state is not None:

            def table(request_id: str) -> Sequence[int] | None:
                groups = state.get_block_ids(request_id)
                return groups[0] if groups is not None else None

            return table
        for request_id in output.finished_req_ids:
            self._tables.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", ())
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is None:
                continue
            if request_id in resumed:
                self._tables[request_id] = list(blocks[0])
            else:
                self._tables.setdefault(request_id, []).extend(blocks[0])
        return self._tables.get

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        meta = getattr(connector_output, "kv_connector_worker_meta", None)
        self._scheduler.update_output(
            connector_output.finished_recving or (),
            set(connector_output.invalid_block_ids or ()),
            meta.report if isinstance(meta, _WorkerMetadata) else None,
            getattr(connector_output, "failed_recving", None) or (),
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.request_finished(request), None

    def reset_cache(self) -> bool | None:
        """Nothing that was stored until now is read by this engine again, as after new weights.

        The objects are other engines' too and stay. From here on this engine shares with
        nobody: what it computes may be of weights that the namespace does not name.
        """
        assert self._scheduler is not None
        self._scheduler.reset()
        logger.warning(
            "the connector's cache was reset: this engine reads and writes objects of its own alone until it is started again"
        )
        return True

    # -- worker role ------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        assert self._transfers is not None
        tensors, devices = [], set()
        for name in self._shape.layer_names:
            t = kv_caches[name]
            if isinstance(t, (list, tuple)):
                raise GeometryError(f"layer {name} has a list of state tensors, only attention KV is supported")
            devices.add(str(t.device))
            tensors.append(TensorShape(name, t.data_ptr(), tuple(t.shape), tuple(t.stride()), t.element_size()))
        layers = plan_layers(tensors, self._shape.num_blocks, self._shape.page_bytes, block_first=self._shape.layout is not None)
        if len(devices) != 1:
            raise GeometryError(f"the KV tensors lie on {sorted(devices)}, allowed: all of a worker's on one device")
        if (device := devices.pop()) != "cpu":
            self._transfers.place(device, span.current_stream(device))
        self._worker.register(layers, self._shape.num_blocks)

    def _orders(self) -> StepOrders | None:
        if not self.has_connector_metadata():
            return None  # warm-up and profiling (R29)
        meta = self._get_connector_metadata()
        return meta.orders if isinstance(meta, _Metadata) else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert self._worker is not None
        if isinstance(kv_connector_metadata, _Metadata):
            self._worker.before_overwrite(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        orders = self._orders()
        if orders is not None:
            self._timed_step = orders.step
            self._worker.start_loads(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads end before their request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: whole blocks are stored after the step."""

    def wait_for_save(self) -> None:
        assert self._worker is not None
        orders = self._orders()
        if orders is not None:
            self._worker.start_stores(orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        sent, received = self._worker.finished()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self._worker is not None
        step, self._timed_step = self._timed_step, 0
        report = self._worker.report(step)
        return None if report is None else _WorkerMetadata(report)

    @property
    def counters(self) -> Any:
        """The worker role's counters since start."""
        assert self._worker is not None
        return self._worker.counters

    def library_stats(self) -> dict[str, Any]:
        """The counters of the library's client."""
        assert self._transfers is not None
        return self._transfers.client.stats()

    # -- both -------------------------------------------------------------

    def get_kv_connector_stats(self) -> MaruStats | None:
        data = self._scheduler.stats() if self._scheduler is not None else None
        if self._worker is not None:
            data = self._worker.tally.take()
        return MaruStats(data) if data is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MaruStats:
        return MaruStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> MaruPromMetrics:
        return MaruPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(_SHUTDOWN_S)
        if self._scheduler is not None:
            if self._journal is not None:
                self._journal.close()
            self._lookup.close()


def _open_journal(settings: Settings, engine_id: str, fields: dict[str, Any]) -> Journal | None:
    if settings.run_dir is None:
        return None
    directory = Path(settings.run_dir) if settings.run_dir else default_directory()
    header = {
        "engine": settings.engine_id or engine_id,
        "instance": settings.instance_id,
        "server": settings.server_url,
        "pid": os.getpid(),
        "time": time.time(),
        "namespace": {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()},
    }
    try:
        return Journal(directory, str(header["engine"]), header)
    except OSError as e:
        logger.warning("no records for `maru explain`: %s; name a directory of this user in maru_run_dir", e)
        return None


def _budgets(settings: Settings, device: str) -> Budgets:
    usual = _INFLIGHT_BYTES.get(device, 1 << 30)
    store = settings.store_bytes or usual
    return Budgets(settings.load_bytes or usual, store, _WAITING_FACTOR * store)


def _memory_line(settings: Settings, ranks: Ranks) -> str:
    """What one node gives for all ranks of this engine."""
    parts = []
    cpu, cxl = settings.cpu_pool_bytes, settings.cxl_pool_bytes
    if cpu:
        parts.append(f"cpu {cpu} bytes for each of {ranks.size} ranks, {cpu * ranks.size} in all")
        if nodes := settings.cpu_numa_nodes:
            parts.append("from NUMA node" + f"{'s' * (len(nodes) > 1)} " + ", ".join(map(str, nodes)))
        if settings.cpu_hugepages != "auto":
            parts.append(f"huge pages {settings.cpu_hugepages}")
    if settings.backend != "cpu":
        bound = f"at most {cxl} bytes of cxl a rank" if cxl else "cxl as the server grants it"
        parts.append(f"{bound}, in regions of {settings.region_bytes} bytes")
    return "; ".join(parts)


def _configure(vllm_config: Any, kv_cache_config: Any) -> tuple[Settings, KVShape, Ranks, int]:
    """Settings, shape, ranks and blocks of a chunk; one SettingsError for everything that is wrong."""
    transfer = vllm_config.kv_transfer_config
    problems: list[str] = []
    settings: Settings | None = None
    try:
        settings = parse_settings(
            transfer.kv_connector_extra_config or {},
            engine_id=str(transfer.engine_id),
            kv_role=str(transfer.kv_role),
            load_failure_policy=getattr(transfer, "kv_load_failure_policy", None),
        )
    except SettingsError as e:
        problems += e.problems
    problems += unsupported_features(vllm_config)
    shape: KVShape | None = None
    ranks = Ranks()
    try:
        shape = kv_shape(vllm_config, kv_cache_config)
        ranks = kv_ranks(vllm_config, kv_cache_config)
    except Unsupported as e:
        problems.append(str(e))
    chunk_blocks = 0
    if settings is not None and shape is not None:
        chunk_blocks = settings.chunk_tokens // shape.block_tokens
        if chunk_blocks == 0:
            problems.append(
                f"maru_kv_chunk_tokens={settings.chunk_tokens} is less than one engine block of {shape.block_tokens} tokens"
            )
    if settings is not None and len(settings.cpu_numa_nodes) not in (0, 1, ranks.size):
        problems.append(
            f"maru_cpu_numa_node={list(settings.cpu_numa_nodes)} names {len(settings.cpu_numa_nodes)} nodes, "
            f"allowed: one for all {ranks.size} ranks, or one for each"
        )
    if problems:
        raise SettingsError(problems)
    assert settings is not None and shape is not None
    return settings, shape, ranks, chunk_blocks
