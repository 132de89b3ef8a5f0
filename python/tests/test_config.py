"""MaruConfig: names, order, defaults, texts of errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import maru
import maru_common
import maru_handler
import maru_handler.memory
import maru_shm
from maru import AllocHandle, MaruConfig, MaruHandle, MemoryInfo


def test_defaults_and_order() -> None:
    c = MaruConfig()
    assert [(f.name, getattr(c, f.name)) for f in dataclasses.fields(c) if f.name != "instance_id"] == [
        ("server_url", "tcp://localhost:5555"),
        ("pool_size", 104857600),
        ("chunk_size_bytes", 1048576),
        ("auto_connect", True),
        ("timeout_ms", 2000),
        ("use_async_rpc", True),
        ("max_inflight", 64),
        ("eager_map", True),
        ("auto_expand", True),
        ("expand_size", None),
        ("rm_address", "127.0.0.1:9850"),
        ("enable_stats", False),
    ]
    positional = MaruConfig("tcp://h:1", "me", 10, 5, False, 7)
    assert (positional.server_url, positional.instance_id, positional.pool_size) == ("tcp://h:1", "me", 10)
    assert (positional.chunk_size_bytes, positional.auto_connect, positional.timeout_ms) == (5, False, 7)
    a, b = MaruConfig().instance_id, MaruConfig().instance_id
    assert a and b and a != b


def test_lmcache_keywords() -> None:
    c = MaruConfig(
        server_url="tcp://h:1",
        instance_id=None,
        pool_size=4 << 30,
        chunk_size_bytes=33554433,
        auto_connect=False,
        timeout_ms=5000,
        use_async_rpc=True,
        max_inflight=64,
        eager_map=True,
    )
    assert c.chunk_size_bytes == 33554433


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"chunk_size_bytes": 0}, "chunk_size_bytes must be positive"),
        ({"chunk_size_bytes": -5}, "chunk_size_bytes must be positive"),
        ({"pool_size": 10, "chunk_size_bytes": 20}, r"pool_size \(10\) must be >= chunk_size_bytes \(20\)"),
        ({"expand_size": 1 << 21, "auto_expand": False}, "expand_size requires auto_expand=True"),
        ({"expand_size": 10}, r"expand_size \(10\) must be >= chunk_size_bytes \(1048576\)"),
        ({"pool_size": "4G"}, "pool_size must be an integer"),
        ({"timeout_ms": 0}, "timeout_ms must be positive"),
    ],
)
def test_refusals(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MaruConfig(**fields)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, want in (("1", True), ("YES", True), ("on", True), ("0", False), ("No", False), ("off", False)):
        monkeypatch.setenv("MARU_EAGER_MAP", word)
        monkeypatch.setenv("MARU_STAT", word)
        c = MaruConfig(eager_map=not want, enable_stats=not want)
        assert (c.eager_map, c.enable_stats) == (want, want)
    monkeypatch.setenv("MARU_EAGER_MAP", "maybe")
    with pytest.raises(ValueError, match="MARU_EAGER_MAP='maybe'"):
        MaruConfig()


def test_compatibility_names() -> None:
    assert maru_common.MaruConfig is maru.MaruConfig
    assert maru_handler.MaruHandler is maru.MaruHandler
    assert maru_handler.memory.AllocHandle is maru.AllocHandle
    assert maru_shm.MaruHandle is maru.MaruHandle
    for name in ("MemoryInfo", "MappedRegion", "OwnedRegion", "DaxMapper", "OwnedRegionManager", "PagedMemoryAllocator"):
        assert hasattr(maru_handler.memory, name)
    assert maru_shm.DaxType.FS_DAX == 1
    assert maru_shm.MaruPoolInfo().pool_id == 0
    for gone in (maru_handler.RpcClient, maru_shm.MaruShmClient):
        with pytest.raises(RuntimeError, match="not there any more"):
            gone("tcp://localhost:5555")


def test_types() -> None:
    h = AllocHandle(buf=memoryview(b""), _region_id=3, _page_index=4, _size=5)
    assert (h.region_id, h.page_index, h.size) == (3, 4, 5)
    assert h == h
    assert h != AllocHandle(buf=memoryview(b""), _region_id=3, _page_index=4, _size=5)
    assert MemoryInfo(memoryview(b"x")).region_id == 0
    m = MaruHandle(1, 2, 3, 4)
    assert m.pack() == b"".join(i.to_bytes(8, "little") for i in (1, 2, 3, 4))
    assert MaruHandle.unpack(m.pack()) == m
    assert MaruHandle.from_dict(m.to_dict()) == m
    assert MaruHandle() == MaruHandle(0, 0, 0, 0)
    with pytest.raises(ValueError):
        MaruHandle.unpack(b"short")
