"""The ten faults of the original, each of which must be absent here."""

from __future__ import annotations

import gc
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from conftest import CHUNK, POOL, Child, System
from maru import MaruConfig, MaruHandler
from test_handler import eventually, put, value

Key = Callable[[object], str]


def config(system: System, **fields: Any) -> MaruConfig:
    return MaruConfig(server_url=system.url, pool_size=POOL, chunk_size_bytes=CHUNK, **fields)


@pytest.fixture
def two(system: System) -> Iterator[tuple[MaruHandler, MaruHandler]]:
    with MaruHandler(config(system)) as a, MaruHandler(config(system)) as b:
        yield a, b


def test_1_free_of_a_stored_page(two: tuple[MaruHandler, MaruHandler], key: Key) -> None:
    """Its key would go on naming a page with other bytes."""
    a, b = two
    handle = a.alloc(4)
    handle.buf[:] = b"keep"
    assert a.store(key("k"), handle)
    with pytest.raises(ValueError, match="stored"):
        a.free(handle)
    for i in range(8):
        assert put(a, key(i), b"over")
    assert value(b, key("k")) == b"keep" == value(a, key("k"))


def test_2_delete_by_another_and_store_again(two: tuple[MaruHandler, MaruHandler], key: Key) -> None:
    a, b = two
    assert put(a, key("k"), b"old")
    assert b.delete(key("k")) is True
    assert a.exists(key("k")) is False
    assert put(a, key("k"), b"new") is True
    assert a.exists(key("k")) is True
    assert value(b, key("k")) == b"new"


def test_3_server_away(new_system: Callable[[], System], key: Key) -> None:
    s = new_system()
    with MaruHandler(config(s, timeout_ms=500)) as h:
        assert put(h, key("k"), b"v")
        s.stop()
        assert h.exists(key("k")) is False
        assert h.batch_exists([key("k"), key("b"), key("c")]) == [False] * 3
        assert h.batch_retrieve([key("k")] * 4) == [None] * 4
        assert h.batch_pin([key("k")] * 2) == [False] * 2
        assert h.batch_unpin([key("z")] * 2) == [False] * 2
        assert h.retrieve(key("k")) is None
        assert h.delete(key("k")) is False
        assert h.healthcheck() is False
        handle = h.alloc(1)
        assert h.store(key("new"), handle) is False
        assert h.batch_store([key("x"), key("y")], [b"1", b"2"]) == [False, False]
        assert h.get_stats()["kv_manager"]["total_entries"] == 0


def test_4_delete_under_a_reader(two: tuple[MaruHandler, MaruHandler], key: Key) -> None:
    a, b = two
    assert put(a, key("k"), b"under the reader's eyes")
    info = b.retrieve(key("k"))
    assert info is not None
    assert a.delete(key("k")) is False
    for i in range(80):  # more than the first region's pages
        assert put(a, key(i), b"overwritten")
    assert bytes(info.view) == b"under the reader's eyes"
    del info
    gc.collect()
    assert eventually(lambda: a.delete(key("k")))


def test_4_pins_of_a_crashed_client_end(system: System, child: Child, key: Key) -> None:
    with MaruHandler(config(system)) as a:
        assert put(a, key("k"), b"v")
        p = child(
            "from maru import *\n"
            f"h = MaruHandler(MaruConfig(url, pool_size={POOL}, chunk_size_bytes={CHUNK}))\n"
            "assert h.connect() and h.pin(args[0])\n"
            "print('pinned')\n"
            "sys.stdin.read()\n",
            key("k"),
        )
        assert p.stdout is not None
        assert p.stdout.readline() == "pinned\n"
        assert a.delete(key("k")) is False
        p.send_signal(signal.SIGKILL)
        p.wait()
        assert eventually(lambda: a.delete(key("k")), 30)


