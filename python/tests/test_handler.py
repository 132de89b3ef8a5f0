"""MaruHandler against a running system: what callers of the original rely on."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from conftest import CHUNK, POOL, System
from maru import AllocHandle, MaruConfig, MaruHandler

Key = Callable[[object], str]


def eventually(condition: Callable[[], bool], timeout: float = 10.0) -> bool:
    """Waits for what the system does in the background."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def config(system: System, **fields: Any) -> MaruConfig:
    fields.setdefault("pool_size", POOL)
    fields.setdefault("chunk_size_bytes", CHUNK)
    return MaruConfig(server_url=system.url, **fields)


@pytest.fixture
def handler(system: System) -> Iterator[MaruHandler]:
    with MaruHandler(config(system)) as h:
        yield h


def put(h: MaruHandler, key: Any, value: bytes) -> bool:
    handle = h.alloc(len(value))
    handle.buf[:] = value
    return h.store(key, handle)


def value(h: MaruHandler, key: Any) -> bytes | None:
    info = h.retrieve(key)
    return None if info is None else bytes(info.view)


# --- life ---


def test_connect_is_idempotent_and_close_too(system: System) -> None:
    h = MaruHandler(config(system))
    assert not h.connected
    assert h.get_owned_region_ids() == []
    assert h.pool_handle is None
    assert h.allocator is None
    assert h.owned_region_manager is None
    assert h.connect() is True
    assert h.connect() is True
    assert h.connected
    h.close()
    h.close()
    assert not h.connected
    assert h.healthcheck() is False


def test_every_call_before_connect_and_after_close(system: System) -> None:
    h = MaruHandler(config(system))
    calls: list[Callable[[], object]] = [
        lambda: h.alloc(1),
        lambda: h.store("k", b"v"),
        lambda: h.retrieve("k"),
        lambda: h.exists("k"),
        lambda: h.pin("k"),
        lambda: h.unpin("k"),
        lambda: h.delete("k"),
        lambda: h.batch_store(["k"], [b"v"]),
        lambda: h.batch_retrieve(["k"]),
        lambda: h.batch_exists(["k"]),
        lambda: h.batch_pin(["k"]),
        lambda: h.batch_unpin(["k"]),
        lambda: h.get_stats(),
        lambda: h.free(AllocHandle(buf=memoryview(b""), _region_id=1, _page_index=0, _size=1)),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"Not connected. Call connect\(\) first."):
            call()
    assert h.connect()
    h.close()
    for call in calls:
        with pytest.raises(RuntimeError, match=r"Not connected|Handler is closing"):
            call()
    assert h.get_buffer_view(1, 0, 1) is None


def test_server_away(caplog: pytest.LogCaptureFixture) -> None:
    h = MaruHandler(MaruConfig(server_url="tcp://127.0.0.1:1", timeout_ms=300))
    with caplog.at_level(logging.ERROR, logger="maru"):
        assert h.connect() is False
    assert "127.0.0.1:1" in caplog.text
    with pytest.raises(RuntimeError, match="cannot connect"), h:
        pass


def test_pool_larger_than_the_device(system: System, caplog: pytest.LogCaptureFixture) -> None:
    h = MaruHandler(config(system, pool_size=8 << 30))
    with caplog.at_level(logging.ERROR, logger="maru"):
        assert h.connect() is False
    assert "8589934592" in caplog.text
    assert not h.connected


def test_context_without_auto_connect(system: System) -> None:
    with MaruHandler(config(system, auto_connect=False)) as h:
        assert not h.connected
        assert h.connect()
    assert not h.connected


def test_connect_again_after_close(system: System, key: Key) -> None:
    h = MaruHandler(config(system))
    assert h.connect()
    assert put(h, key("k"), b"first life")
    h.close()
    assert h.connect()
    assert value(h, key("k")) == b"first life"
    h.close()


# --- pages ---


def test_alloc(handler: MaruHandler) -> None:
    a = handler.alloc(10)
    assert (len(a.buf), a.buf.readonly, a.buf.format, a.size) == (10, False, "B", 10)
    assert a.region_id in handler.get_owned_region_ids()
    whole = handler.alloc(CHUNK)
    assert len(whole.buf) == CHUNK
    assert (a.region_id, a.page_index) != (whole.region_id, whole.page_index)
    with pytest.raises(ValueError, match=f"Requested size {CHUNK + 1} exceeds chunk_size {CHUNK}"):
        handler.alloc(CHUNK + 1)
    with pytest.raises(ValueError, match="negative"):
        handler.alloc(-1)
    view = handler.get_buffer_view(whole.region_id, whole.page_index * CHUNK, CHUNK)
    assert view is not None
    whole.buf[:4] = b"same"
    assert bytes(view[:4]) == b"same"


