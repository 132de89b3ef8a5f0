"""What `maru bench vllm` measures, small: it must do what it says, not only take time."""

from __future__ import annotations

from bench.vllm import Steps, Tensors
from conftest import System


def test_steps_store_what_becomes_complete() -> None:
    s = Steps({"running": 4, "chunks": 3})
    ordered = []
    build = s.role.build_orders
    s.role.build_orders = lambda *a: ordered.append(build(*a)) or ordered[-1]  # type: ignore[method-assign,func-returns-value]
    times = s.measure(s.chunk_tokens)
    assert len(times["step"]) == s.chunk_tokens
    assert sum(len(o.stores) for o in ordered) == 4, "each request completes one chunk"
    s.serve(20)
    assert s.role.live == 4
    hashed = s.hash(4 * s.chunk_tokens)
    assert set(hashed) == {"python", "library"}


def test_tensors_go_through_the_pool_and_back(system: System) -> None:
    t = Tensors({"server": system.url, "layers": 2, "run_bytes": 4096, "chunks": 3, "checksums": True})
    try:
        for _ in range(2):
            times = t.measure()
            assert {"store", "load", "store memcpy", "load memcpy", "store submit", "load submit"} == set(times)
        assert t.worker.counters.stored == t.worker.counters.loaded == 6
        assert t.worker.counters.loaded_bytes == 6 * 16 * 2 * 4096
    finally:
        t.close()
