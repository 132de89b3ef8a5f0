"""The typed client against a running system: objects of an engine, leases, jobs."""

from __future__ import annotations

import gc
import logging
import select
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import System
from maru import api, keys
from maru.api import LOOKUP_AWAY, Blocks, Client, ClientConfig, Code, Layer, Mode, Namespace, Runs, Verdict
from maru.errors import BusyError, ClosedError, InvalidError, MaruError, NotFoundError, UnavailableError
from test_handler import eventually

VALUE = 8192


def namespace(key: Callable[[object], str], **fields: Any) -> Namespace:
    return Namespace(weights=key("weights"), engine="test", piece_bytes=1024, **fields)


def config(system: System, ns: Namespace | None, **fields: Any) -> ClientConfig:
    if fields.get("role") != "scheduler":
        fields = {"value_bytes": VALUE, "piece_bytes": 1024, "region_bytes": 1 << 20, **fields}
    return ClientConfig(system.url, ns, **fields)


@pytest.fixture
def ns(key: Callable[[object], str]) -> Namespace:
    return namespace(key)


@pytest.fixture
def client(system: System, ns: Namespace) -> Iterator[Client]:
    with Client(config(system, ns, views=True)) as c:
        yield c


def chain(ns: Namespace, count: int, salt: bytes = b"") -> keys.Chain:
    c = keys.Chain(keys.root(ns.id(), salt))
    c.extend(keys.pack_tokens(range(count * 4)), 4)
    return c