def test_5_region_of_a_client_that_died(system: System, child: Child) -> None:
    with MaruHandler(config(system)) as a:
        before = a.get_stats()["allocation_manager"]
        p = child(
            "from maru import *\n"
            f"h = MaruHandler(MaruConfig(url, pool_size={POOL}, chunk_size_bytes={CHUNK}))\n"
            "assert h.connect()\n"
            "print('open')\n"
            "sys.stdin.read()\n"
        )
        assert p.stdout is not None
        assert p.stdout.readline() == "open\n"
        during = a.get_stats()["allocation_manager"]
        assert during["active_clients"] == before["active_clients"] + 1
        assert during["total_allocated"] > before["total_allocated"]
        p.send_signal(signal.SIGKILL)
        p.wait()
        assert eventually(lambda: a.get_stats()["allocation_manager"] == before, 30), a.get_stats()["allocation_manager"]


def test_6_one_key_twice_in_a_batch(two: tuple[MaruHandler, MaruHandler], key: Key) -> None:
    a, _ = two

    def free() -> int:
        return int(a.get_stats()["store_regions"]["total_free_pages"])

    before = free()
    first, second = a.alloc(5), a.alloc(6)
    first.buf[:], second.buf[:] = b"first", b"second"
    assert a.batch_store([key("k"), key("k")], [first, second]) == [True, True]
    assert value(a, key("k")) == b"first"
    assert eventually(lambda: free() == before - 1)
    assert a.delete(key("k"))
    assert eventually(lambda: free() == before)


def test_7_values_outlive_their_writer_and_can_be_deleted(system: System, key: Key) -> None:
    with MaruHandler(config(system)) as reader:
        before = reader.get_stats()["allocation_manager"]["total_allocated"]
        writer = MaruHandler(config(system))
        assert writer.connect()
        assert put(writer, key("a"), b"1") and put(writer, key("b"), b"2")
        writer.close()
        assert value(reader, key("a")) == b"1"
        assert reader.delete(key("a")) is True
        assert value(reader, key("b")) == b"2"
        gc.collect()
        assert eventually(lambda: reader.delete(key("b")))
        assert eventually(lambda: reader.get_stats()["allocation_manager"]["total_allocated"] <= before, 30)


def test_8_foreign_views_are_read_only(two: tuple[MaruHandler, MaruHandler], key: Key) -> None:
    a, b = two
    assert put(a, key("k"), b"content")
    for h in two:
        info = h.retrieve(key("k"))
        assert info is not None and info.view.readonly
        with pytest.raises(TypeError):
            info.view[0] = 0
        region = h.get_buffer_view(info.region_id, info.page_index * CHUNK, 7)
        assert region is not None and bytes(region) == b"content"
        assert region.readonly is (h is b)


def test_9_duplicates_are_true_and_change_nothing(two: tuple[MaruHandler, MaruHandler], key: Key) -> None:
    a, b = two
    assert put(a, key("k"), b"first")
    assert put(b, key("k"), b"of another size") is True
    assert value(a, key("k")) == b"first" == value(b, key("k"))


def test_10_calls_to_the_server(new_system: Callable[[], System], key: Key) -> None:
    s = new_system()

    def calls() -> dict[str, int]:
        with urllib.request.urlopen(s.addresses["http"] + "/metrics") as r:
            text = r.read().decode()
        rows = re.findall(r'^maru_server_hot_requests_total\{op="(\w+)"\} (\S+)$', text, re.M)
        return {op: int(float(n)) for op, n in rows}

    def cost(action: Callable[[], object]) -> dict[str, int]:
        before = calls()
        action()
        after = calls()
        # Releases are made in the background, and belong to whatever was before.
        return {op: after[op] - n for op, n in before.items() if after[op] != n and op != "release"}

    with MaruHandler(config(s)) as h:
        handles = [h.alloc(1) for _ in range(10)]
        assert cost(lambda: h.free(h.alloc(1))) == {}
        assert cost(lambda: h.store(key("k"), handles[0])) == {"commit": 1}
        assert cost(lambda: h.batch_store([key(i) for i in range(8)], handles[1:9])) == {"commit": 1}
        assert cost(lambda: h.batch_exists([key(i) for i in range(8)])) == {"probe": 1}
        assert cost(lambda: h.batch_retrieve([key(i) for i in range(8)])) == {"acquire": 1}
        assert cost(lambda: h.pin(key("k"))) == {"acquire": 1}
