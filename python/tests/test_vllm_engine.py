"""Real vLLM on CPU: what one engine stored, another one reads, with equal bytes and equal answers.

Answers are compared with the engine's own prefix cache, tokens and logprobs bit for
bit (docs/guide/vllm.md). Two engine processes serve all cases, each engine start
being the dear part. Every case asserts its hits from the engine's own count, so a
connector that does nothing fails; the negative control shows that wrong bytes would
change the answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

BLOCK = 32
CHUNK = 128
ANSWER = 8


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 1024) for _ in range(tokens)]


def kv_transfer(address: str, **extra: Any) -> dict[str, Any]:
    settings = {
        "maru_server_url": address,
        "maru_storage_backend": "cxl",
        "maru_pool_size": "32M",
        "maru_cache_namespace": "tiny@1",
        "maru_kv_chunk_tokens": CHUNK,
        "maru_min_hit_tokens": 0,  # a tiny model computes faster than it loads
        "maru_run_dir": "off",
        **extra,
    }
    return {
        "kv_connector": "MaruKVConnector",
        "kv_connector_module_path": "maru_vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


class System:
    """maru up and engines on it."""

    def __init__(self, directory: Path, address: str, model: Path) -> None:
        self.directory, self.address, self.model = directory, address, model
        self.engines: list[Any] = []

    def engine(self, name: str) -> Any:
        from demo.processes import EngineProcess

        e = EngineProcess(self.directory / f"{name}.log")
        self.engines.append(e)
        return e

    def start(self, engine: Any, **extra: Any) -> None:
        engine.ready()
        engine(
            "start",
            model=str(self.model),
            kv_transfer=kv_transfer(self.address, **extra),
            llm={"block_size": BLOCK, "max_model_len": 1024, "max_num_batched_tokens": 1024},
        )

    def flip(self) -> None:
        """Flips a high bit of every float in the pool: what bad memory would do at its worst."""
        with (self.directory / "maru" / "pool").open("r+b") as f:
            f.seek(2 << 20)
            data = bytearray(f.read())
            for at in range(3, len(data), 4):
                if data[at] or data[at - 1]:
                    data[at] ^= 0x01
            f.seek(2 << 20)
            f.write(data)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[System]:
    from demo.processes import maru_up

    directory = tmp_path_factory.mktemp("engines")
    with maru_up(directory, "--cxl-size", "256M", "--cpu-size", "256M") as up:
        s = System(directory, up["server"], model)
        try:
            yield s
        finally:
            for e in s.engines:
                e.kill()


def run(engine: Any, *prompts: list[int], **kw: Any) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = engine("run", prompts=list(prompts), max_tokens=ANSWER, **kw)["results"]
    return results


def answers(results: list[dict[str, Any]]) -> list[Any]:
    return [(r["tokens"], r["logprobs"]) for r in results]


def test_another_engine_reads_what_one_stored(system: System) -> None:
    """One story, since an engine's start costs more than all its requests."""
    long, exact, short = prompt(1, 700), prompt(2, 2 * CHUNK), prompt(3, CHUNK - 1)
    shared = prompt(4, 3 * CHUNK)
    branch = [*shared[: CHUNK + BLOCK], *prompt(5, 200)]  # leaves the shared prefix inside the second chunk
    a, b = system.engine("a"), system.engine("b")
    system.start(a)
    a("watch_bytes")
    cold = run(a, long, exact, short, shared)
    assert [r["cached"] for r in cold] == [0, 0, 0, 0]
    local = run(a, long, exact, short, shared)
    assert [r["cached"] for r in local] == [672, 2 * CHUNK - BLOCK, CHUNK - BLOCK, 3 * CHUNK - BLOCK]
    counters = a("counters")["counters"]
    assert counters["stored"] == 5 + 2 + 1 + 3, "answers make a short prompt a whole chunk too"
    stored = a("bytes")["stored"]
    a.stop()

    system.start(b)
    b("watch_bytes")
    read = run(b, long, exact, short, shared)
    # Whole chunks, and one token is left to compute.
    assert [r["cached"] for r in read] == [5 * CHUNK, 2 * CHUNK - BLOCK, 0, 3 * CHUNK - BLOCK]
    assert answers(read[1:2]) == answers(local[1:2]) and answers(read[3:]) == answers(local[3:])
    assert [r["tokens"] for r in read] == [r["tokens"] for r in local]
    loaded = b("bytes")["loaded"]
    assert loaded and loaded.items() <= stored.items(), "KV bytes differ"

    # A local hit that ends inside a chunk: the rest of that chunk comes from nowhere, its head is local.
    counters = b("counters")["counters"]
    again = run(b, branch)
    assert again[0]["cached"] == CHUNK + BLOCK
    assert b("counters")["counters"]["loaded"] == counters["loaded"], "a local hit is not loaded again"

    # Another salt shares nothing.
    assert run(b, long, salt="tenant")[0]["cached"] == 0

    # Without its own cache the engine reads everything from Maru, and twenty at once do.
    assert b("reset")["ok"]
    many = run(b, *[[*shared, 5 + i] for i in range(20)], together=True)
    assert all(r["cached"] >= 3 * CHUNK - BLOCK for r in many)

    # Broken memory: every load fails its checksum, is computed, and the request ends with the right answer.
    failures = b("counters")["counters"]["load_failures"]
    system.flip()
    assert b("reset")["ok"]
    recomputed = run(b, exact, shared)
    assert [r["tokens"] for r in recomputed] == [local[1]["tokens"], local[3]["tokens"]]
    assert b("counters")["counters"]["load_failures"] > failures, "the checksum must have found it"
    b.stop()


def test_wrong_bytes_would_change_the_answers(system: System) -> None:
    """The negative control: with checksums off flipped bytes reach the engine, and its answers differ.

    Also the mixed backend: the hit of a worker's own memory after a reset of the engine's cache.
    """
    p, q = prompt(11, 3 * CHUNK), prompt(12, 3 * CHUNK)
    c = system.engine("c")
    system.start(c, maru_checksums=False, maru_cache_namespace="control@1")
    run(c, p)
    local = run(c, p)
    assert c("reset")["ok"]
    good = run(c, p)
    assert good[0]["cached"] == 3 * CHUNK - BLOCK and answers(good) == answers(local)
    system.flip()
    assert c("reset")["ok"]
    bad = run(c, p)
    assert bad[0]["cached"] == 3 * CHUNK - BLOCK
    assert answers(bad) != answers(local), "the comparison of answers proves nothing"
    assert run(c, q)[0]["cached"] == 0
    c.stop()


@pytest.mark.parametrize(("backend", "sizes"), [("mixed", {"maru_cpu_pool_size": "8M", "maru_cxl_pool_size": "64M"})])
def test_a_prefix_split_over_two_media(system: System, backend: str, sizes: dict[str, str]) -> None:
    """8 MiB of own memory hold part of what is stored; the rest goes to the pool; both are read (VL-22)."""
    prompts = [prompt(20 + i, 7 * CHUNK) for i in range(8)]
    d = system.engine("d")
    system.start(d, maru_storage_backend=backend, maru_pool_size=None, maru_cache_namespace="mixed@1", **sizes)
    run(d, *prompts)
    local = [run(d, p)[0] for p in prompts]
    assert d("reset")["ok"]
    read = run(d, *prompts)
    assert all(r["cached"] >= 7 * CHUNK - BLOCK for r in read)
    assert answers(read) == answers(local)
    d.stop()