def test_pool_exhausted(system: System) -> None:
    with MaruHandler(config(system, auto_expand=False)) as h:
        assert h.pool_handle is not None
        count = h.pool_handle.length // CHUNK
        assert h.get_region_page_count(h.pool_handle.region_id) == count
        handles = [h.alloc(1) for _ in range(count)]
        with pytest.raises(ValueError, match="Cannot allocate page: pool exhausted"):
            h.alloc(1)
        h.free(handles.pop())
        h.free(h.alloc(1))


def test_free(handler: MaruHandler) -> None:
    a = handler.alloc(1)
    handler.free(a)
    with pytest.raises(ValueError):
        handler.free(a)
    with pytest.raises(ValueError):
        handler.free(AllocHandle(buf=memoryview(b""), _region_id=a.region_id, _page_index=10**6, _size=1))
    with pytest.raises(KeyError):
        handler.free(AllocHandle(buf=memoryview(b""), _region_id=12345, _page_index=0, _size=1))


def test_unaligned_chunk(system: System, key: Key) -> None:
    with MaruHandler(config(system, chunk_size_bytes=1000, pool_size=10_000)) as h:
        assert h.pool_handle is not None
        assert h.pool_handle.length // 1000 == h.get_region_page_count(h.pool_handle.region_id)
        for i in range(5):
            assert put(h, key(i), bytes([i]) * 1000)
        for i in range(5):
            info = h.retrieve(key(i))
            assert info is not None
            assert bytes(info.view) == bytes([i]) * 1000
            again = h.get_buffer_view(info.region_id, info.page_index * 1000, 1000)
            assert again is not None
            assert again == info.view
            del info, again


# --- store and retrieve ---


def test_store_and_retrieve(handler: MaruHandler, key: Key) -> None:
    assert handler.retrieve(key("k")) is None
    assert handler.exists(key("k")) is False
    a = handler.alloc(5)
    a.buf[:] = b"hello"
    assert handler.store(key("k"), handle=a) is True
    info = handler.retrieve(key("k"))
    assert info is not None
    assert (bytes(info.view), info.view.readonly, info.view.format) == (b"hello", True, "B")
    assert (info.region_id, info.page_index) == (a.region_id, a.page_index)
    assert handler.exists(key("k")) is True


def test_handle_made_of_its_location(handler: MaruHandler, key: Key) -> None:
    """LMCache's adapter hands over locations without a buffer."""
    a = handler.alloc(CHUNK)
    a.buf[:3] = b"abc"
    bare = AllocHandle(buf=memoryview(b""), _region_id=a.region_id, _page_index=a.page_index, _size=3)
    assert handler.store(key("k"), bare) is True
    assert value(handler, key("k")) == b"abc"
    b = handler.alloc(1)
    handler.free(AllocHandle(buf=memoryview(b""), _region_id=b.region_id, _page_index=b.page_index, _size=1))


def test_duplicate_keeps_the_first_value(handler: MaruHandler, key: Key) -> None:
    assert put(handler, key("k"), b"first")
    free = handler.get_stats()["store_regions"]["total_free_pages"]
    assert put(handler, key("k"), b"second!") is True
    assert value(handler, key("k")) == b"first"
    assert eventually(lambda: handler.get_stats()["store_regions"]["total_free_pages"] == free)


def test_bad_pages_are_refused(handler: MaruHandler, key: Key) -> None:
    a = handler.alloc(1)
    with pytest.raises(ValueError, match="larger than a chunk"):
        handler.store(
            key("k"),
            AllocHandle(buf=memoryview(b""), _region_id=a.region_id, _page_index=a.page_index, _size=CHUNK + 1),
        )
    with pytest.raises(KeyError):
        handler.store(key("k"), AllocHandle(buf=memoryview(b""), _region_id=999, _page_index=0, _size=1))
    with pytest.raises(ValueError):
        handler.store(key("k"), AllocHandle(buf=memoryview(b""), _region_id=a.region_id, _page_index=-1, _size=1))
    assert not handler.exists(key("k"))
    handler.free(a)


