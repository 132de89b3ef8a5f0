"""Counts of the connector between two reports, and what each of them means.

A role adds to its :class:`Tally`; the engine takes what came together once a step,
adds up its workers' and hands it to its metrics (metrics.py). Labels are bounded:
one label a metric at most, and its values are listed here.

Nothing here imports vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["METRICS", "MISS_REASONS", "Metric", "Tally", "merge"]

MISS_REASONS = (
    "not_stored",
    "evicted",
    "pending",
    "unreachable",
    "timeout",
    "too_short",
    "not_worth",
    "failed",
    "no_read",
    "bypass",
)
"""Why tokens of a prompt were computed: no replica; one that this engine had stored;
being written now; no server; no answer in time; less than a chunk or the token that
must be computed; a load costs more; a load failed; the request must not read; the
request bypasses."""

_MEDIA = ("cpu", "cxl", "ssd", "other")
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True)
class Metric:
    """kind: counter, gauge or histogram. A gauge over several workers is the highest."""

    kind: str
    text: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS: dict[str, Metric] = {
    "lookups": Metric("counter", "Lookups that were answered", "outcome", ("hit", "miss", "unreachable", "timeout")),
    "lookup_tokens": Metric("counter", "Tokens of whole chunks that lookups asked for"),
    "lookup_seconds": Metric("histogram", "Seconds from a lookup to its answer", buckets=_SECONDS),
    "hit_tokens": Metric("counter", "Tokens whose load was ordered, by the medium they lay in", "medium", _MEDIA),
    "miss_tokens": Metric("counter", "Tokens of prompts that were computed, by reason", "reason", MISS_REASONS),
    "requests": Metric("counter", "Requests scheduled for the first time", "result", ("hit", "miss", "bypass")),
    "bypassed_requests": Metric(
        "counter",
        "Requests that neither read nor write",
        "reason",
        ("prompt_embeds", "lora", "multimodal", "streaming", "pooling", "unknown_content", "salt", "reset"),
    ),
    "loads": Metric("counter", "Loads of requests that ended", "outcome", ("ok", "failed")),
    "loaded_tokens": Metric("counter", "Tokens that were loaded"),
    "load_failed_tokens": Metric("counter", "Tokens offered as a hit whose load failed"),
    "load_seconds": Metric("histogram", "Seconds from the order of a load to its report", buckets=_SECONDS),
    "load_bytes": Metric("counter", "Bytes copied into the engine's blocks, over all workers"),
    "prefill_seconds_saved": Metric("counter", "Loaded tokens times what a token costs to compute now"),
    "load_waits": Metric("counter", "Requests that waited for another request's load of the same prefix"),
    "store_chunks": Metric(
        "counter", "Chunks stored or not, over all workers", "outcome", ("stored", "already", "dropped", "failed")
    ),
    "store_bytes": Metric("counter", "Bytes copied out of the engine's blocks, over all workers"),
    "store_seconds": Metric("histogram", "Seconds from the order of a store to its end, a worker", buckets=_SECONDS),
    "loads_in_flight_bytes": Metric("gauge", "Bytes of loads that the library has now, a worker"),
    "loads_waiting_chunks": Metric("gauge", "Chunks of loads that wait for the budget, a worker"),
    "stores_in_flight_bytes": Metric("gauge", "Bytes of stores that the library has now, a worker"),
    "stores_waiting_chunks": Metric("gauge", "Chunks of stores that wait for the budget, a worker"),
    "min_hit_tokens": Metric("gauge", "The shortest hit that is worth a load, as known now"),
}


class Tally:
    """What was counted since the last take(). One thread."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._samples: dict[str, list[float]] = {}

    def add(self, name: str, value: float = 1, label: str = "") -> None:
        """Adds to a counter."""
        if label:
            name = f"{name}|{label}"
        self._counters[name] = self._counters.get(name, 0) + value

    def gauge(self, name: str, value: float) -> None:
        """Sets a gauge; it is reported when it has changed."""
        if self._last.get(name) != value:
            self._gauges[name] = self._last[name] = value

    def sample(self, name: str, value: float) -> None:
        """Adds a value to a histogram."""
        self._samples.setdefault(name, []).append(value)

    def take(self) -> dict[str, Any] | None:
        """What came together, plain data; None when there is nothing."""
        if not (self._counters or self._gauges or self._samples):
            return None
        out = {"counters": self._counters, "gauges": self._gauges, "samples": self._samples}
        self._counters, self._gauges, self._samples = {}, {}, {}
        return out


def merge(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The counts of two workers, or of two times. Counters and samples add up, of gauges the highest stays."""
    counters = dict(a.get("counters", {}))
    for name, value in b.get("counters", {}).items():
        counters[name] = counters.get(name, 0) + value
    gauges = dict(a.get("gauges", {}))
    for name, value in b.get("gauges", {}).items():
        gauges[name] = max(gauges.get(name, value), value)
    samples = {name: list(values) for name, values in a.get("samples", {}).items()}
    for name, values in b.get("samples", {}).items():
        samples.setdefault(name, []).extend(values)
    return {"counters": counters, "gauges": gauges, "samples": samples}
