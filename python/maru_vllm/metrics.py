"""The connector's counts as vLLM's KVConnectorStats and as Prometheus metrics ``vllm:maru_*``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from maru_vllm.stats import METRICS, merge

__all__ = ["MaruPromMetrics", "MaruStats"]


@dataclass
class MaruStats(KVConnectorStats):  # type: ignore[misc]  # vLLM has no types for us
    """Counts of one step, or of several added up. ``data`` is what Tally.take() gave."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        counters = self.data.get("counters", {})

        def total(name: str) -> float:
            return float(sum(v for k, v in counters.items() if k.partition("|")[0] == name))

        loads = self.data.get("samples", {}).get("load_seconds", [])
        return {
            "Maru lookups": total("lookups"),
            "hit tokens": total("hit_tokens"),
            "miss tokens": total("miss_tokens"),
            "loaded MiB": round(total("load_bytes") / (1 << 20), 1),
            "mean load ms": round(1e3 * sum(loads) / len(loads), 2) if loads else 0.0,
            "failed loads": counters.get("loads|failed", 0),
            "stored MiB": round(total("store_bytes") / (1 << 20), 1),
            "chunks not stored": counters.get("store_chunks|dropped", 0) + counters.get("store_chunks|failed", 0),
            "prefill seconds saved": round(total("prefill_seconds_saved"), 3),
        }

    def is_empty(self) -> bool:
        return not any(self.data.get(k) for k in ("counters", "gauges", "samples"))


class MaruPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Registers every metric of stats.METRICS with all its labels at start, so that a zero is seen as a zero."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds = {"counter": self._counter_cls, "gauge": self._gauge_cls, "histogram": self._histogram_cls}
        self._metrics: dict[tuple[int, str], Any] = {}
        for name, m in METRICS.items():
            options: dict[str, Any] = {"buckets": m.buckets} if m.kind == "histogram" else {}
            metric = kinds[m.kind](
                name=f"vllm:maru_{name}",
                documentation=m.text + ".",
                labelnames=[*labelnames, m.label] if m.label else labelnames,
                **options,
            )
            for engine, values in per_engine_labelvalues.items():
                for label in m.values or ("",):
                    key = f"{name}|{label}" if label else name
                    self._metrics[engine, key] = metric.labels(*values, label) if label else metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.get("counters", {}).items():
            if (metric := self._metrics.get((engine_idx, key))) is not None:
                metric.inc(value)
        for key, value in transfer_stats_data.get("gauges", {}).items():
            if (metric := self._metrics.get((engine_idx, key))) is not None:
                metric.set(value)
        for key, values in transfer_stats_data.get("samples", {}).items():
            if (metric := self._metrics.get((engine_idx, key))) is not None:
                for value in values:
                    metric.observe(value)