def test_copying_forms(handler: MaruHandler, key: Key) -> None:
    """SGLang's adapter gives buffers, not pages."""
    assert handler.store(key("a"), data=memoryview(b"bytes"))
    assert handler.store(key("b"), bytearray(b"positional"))
    assert handler.batch_store([key("c"), key("d"), key("e")], [b"1", memoryview(bytearray(b"22")), handler.alloc(3)]) == [
        True,
        True,
        True,
    ]
    assert [value(handler, key(k)) for k in "abcd"] == [b"bytes", b"positional", b"1", b"22"]
    assert handler.exists(key("e"))
    with pytest.raises(ValueError, match="exceeds chunk_size"):
        handler.store(key("f"), data=bytes(CHUNK + 1))
    with pytest.raises(TypeError):
        handler.store(key("f"), handler.alloc(1), data=b"x")
    with pytest.raises(TypeError):
        handler.store(key("f"))
    with pytest.raises(TypeError):
        handler.store(key("f"), data="text is no buffer")
    with pytest.raises(TypeError, match="contiguous"):
        handler.store(key("f"), data=memoryview(b"abcdef")[::2])


def test_tiny_and_empty_values(handler: MaruHandler, key: Key) -> None:
    assert put(handler, key("one"), b"\x01")
    assert value(handler, key("one")) == b"\x01"
    with pytest.raises(ValueError, match="empty value"):
        handler.store(key("none"), data=b"")
    empty = handler.alloc(0)
    with pytest.raises(ValueError, match="empty value"):
        handler.store(key("none"), empty)
    handler.free(empty)
    assert not handler.exists(key("none"))


def test_numpy_keeps_the_lease(handler: MaruHandler, key: Key) -> None:
    """What torch.frombuffer does as well: the array is all that is left of the answer."""
    np = pytest.importorskip("numpy")
    assert put(handler, key("k"), bytes(range(16)))
    info = handler.retrieve(key("k"))
    assert info is not None
    numbers = np.frombuffer(info.view, dtype=np.uint32)[1:]
    del info
    gc.collect()
    assert handler.delete(key("k")) is False
    assert numbers.tobytes() == bytes(range(4, 16))
    assert not numbers.flags.writeable
    page = handler.alloc(16)
    np.frombuffer(page.buf, dtype=np.uint64)[:] = 7  # pages are aligned and writable
    handler.free(page)
    del numbers
    gc.collect()
    assert eventually(lambda: handler.delete(key("k")))


def test_chunk_sizes_live_side_by_side(system: System, key: Key) -> None:
    """They share the namespace: each reads what the other stored."""
    with MaruHandler(config(system)) as small, MaruHandler(config(system, chunk_size_bytes=3 * CHUNK)) as large:
        assert large.store(key("big"), data=b"b" * (2 * CHUNK))
        assert small.store(key("little"), data=b"s" * 10)
        assert value(small, key("big")) == b"b" * (2 * CHUNK)
        assert value(large, key("little")) == b"s" * 10


def test_batches(handler: MaruHandler, key: Key) -> None:
    keys = [key(i) for i in range(8)]
    handles = []
    for i in range(8):
        h = handler.alloc(4)
        h.buf[:] = i.to_bytes(4, "little")
        handles.append(h)
    assert handler.batch_store(keys, handles) == [True] * 8
    absent = key("absent")
    asked = [*keys[:3], absent, *keys[3:]]
    assert handler.batch_exists(asked) == [True] * 3 + [False] + [True] * 5
    infos = handler.batch_retrieve(asked)
    assert [None if i is None else int.from_bytes(i.view, "little") for i in infos] == [0, 1, 2, None, 3, 4, 5, 6, 7]
    assert handler.batch_pin(asked) == [True] * 3 + [False] * 6
    assert handler.batch_unpin(asked) == [True] * 3 + [False] * 6
    with pytest.raises(ValueError, match="keys and handles must have the same length"):
        handler.batch_store(keys, handles[:1])
    assert handler.batch_store([], []) == []
    assert handler.batch_exists([]) == []
    assert handler.batch_retrieve([]) == []
    assert handler.batch_pin([]) == []


def test_large_batches(system: System, key: Key) -> None:
    with MaruHandler(config(system, chunk_size_bytes=64, pool_size=64 * 6000)) as h:
        keys = [key(i) for i in range(5000)]
        assert h.batch_store(keys, [i.to_bytes(8, "little") for i in range(5000)]) == [True] * 5000
        assert h.batch_exists([*keys, key("absent")]) == [True] * 5000 + [False]
        infos = h.batch_retrieve(keys[:3000])
        assert [int.from_bytes(i.view, "little") for i in infos if i is not None] == list(range(3000))