def payload(i: int, size: int = VALUE) -> bytes:
    return bytes((i * 7 + j) % 251 for j in range(256)) * (size // 256)


def test_info(client: Client, ns: Namespace) -> None:
    info = client.info()
    assert info["connected"] is True
    assert info["page_bytes"] == client.page_bytes == keys.engine_page_bytes(VALUE, 1024)
    assert len(client.session) == 16
    assert client.connected
    client.ping()
    assert client.stats()["stores"] == 0
    assert "l1_storage" in client.usage()


def test_store_probe_load(client: Client, ns: Namespace) -> None:
    c = chain(ns, 4)
    values = [payload(i) for i in range(4)]
    assert client.store(c.keys(), Runs.of(values), c.parents()).tolist() == [Code.OK] * 4
    leading, verdicts = client.probe(c.keys() + bytes(31) + b"\x01", Mode.EACH)
    assert leading == 4
    assert [v & 3 for v in verdicts] == [2, 2, 2, 2, 0]
    assert all(v >> 2 & 7 == 2 for v in verdicts[:4])
    dst = [bytearray(VALUE) for _ in range(4)]
    assert client.load(c.keys(), Runs.of(dst, writable=True)).tolist() == [Code.OK] * 4
    assert dst == values
    assert client.store(c.keys(), Runs.of(values)).tolist() == [Code.ALREADY_STORED] * 4


def test_parts(client: Client, ns: Namespace) -> None:
    c = chain(ns, 1)
    client.store(c.keys(), Runs.of([payload(3)]))
    dst = bytearray(2048)
    assert client.load(c.keys(), Runs.of([dst], writable=True), array("Q", [4096])).tolist() == [Code.OK]
    assert dst == payload(3)[4096:6144]


def test_misses(client: Client, ns: Namespace) -> None:
    c = chain(ns, 3, b"salt")
    client.store(c.keys(0, 1), Runs.of([payload(0)]))
    client.store(c.keys(2, 3), Runs.of([payload(2)]))
    leading, verdicts = client.probe(c.keys(), Mode.PREFIX)
    assert leading == 1
    assert [v & 3 for v in verdicts] == [2, 0, 3]
    dst = [bytearray(b"x" * VALUE) for _ in range(3)]
    assert client.load(c.keys(), Runs.of(dst, writable=True)).tolist()[1] == Code.MISS
    assert dst[1] == b"x" * VALUE


def test_layouts_and_jobs(client: Client, ns: Namespace) -> None:
    """Four blocks of two layers; an object is two blocks, block-major."""
    run, blocks = VALUE // 4, 8
    cache = bytearray(2 * blocks * run)
    for i in range(len(cache) // run):
        cache[i * run : (i + 1) * run] = bytes([i]) * run
    base = api._lib.Pinned(cache, writable=True)
    layout = client.register_layout([Layer(base.address + layer * blocks * run, run, run) for layer in range(2)], blocks)
    c = chain(ns, 2)
    job = client.submit_store(c.keys(), Blocks.of(layout, [[1, 5], [0, 7]]), c.parents())
    assert wait(client) == [job]
    codes = client.job_result(job)
    assert codes is not None and codes.tolist() == [Code.OK, Code.OK]
    with pytest.raises(NotFoundError):
        client.job_result(job)
    with client.acquire(c.keys()) as leases:
        first = leases.views[0]
        assert first is not None
        assert bytes(first) == b"".join(bytes([i]) * run for i in (1, blocks + 1, 5, blocks + 5))
        del first
    job = client.submit_load(c.keys(1, 2), Blocks.of(layout, [[2, 3]]))
    assert wait(client) == [job]
    codes = client.job_result(job)
    assert codes is not None and codes.tolist() == [Code.OK]
    want = {2: 0, blocks + 2: blocks, 3: 7, blocks + 3: blocks + 7}
    for at, source in want.items():
        assert cache[at * run : (at + 1) * run] == bytes([source]) * run
    client.unregister_layout(layout)
    with pytest.raises(NotFoundError):
        client.unregister_layout(layout)


def wait(client: Client) -> list[int]:
    assert select.select([client.event_fd], [], [], 20)[0]
    out: list[int] = []
    assert eventually(lambda: bool(out.extend(client.completed()) or out))
    assert client.completed() == []
    return out


def test_queue_is_bounded(system: System, ns: Namespace) -> None:
    with Client(config(system, ns, queue_jobs=1)) as client:
        c = chain(ns, 1)
        job = client.submit_store(c.keys(), Runs.of([payload(0)]))
        with pytest.raises(BusyError, match="(?i)queue"):
            for _ in range(3):
                client.submit_store(c.keys(), Runs.of([payload(0)]))
        assert wait(client) == [job]
        client.job_result(job)


def test_leases(client: Client, system: System, ns: Namespace) -> None:
    c = chain(ns, 2)
    client.store(c.keys(), Runs.of([payload(0), payload(1)]))
    with client.acquire(c.keys() + bytes(32), Mode.EACH) as leases:
        assert [None if v is None else bytes(v) for v in leases.views] == [payload(0), payload(1), None]
        assert all(v.readonly for v in leases.views if v is not None)
        assert client.delete(c.keys()).tolist() == [Code.PINNED] * 2
        first = leases.views[0]
        assert first is not None
        kept = first[:10]
        del first
    gc.collect()
    assert eventually(lambda: client.delete(c.keys(1, 2)).tolist() == [Code.OK])
    assert client.delete(c.keys(0, 1)).tolist() == [Code.PINNED]
    assert bytes(kept) == payload(0)[:10]
    del kept
    gc.collect()
    assert eventually(lambda: client.delete(c.keys(0, 1)).tolist() == [Code.OK])
    assert client.delete(c.keys(0, 1)).tolist() == [Code.NOT_FOUND]


def test_pins(client: Client, ns: Namespace) -> None:
    c = chain(ns, 2)
    client.store(c.keys(), Runs.of([payload(0), payload(1)]))
    assert client.pin(c.keys() + bytes(32)).tolist()[:2] == [Code.OK] * 2
    assert client.delete(c.keys()).tolist() == [Code.PINNED] * 2
    assert client.unpin(c.keys() + bytes(32)).tolist() == [Code.OK, Code.OK, Code.NOT_FOUND]
    assert eventually(lambda: client.delete(c.keys()).tolist() == [Code.OK] * 2)


def test_two_roles_in_one_process(system: System, key: Callable[[object], str]) -> None:
    ns = namespace(key)
    with (
        Client(config(system, ns, engine_id=key("engine"))) as worker,
        Client(config(system, ns, engine_id=key("engine"), role="scheduler")) as scheduler,
    ):
        c = chain(ns, 3)
        assert worker.store(c.keys(), Runs.of([payload(i) for i in range(3)])).tolist() == [0] * 3
        targets = scheduler.targets()
        assert targets == worker.session
        leading, _ = scheduler.probe(c.keys(), Mode.PREFIX, targets=targets, request_id=77)
        assert leading == 3
        scheduler.refresh_requests([77])
        scheduler.end_requests([77])
        # The same without waiting: the end comes behind the lookup, whose answer is handed out like a transfer.
        jobs = [scheduler.submit_lookup(c.keys() + bytes(31) + b"\x01", workers, request_id=78) for workers in (1, 2)]
        scheduler.refresh_requests([78], wait=False)
        scheduler.end_requests([78], wait=False)
        finished: list[int] = []
        while len(finished) < 2:
            assert select.select([scheduler.event_fd], [], [], 10)[0], "no answer"
            finished += scheduler.completed()
        assert set(finished) == set(jobs)
        found, away = (scheduler.job_result(job) for job in jobs)
        assert found is not None and away is not None
        assert [v & 3 for v in found[:4]] == [Verdict.HIT] * 3 + [Verdict.MISS] and len(found) == 5
        assert away[:4].tolist() == [LOOKUP_AWAY] * 4, "one of two workers has no session"
        assert all(0 <= codes[4] < 10_000_000 for codes in (found, away)), "microseconds"
        with pytest.raises(InvalidError):
            scheduler.submit_lookup(b"", 1)
        with pytest.raises(InvalidError):
            scheduler.submit_lookup(c.keys(), 3, 2)
        # A scheduler holds no memory: there is no page for a store.
        other = chain(ns, 1, b"another")
        assert scheduler.store(other.keys(), Runs.of([payload(0)])).tolist()[0] in (Code.INVALID, Code.FULL)
        assert worker.probe(other.keys())[0] == 0
        with pytest.raises(MaruError, match="(?i)views"):
            worker.acquire(c.keys())


def test_second_worker_of_a_rank(system: System, key: Callable[[object], str]) -> None:
    ns = namespace(key)
    with Client(config(system, ns, engine_id=key("engine"))):
        with pytest.raises(BusyError):
            Client(config(system, ns, engine_id=key("engine")))


def test_namespaces_are_apart(system: System, key: Callable[[object], str]) -> None:
    a, b = namespace(key), namespace(key, kv_dtype="fp8")
    with Client(config(system, a)) as one, Client(config(system, b)) as two:
        c = chain(a, 1)
        one.store(c.keys(), Runs.of([payload(0)]))
        assert one.probe(c.keys())[0] == 1
        assert two.probe(c.keys())[0] == 0


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="this kernel tells of no NUMA nodes")
def test_private_cpu_pool_on_a_node(system: System, key: Callable[[object], str]) -> None:
    ns = namespace(key)
    fields = {"region_bytes": None, "cpu_bytes": 4 << 20}
    with pytest.raises(InvalidError, match="NUMA node 900 has no memory or is not there; nodes with memory: 0"):
        Client(config(system, ns, **fields, cpu_numa_node=900))
    with pytest.raises(MaruError, match="huge pages of 1G"):
        Client(config(system, ns, **fields | {"cpu_bytes": 1 << 50}, cpu_hugepages="1G", segment_bytes=1 << 40))
    with Client(config(system, ns, **fields, cpu_numa_node=0, cpu_hugepages="auto")) as one:
        c = chain(ns, 1)
        assert one.store(c.keys(), Runs.of([payload(5)])).tolist() == [Code.OK]
        bound = [line for line in Path("/proc/self/numa_maps").read_text().splitlines() if "maru-cpu-0" in line]
        assert bound and all(" bind:0 " in line for line in bound), bound


def test_private_cpu_pool(system: System, key: Callable[[object], str]) -> None:
    ns = namespace(key)
    with (
        Client(config(system, ns, region_bytes=None, cpu_bytes=4 << 20)) as one,
        Client(config(system, ns)) as two,
    ):
        c = chain(ns, 1)
        assert one.store(c.keys(), Runs.of([payload(5)])).tolist() == [Code.OK]
        leading, verdicts = one.probe(c.keys())
        assert leading == 1 and verdicts[0] >> 2 & 7 == 1
        dst = bytearray(VALUE)
        assert one.load(c.keys(), Runs.of([dst], writable=True)).tolist() == [Code.OK]
        assert dst == payload(5)
        assert two.probe(c.keys())[0] == 0


def test_bad_arguments(client: Client, ns: Namespace) -> None:
    c = chain(ns, 1)
    for call in (
        lambda: client.probe(b"short"),
        lambda: client.probe(c.keys(), timeout=0),
        lambda: client.probe(c.keys(), 7),  # type: ignore[arg-type]
        lambda: client.store(c.keys(), Runs.of([])),
        lambda: client.store(c.keys(), Runs.of([b"x"]), b"parent"),
        lambda: client.load(c.keys(), Runs.of([bytearray(1)], writable=True), array("I", [0])),
        lambda: client.load(c.keys(), Blocks(5, array("I", [0]), array("Q", [1]))),
        lambda: client.load(c.keys(), Blocks(5, array("I", [0]), array("Q", [2]))),
        lambda: client.register_layout([], 1),
        lambda: client.submit_load(b"", Runs.of([])),
        lambda: ClientConfig("h:1", Namespace("w", "e"), opaque=True).to_json(),
        lambda: Client(ClientConfig("h:1", Namespace("w", "e"), role="boss")),
        lambda: Client(ClientConfig("h:1")),
        lambda: Client(ClientConfig("", Namespace("w", "e"), value_bytes=10)),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises((BufferError, TypeError)):
        Runs.of([b"read-only"], writable=True)


def test_configuration_names_the_field(system: System, ns: Namespace) -> None:
    with pytest.raises(InvalidError, match="(?i)write_?order"):
        Client(config(system, ns, write_order=["tape"]))
    with pytest.raises(InvalidError, match="(?i)region_?bytes"):
        Client(config(system, ns, region_bytes=1))
    with pytest.raises(UnavailableError):
        Client(ClientConfig("127.0.0.1:1", ns, value_bytes=VALUE, piece_bytes=1024, connect_timeout_ms=200))


def test_closed(system: System, ns: Namespace) -> None:
    c = Client(config(system, ns))
    c.close()
    c.close()
    assert c.closed and not c.connected
    for call in (lambda: c.probe(bytes(32)), c.stats, c.ping, lambda: c.event_fd):
        with pytest.raises(ClosedError):
            call()


def test_logs_come_out_in_logging(system: System, ns: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="maru"):
        c = Client(config(system, ns, views=True))
        thread = c._logs
        store = chain(ns, 1)
        c.store(store.keys(), Runs.of([payload(0)]))
        view = c.acquire(store.keys())
        assert view.views[0] is not None
        c.close()
        thread.join(20)
        assert not thread.is_alive()
    assert len(view.views[0]) == VALUE


def test_threads(client: Client, ns: Namespace) -> None:
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            c = chain(ns, 4, bytes([n % 3]) * 3)
            for _ in range(10):
                codes = client.store(c.keys(), Runs.of([payload(i) for i in range(4)]))
                assert set(codes) <= {Code.OK, Code.ALREADY_STORED, Code.FULL}
                dst = bytearray(VALUE)
                assert client.load(c.keys(2, 3), Runs.of([dst], writable=True)).tolist() == [Code.OK]
                assert dst == payload(2)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
