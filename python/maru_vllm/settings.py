"""Settings of the connector: ``kv_connector_extra_config`` and what of vLLM's own configuration it needs.

Every problem is reported at once, by name, with the value and what is allowed
(CFG-01..04, CFG-07). Sizes are bytes; ``"4G"`` is 4 x 2**30.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Settings", "SettingsError", "parse_settings", "parse_size"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*$", re.IGNORECASE)
_BACKENDS = ("cpu", "cxl", "mixed")
_ROLES = ("kv_both",)
_DEFAULT_POOL = 1 << 30  # the original's default of maru_pool_size
_DEFAULT_CHUNK_TOKENS = 256
_MAX_NODE = 1022  # the library's bound


class SettingsError(ValueError):
    """The configuration cannot be used. ``problems`` has one line for each reason."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("MaruKVConnector cannot start:\n  - " + "\n  - ".join(problems))


def parse_size(value: Any) -> int:
    """Bytes of ``4096``, ``"4G"``, ``"512M"`` or ``"1.5GiB"``. ValueError says what is allowed."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is no size, allowed: a count of bytes or text such as '4G'")
    if isinstance(value, str):
        m = _SIZE.match(value)
        if m is None:
            raise ValueError(f"{value!r} is no size, allowed: a count of bytes or text such as '4G', '512M', '1.5GiB'")
        number = float(m.group(1)) * _UNITS[m.group(2).upper()]
    else:
        number = float(value)
    if not math.isfinite(number) or number <= 0 or number != int(number):
        raise ValueError(f"{value!r} must be a positive whole count of bytes")
    return int(number)


@dataclass(frozen=True)
class Settings:
    """What the connector was told. Units stand in the names or are tokens and bytes as said.

    server_url: address of maru-server. backend: cpu, cxl or mixed. cpu_pool_bytes: private memory
    of each worker. cpu_numa_nodes: where that memory comes from; one node for all ranks or one a
    rank, empty: as the kernel likes. cpu_hugepages: its pages. cxl_pool_bytes: bound of this
    worker's cxl grants (0: the server's). region_bytes: first cxl region and growth. chunk_tokens:
    tokens of one object before it is aligned down to whole blocks. min_hit_tokens: a shorter hit is
    left to the engine; None: learned. load_bytes, store_bytes: what the library copies at a time;
    0: as fits the device. lookup_timeout_ms: a lookup without an answer is a miss. run_dir:
    directory of the records for `maru explain`; "" is the default one, None is none.
    lora_digests: digests of adapters by name. multimodal: whether inputs other than text
    are cached by the engine's identifiers.
    """

    server_url: str
    backend: str
    cache_namespace: str
    engine_id: str
    instance_id: str
    cpu_pool_bytes: int = 0
    cpu_numa_nodes: tuple[int, ...] = ()
    cpu_hugepages: str = "auto"
    cxl_pool_bytes: int = 0
    region_bytes: int = 0
    write_order: tuple[str, ...] = ()
    read_order: tuple[str, ...] = ()
    chunk_tokens: int = _DEFAULT_CHUNK_TOKENS
    async_store: bool = True
    eager_map: bool = True
    checksums: bool = True
    copy_threads: int = 2
    min_hit_tokens: int | None = None
    timeout_ms: int = 2000
    lookup_timeout_ms: int = 1000
    load_bytes: int = 0
    store_bytes: int = 0
    device_copy: str = "auto"
    staging_bytes: int = 0
    run_dir: str | None = ""
    lora_digests: Mapping[str, str] = field(default_factory=dict)
    multimodal: bool = True
    notes: tuple[str, ...] = field(default=(), compare=False)


_KNOWN = {
    "maru_server_url",
    "maru_storage_backend",
    "maru_cpu_pool_size",
    "maru_cpu_numa_node",
    "maru_cpu_hugepages",
    "maru_cxl_pool_size",
    "maru_pool_size",
    "maru_write_order",
    "maru_read_order",
    "maru_engine_id",
    "maru_cache_namespace",
    "maru_kv_chunk_tokens",
    "maru_async_load",
    "maru_async_store",
    "maru_instance_id",
    "maru_eager_map",
    "maru_chunk_size",
    "maru_checksums",
    "maru_copy_threads",
    "maru_min_hit_tokens",
    "maru_timeout_ms",
    "maru_lookup_timeout_ms",
    "maru_load_inflight_size",
    "maru_store_inflight_size",
    "maru_device_copy",
    "maru_device_staging_size",
    "maru_run_dir",
    "maru_lora_digests",
    "maru_multimodal",
}

_COMPLETE = (
    '{"kv_connector": "MaruKVConnector", "kv_connector_module_path": "maru_vllm", "kv_role": "kv_both", '
    '"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"maru_server_url": '
    '"tcp://localhost:5555", "maru_storage_backend": "cxl", "maru_pool_size": "4G", '
    '"maru_cache_namespace": "NAME-OF-MODEL@REVISION"}}'
)


class _Reader:
    """Reads keys of one mapping and gathers what is wrong with them."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        self.extra = extra
        self.problems: list[str] = []

    def given(self, key: str) -> bool:
        return self.extra.get(key) is not None

    def text(self, key: str, default: str) -> str:
        value = self.extra.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or not value.strip():
            self.problems.append(f"{key}={value!r} must be text that is not blank")
            return default
        return value.strip()

    def size(self, key: str, default: int) -> int:
        if not self.given(key):
            return default
        try:
            return parse_size(self.extra[key])
        except ValueError as e:
            self.problems.append(f"{key}: {e}")
            return default

    def size_or_auto(self, key: str) -> int:
        """0 stands for auto."""
        return 0 if self.extra.get(key) == "auto" else self.size(key, 0)

    def whole(self, key: str, default: int, low: int, high: int) -> int:
        value = self.extra.get(key, default)
        if isinstance(value, str) and value.strip().isdigit():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.problems.append(f"{key}={value!r} must be a whole number from {low} to {high}")
            return default
        return value

    def switch(self, key: str, default: bool) -> bool:
        value = self.extra.get(key, default)
        if isinstance(value, bool):
            return value
        if isinstance(value, (str, int)):
            word = str(value).strip().lower()
            if word in ("1", "true", "yes", "on"):
                return True
            if word in ("0", "false", "no", "off"):
                return False
        self.problems.append(f"{key}={value!r} must be true or false")
        return default

    def choice(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        value = self.text(key, default)
        if value not in allowed:
            self.problems.append(f"{key}={value!r} must be one of {list(allowed)}")
            return default
        return value

    def digests(self, key: str) -> dict[str, str]:
        value = self.extra.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(
            isinstance(k, str) and isinstance(v, str) and k and 8 <= len(v) <= 256 for k, v in value.items()
        ):
            self.problems.append(
                f"{key}={value!r} must map names of adapters to digests of their weights, text of 8 to 256 characters"
            )
            return {}
        return dict(value)

    def run_dir(self) -> str | None:
        value = self.extra.get("maru_run_dir", "")
        if value is None or value is False or (isinstance(value, str) and value.strip().lower() == "off"):
            return None
        if not isinstance(value, str):
            self.problems.append(f'maru_run_dir={value!r} must be a directory, or "off"')
            return None
        return value.strip()

    def nodes(self, key: str) -> tuple[int, ...]:
        value = self.extra.get(key)
        if value is None:
            return ()
        items = value.split(",") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
        items = [int(i) if isinstance(i, str) and i.strip().isdigit() else i for i in items]
        if not items or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= _MAX_NODE for i in items):
            self.problems.append(
                f"{key}={value!r} must be a NUMA node from 0 to {_MAX_NODE}, or one for each rank such as '0,0,1,1'"
            )
            return ()
        return tuple(items)

    def min_hit(self) -> int | None:
        value = self.extra.get("maru_min_hit_tokens")
        if value is None or (isinstance(value, str) and value.strip().lower() == "auto"):
            return None
        return self.whole("maru_min_hit_tokens", 0, 0, 1 << 20)

    def order(self, key: str, backend: str) -> tuple[str, ...]:
        allowed = {"cpu": ("cpu",), "cxl": ("cxl",), "mixed": ("cpu", "cxl")}[backend]
        value = self.extra.get(key)
        if value is None:
            return allowed
        items = [v.strip() for v in value.split(",")] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or sorted(map(str, items)) != sorted(allowed):
            self.problems.append(f"{key}={value!r} must be an order of {list(allowed)} on the {backend} backend")
            return allowed
        return tuple(str(i) for i in items)


