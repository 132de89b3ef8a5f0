"""The guide names every setting, metric and reason that there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from maru_vllm import settings
from maru_vllm.content import BYPASS_REASONS
from maru_vllm.stats import METRICS, MISS_REASONS

GUIDE = (Path(__file__).parents[2] / "docs" / "guide" / "vllm.md").read_text()


def first_cells(section: str) -> list[str]:
    text = GUIDE.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in rows for name in re.findall(r"`([^`]+)`", cell)]


def test_settings() -> None:
    assert sorted(first_cells("Settings")) == sorted(settings._KNOWN)


def test_defaults_are_what_the_table_says() -> None:
    s = settings.parse_settings({"maru_cache_namespace": "m"}, engine_id="e", kv_role="kv_both", load_failure_policy="recompute")
    text = GUIDE.split("## Settings\n", 1)[1].split("\n## ", 1)[0]
    said = {m.group(1): m.group(2) for m in re.finditer(r"^\| `(\w+)` \| [^|]*\| `([^`]+)` \|", text, re.MULTILINE)}
    for key, value in {
        "maru_server_url": s.server_url,
        "maru_storage_backend": s.backend,
        "maru_kv_chunk_tokens": str(s.chunk_tokens),
        "maru_lookup_timeout_ms": str(s.lookup_timeout_ms),
        "maru_timeout_ms": str(s.timeout_ms),
        "maru_copy_threads": str(s.copy_threads),
        "maru_device_copy": s.device_copy,
        "maru_checksums": str(s.checksums).lower(),
        "maru_async_store": str(s.async_store).lower(),
        "maru_eager_map": str(s.eager_map).lower(),
        "maru_multimodal": str(s.multimodal).lower(),
    }.items():
        assert said[key] == value, key
    for key, value in {
        "maru_pool_size": s.region_bytes,
    }.items():
        assert settings.parse_size(said[key]) == value, key
    assert not s.load_bytes and not s.store_bytes, "auto: the connector picks by the device"
    assert said["maru_load_inflight_size"] == said["maru_store_inflight_size"] == "auto"
    assert s.min_hit_tokens is None and said["maru_min_hit_tokens"] == "auto"


def test_metrics() -> None:
    assert sorted(first_cells("Metrics")) == sorted(f"vllm:maru_{name}" for name in METRICS)
    for name, m in METRICS.items():
        if m.label and name != "miss_tokens":
            row = next(line for line in GUIDE.splitlines() if line.startswith(f"| `vllm:maru_{name}`"))
            assert f"`{m.label}`: {', '.join(m.values)}" in row, name
    assert METRICS["bypassed_requests"].values == BYPASS_REASONS


def test_reasons() -> None:
    assert first_cells("Why was there no hit?") == list(MISS_REASONS)
    go = (Path(__file__).parents[2] / "internal" / "cli" / "explain.go").read_text()
    texts = go.split("var missTexts", 1)[1].split("\n}", 1)[0]
    assert re.findall(r'^\t"(\w+)":', texts, re.MULTILINE) == list(MISS_REASONS)