def test_keys_of_all_kinds(handler: MaruHandler, key: Key) -> None:
    kinds: list[Any] = [5, "5", b"5", -5, 2**200, "schlüssel/模型@0", b"\x00\xff", key("x" * 4000)]
    for i, k in enumerate(kinds):
        assert put(handler, k, str(i).encode())
    try:
        assert [value(handler, k) for k in kinds] == [str(i).encode() for i in range(len(kinds))]
        assert handler.batch_exists(kinds) == [True] * len(kinds)
    finally:
        for k in kinds:
            handler.delete(k)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("", ValueError),
        (b"", ValueError),
        ("x" * 4097, ValueError),
        ("\ud800", ValueError),
        (None, TypeError),
        (1.5, TypeError),
        (True, TypeError),
        (["k"], TypeError),
    ],
    ids=range(8),
)
def test_bad_keys(handler: MaruHandler, bad: Any, error: type[Exception]) -> None:
    for call in (handler.exists, handler.retrieve, handler.pin, handler.unpin, handler.delete):
        with pytest.raises(error):
            call(bad)
    with pytest.raises(error):
        handler.store(bad, b"v")
    for n in (1, 10):
        with pytest.raises(error):
            handler.batch_exists(["good"] * n + [bad])


# --- pins and deletion ---


def test_pin_counts(handler: MaruHandler, key: Key) -> None:
    assert handler.pin(key("k")) is False
    assert handler.unpin(key("k")) is False
    assert put(handler, key("k"), b"v")
    assert handler.pin(key("k")) is True
    assert handler.pin(key("k")) is True
    assert handler.delete(key("k")) is False
    assert handler.unpin(key("k")) is True
    assert handler.delete(key("k")) is False
    assert handler.unpin(key("k")) is True
    assert handler.unpin(key("k")) is False
    assert handler.exists(key("k"))
    assert eventually(lambda: handler.delete(key("k")))
    assert handler.delete(key("k")) is False
    assert not handler.exists(key("k"))


def test_delete_frees_the_page_and_the_key(handler: MaruHandler, key: Key) -> None:
    free = handler.get_stats()["store_regions"]["total_free_pages"]
    assert put(handler, key("k"), b"old")
    assert handler.delete(key("k")) is True
    assert handler.retrieve(key("k")) is None
    assert eventually(lambda: handler.get_stats()["store_regions"]["total_free_pages"] == free)
    assert put(handler, key("k"), b"new")
    assert value(handler, key("k")) == b"new"


# --- regions ---


def test_region_callback(system: System) -> None:
    with MaruHandler(config(system, pool_size=4 * CHUNK)) as h:
        seen: list[tuple[int, int, int]] = []

        def added(region: int, count: int) -> None:
            view = h.get_buffer_view(region, 0, count * CHUNK)
            assert view is not None and not view.readonly
            assert threading.current_thread() is threading.main_thread()
            seen.append((region, count, len(view)))

        h.set_on_region_added(added)
        assert [s[0] for s in seen] == h.get_owned_region_ids()
        first = seen[0][1]
        handles = [h.alloc(1) for _ in range(first + 1)]
        assert [s[0] for s in seen] == h.get_owned_region_ids()
        assert len(seen) == 2
        assert len({s[0] for s in seen}) == 2
        h.set_on_region_added(None)
        handles += [h.alloc(1) for _ in range(seen[1][1])]
        assert len(seen) == 2
        assert len(h.get_owned_region_ids()) == 3
        for x in handles:
            h.free(x)


def test_buffer_views_out_of_range(handler: MaruHandler) -> None:
    region = handler.get_owned_region_ids()[0]
    count = handler.get_region_page_count(region)
    assert count is not None
    assert handler.get_buffer_view(region, 0, count * CHUNK) is not None
    assert handler.get_buffer_view(region, 1, count * CHUNK) is None
    assert handler.get_buffer_view(region, -1, 1) is None
    assert handler.get_buffer_view(region, 0, -1) is None
    assert handler.get_buffer_view(987654, 0, 1) is None
    assert handler.get_region_page_count(987654) is None
    mapper = handler.mapper
    assert mapper.get_buffer_view(region, 0, 8) is not None