def parse_settings(extra: Mapping[str, Any], *, engine_id: str, kv_role: str, load_failure_policy: str | None) -> Settings:
    """Reads ``kv_connector_extra_config``; raises :class:`SettingsError` with every problem.

    engine_id, kv_role and load_failure_policy are those of vLLM's KVTransferConfig.
    """
    r = _Reader(extra)
    for key in sorted(set(extra) - _KNOWN):
        close = difflib.get_close_matches(key, _KNOWN, n=1)
        hint = f", did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(_KNOWN))}"
        r.problems.append(f"{key} is no setting of this connector{hint}")

    if load_failure_policy != "recompute":
        r.problems.append(
            f'kv_load_failure_policy={load_failure_policy!r} must be "recompute": with "fail" a lost cache entry '
            f"would fail the user's request. A complete setting: --kv-transfer-config '{_COMPLETE}'"
        )
    if kv_role not in _ROLES:
        r.problems.append(f'kv_role={kv_role!r} must be "kv_both"')

    url = r.text("maru_server_url", "tcp://localhost:5555")
    urls = [u.strip() for u in url.split(",") if u.strip()]
    if not urls:
        r.problems.append(f"maru_server_url={url!r} names no server, allowed: tcp://HOST:PORT")
    elif len(urls) > 1:
        r.problems.append(
            f"maru_server_url={url!r} names {len(urls)} servers; several pools come with the remote_cxl backend, "
            "which this version does not have: name one"
        )

    backend = r.text("maru_storage_backend", "cxl")
    if backend not in _BACKENDS:
        also = " (remote_cxl is not in this version)" if backend == "remote_cxl" else ""
        r.problems.append(f"maru_storage_backend={backend!r} must be one of {list(_BACKENDS)}{also}")
        backend = "cxl"
    cpu, cxl, region = _pools(r, backend)

    namespace = r.text("maru_cache_namespace", "")
    if not r.given("maru_cache_namespace"):
        r.problems.append(
            "maru_cache_namespace is missing: it names weights that never change under this name, "
            "for example 'llama-3.1-8b@0e9e39f'. Engines share KV only inside one namespace (ID-09)"
        )
    if not r.switch("maru_async_load", True):
        r.problems.append("maru_async_load=false is not offered: loads are asynchronous only")

    notes = []
    if r.given("maru_chunk_size"):
        r.size("maru_chunk_size", 0)
        notes.append("maru_chunk_size is not used: the page size follows from maru_kv_chunk_tokens and the model")
    settings = Settings(
        server_url=urls[0] if urls else url,
        backend=backend,
        cache_namespace=namespace,
        engine_id=r.text("maru_engine_id", engine_id),
        instance_id=r.text("maru_instance_id", engine_id),
        cpu_pool_bytes=cpu,
        cpu_numa_nodes=r.nodes("maru_cpu_numa_node"),
        cpu_hugepages=r.choice("maru_cpu_hugepages", "auto", ("auto", "off", "2M", "1G")),
        cxl_pool_bytes=cxl,
        region_bytes=region,
        write_order=r.order("maru_write_order", backend),
        read_order=r.order("maru_read_order", backend),
        chunk_tokens=r.whole("maru_kv_chunk_tokens", _DEFAULT_CHUNK_TOKENS, 1, 1 << 20),
        async_store=r.switch("maru_async_store", True),
        eager_map=r.switch("maru_eager_map", True),
        checksums=r.switch("maru_checksums", True),
        copy_threads=r.whole("maru_copy_threads", 2, 1, 64),
        min_hit_tokens=r.min_hit(),
        timeout_ms=r.whole("maru_timeout_ms", 2000, 10, 600_000),
        lookup_timeout_ms=r.whole("maru_lookup_timeout_ms", 1000, 1, 600_000),
        load_bytes=r.size_or_auto("maru_load_inflight_size"),
        store_bytes=r.size_or_auto("maru_store_inflight_size"),
        device_copy=r.choice("maru_device_copy", "auto", ("auto", "staged", "direct")),
        staging_bytes=r.size("maru_device_staging_size", 0),
        run_dir=r.run_dir(),
        lora_digests=r.digests("maru_lora_digests"),
        multimodal=r.switch("maru_multimodal", True),
        notes=tuple(notes),
    )
    if r.problems:
        raise SettingsError(r.problems)
    return settings


def _pools(r: _Reader, backend: str) -> tuple[int, int, int]:
    """(cpu bytes, bound of cxl bytes, bytes of a cxl region) for a backend."""
    if backend != "cxl" and r.given("maru_pool_size"):
        r.problems.append(
            f"maru_pool_size is the size of cxl regions and has no meaning on the {backend} backend (CFG-03): "
            "use maru_cpu_pool_size" + (" and maru_cxl_pool_size" if backend == "mixed" else "")
        )
    if backend == "cpu" and r.given("maru_cxl_pool_size"):
        r.problems.append("maru_cxl_pool_size has no meaning on the cpu backend")
    for key in ("maru_cpu_pool_size", "maru_cpu_numa_node", "maru_cpu_hugepages"):
        if backend == "cxl" and r.given(key):
            r.problems.append(f"{key} has no meaning on the cxl backend: use mixed, or maru_pool_size")
    cpu = cxl = region = 0
    if backend in ("cpu", "mixed"):
        cpu = r.size("maru_cpu_pool_size", 0)
        if not r.given("maru_cpu_pool_size"):
            r.problems.append(f"maru_cpu_pool_size is missing: the {backend} backend needs it, for example '8G'")
    if backend == "mixed":
        cxl = r.size("maru_cxl_pool_size", 0)
        if not r.given("maru_cxl_pool_size"):
            r.problems.append("maru_cxl_pool_size is missing: the mixed backend needs it, for example '32G'")
        region = min(cxl, _DEFAULT_POOL)
    if backend == "cxl":
        region = r.size("maru_pool_size", _DEFAULT_POOL)
        cxl = r.size("maru_cxl_pool_size", 0)
    return cpu, cxl, region