def test_managers_and_stats(handler: MaruHandler, key: Key) -> None:
    manager, allocator, pool = handler.owned_region_manager, handler.allocator, handler.pool_handle
    assert manager is not None and allocator is not None and pool is not None
    region = manager.get_first_region_id()
    assert region == pool.region_id == handler.get_owned_region_ids()[0]
    assert manager.is_owned(pool.region_id) and not manager.is_owned(999)
    assert allocator.page_count == allocator.num_free_pages == pool.length // CHUNK
    assert allocator.chunk_size == handler.get_chunk_size() == CHUNK
    a = handler.alloc(1)
    assert allocator.num_allocated == 1
    stats = handler.get_stats()
    assert set(stats) >= {"kv_manager", "allocation_manager", "stats_manager", "store_regions", "allocator"}
    assert stats["store_regions"]["total_allocated_pages"] == 1
    assert stats["store_regions"]["regions"][0] == stats["allocator"]
    assert stats["allocator"] | {"utilization": 0} == {
        "pool_size": pool.length,
        "chunk_size": CHUNK,
        "page_count": pool.length // CHUNK,
        "free_pages": pool.length // CHUNK - 1,
        "allocated_pages": 1,
        "utilization": 0,
        "region_id": region,
    }
    entries = stats["kv_manager"]["total_entries"]
    assert handler.store(key("k"), a)
    assert handler.get_stats()["kv_manager"]["total_entries"] == entries + 1
    assert stats["allocation_manager"]["active_clients"] >= 1
    assert handler.healthcheck() is True


# --- lifetime ---


def test_close_with_views_out(system: System, key: Key) -> None:
    h = MaruHandler(config(system))
    assert h.connect()
    assert put(h, key("k"), b"still here")
    info = h.retrieve(key("k"))
    page = h.alloc(4)
    page.buf[:] = b"page"
    region = h.get_buffer_view(page.region_id, page.page_index * CHUNK, 4)
    assert info is not None and region is not None
    part = info.view[6:]
    h.close()
    assert bytes(info.view) == b"still here"
    del info
    gc.collect()
    assert bytes(part) == b"here"
    assert bytes(page.buf) == b"page" == bytes(region)
    with MaruHandler(config(system)) as other:
        assert value(other, key("k")) == b"still here"


def test_slices_keep_the_lease(handler: MaruHandler, key: Key) -> None:
    assert put(handler, key("k"), b"0123456789")
    info = handler.retrieve(key("k"))
    assert info is not None
    part = info.view[2:4].cast("B")
    del info
    gc.collect()
    assert handler.delete(key("k")) is False
    assert bytes(part) == b"23"
    del part
    gc.collect()
    assert eventually(lambda: handler.delete(key("k")))


def test_many_views_come_and_go(handler: MaruHandler, key: Key) -> None:
    keys = [key(i) for i in range(64)]
    assert all(handler.batch_store(keys, [b"v"] * 64))
    for _ in range(200):
        assert all(handler.batch_retrieve(keys))
    assert eventually(lambda: handler.get_stats()["client"]["views"] == 0)


# --- threads ---


def test_threads(system: System, key: Key) -> None:
    with MaruHandler(config(system, pool_size=256 * CHUNK)) as h:
        errors: list[BaseException] = []

        def work(n: int) -> None:
            try:
                for i in range(40):
                    k = key(f"{n % 4}/{i}")  # two threads write each key
                    text = f"value of {n % 4}/{i}".encode()
                    assert put(h, k, text)
                    assert value(h, k) == text
                    assert h.exists(k)
                    assert h.pin(k)
                    assert h.unpin(k)
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert errors == []


def test_close_while_others_work(system: System, key: Key) -> None:
    h = MaruHandler(config(system))
    assert h.connect()
    stop = threading.Event()
    errors: list[BaseException] = []

    def work(n: int) -> None:
        i = 0
        while not stop.is_set():
            i += 1
            try:
                put(h, key(f"{n}/{i % 8}"), b"v")
                h.retrieve(key(f"{n}/{i % 8}"))
            except RuntimeError as e:
                if "closing" not in str(e) and "Not connected" not in str(e) and "closed" not in str(e):
                    errors.append(e)
                return
            except BaseException as e:
                errors.append(e)
                return

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    time.sleep(0.2)
    h.close()
    stop.set()
    for t in threads:
        t.join(10)
        assert not t.is_alive()
    assert errors == []
