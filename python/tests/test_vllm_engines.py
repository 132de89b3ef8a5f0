"""Two real engines on one pool at once; what keeps engines apart; media; a pool that is too small.

The second engine's process is started again with other settings, which costs
seconds, since everything is imported.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from test_vllm_rows import BLOCK, CHUNK, ROOT, Rows, Up, kv_transfer, prompt, same

pytestmark = pytest.mark.vllm

LLM = {"block_size": BLOCK, "max_model_len": 1024, "max_num_batched_tokens": 1024, "max_num_seqs": 4}


class Pair:
    """Two engines and the pool that they share."""

    def __init__(self, up: Up, checkpoint: Path, a: Any, b: Any) -> None:
        self.up, self.model = up, checkpoint
        self.a, self.b = Rows(up, a), Rows(up, b)

    def restart(self, llm: dict[str, Any] | None = None, **extra: Any) -> Rows:
        self.b("restart", model=str(self.model), kv_transfer=kv_transfer(self.up.address, **extra), llm={**LLM, **(llm or {})})
        return self.b


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Pair]:  # noqa: F811
    from demo.processes import EngineProcess

    directory = tmp_path_factory.mktemp("engines")
    path = os.pathsep.join([str(ROOT / "python" / "tests"), str(ROOT / "python")])
    env = {"PYTHONPATH": path, "MARU_RUN_DIR": str(directory / "run")}
    engines = [EngineProcess(directory / f"{n}.log", module="vllm_driver", env=env) for n in "ab"]
    up = Up(directory)
    try:
        up.start()
        for e in engines:
            e.ready()
            e("start", model=str(model), kv_transfer=kv_transfer(up.address), llm=LLM)
        yield Pair(up, model, *engines)
        for e in engines:
            e.stop()
    finally:
        up.close()
        for e in engines:
            e.kill()


def at_once(*calls: Any) -> list[Any]:
    out: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        out[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


def test_two_engines_at_once(pair: Pair) -> None:
    prompts = [prompt(200 + i, 5 * CHUNK + 1) for i in range(8)]
    mine, yours = prompts[:4], prompts[4:]
    a, b = at_once(lambda: pair.a.drive(*({"prompt": p} for p in mine)), lambda: pair.b.drive(*({"prompt": p} for p in yours)))
    # Each now reads what the other stored, while the other does the same.
    b2, a2 = at_once(lambda: pair.a.drive(*({"prompt": p} for p in yours)), lambda: pair.b.drive(*({"prompt": p} for p in mine)))
    assert [r["cached"] for r in (*a2, *b2)] == [5 * CHUNK] * 8
    assert [r["tokens"] for r in a2] == [r["tokens"] for r in a] and [r["tokens"] for r in b2] == [r["tokens"] for r in b]
    # And both store the same prompts at once: one of them wins, both may read it.
    same_prompt = prompt(210, 5 * CHUNK + 1)
    x, y = at_once(lambda: pair.a.one(same_prompt), lambda: pair.b.one(same_prompt))
    assert x["tokens"] == y["tokens"]
    pair.a.reset()
    pair.b.reset()
    x, y = at_once(lambda: pair.a.one(same_prompt), lambda: pair.b.one(same_prompt))
    assert (x["cached"], y["cached"]) == (5 * CHUNK, 5 * CHUNK) and same(x, y)


@pytest.mark.parametrize(
    ("llm", "extra"),
    [
        ({"block_size": 64}, {}),
        ({"dtype": "bfloat16"}, {}),
        ({}, {"maru_cache_namespace": "tiny@other"}),
        ({}, {"maru_kv_chunk_tokens": 2 * CHUNK}),
    ],
)
def test_engines_that_differ_share_nothing(pair: Pair, llm: dict[str, Any], extra: dict[str, Any]) -> None:
    p = prompt(220, 5 * CHUNK + 1)
    pair.a.one(p)
    pair.a.reset()
    assert pair.a.one(p)["cached"] == 5 * CHUNK
    b = pair.restart(llm, **extra)
    assert b.one(p)["cached"] == 0
    local = b.one(p)
    b.reset()
    hit = b.one(p)
    assert hit["cached"] >= 4 * CHUNK, "but with itself it does"
    if hit["cached"] == local["cached"]:
        assert same(hit, local)


@pytest.mark.parametrize(("backend", "order"), [("cpu", "cpu"), ("mixed", "cpu,cxl"), ("mixed", "cxl,cpu")])
def test_a_prefix_in_one_medium_or_split_over_two(pair: Pair, backend: str, order: str) -> None:
    sizes = {"maru_cpu_pool_size": "64M" if backend == "cpu" else "2M"}
    if backend == "mixed":
        sizes["maru_cxl_pool_size"] = "2M" if order == "cxl,cpu" else "64M"
        if order == "cxl,cpu":
            sizes["maru_cpu_pool_size"] = "64M"
    b = pair.restart(
        maru_storage_backend=backend, maru_pool_size=None, maru_cache_namespace=f"tiny@{backend}-{order}",
        maru_write_order=order, maru_read_order=order, **sizes,
    )  # fmt: skip
    before = b("metrics")["metrics"]
    prompts = [prompt(230 + i, 7 * CHUNK + 1) for i in range(3)]
    for p in prompts:
        b.one(p)
    local = [b.one(p) for p in prompts]
    b.reset()
    read = [b.one(p) for p in prompts]
    assert [r["cached"] for r in read] == [7 * CHUNK] * 3 and all(map(same, read, local))
    now = b("metrics")["metrics"]
    media = {m: now[n] - before.get(n, 0) for m in ("cpu", "cxl") if (n := f"vllm:maru_hit_tokens_total|{m}") in now}
    assert sum(media.values()) == 3 * 7 * CHUNK
    assert bool(media["cpu"]) and bool(media["cxl"]) == (backend == "mixed"), media


def test_random_traffic_over_a_pool_that_is_too_small(pair: Pair) -> None:
    """A full pool, loads, aborts and salts at once; memory stays flat. MARU_SOAK_SECONDS makes it longer."""
    seconds = float(os.environ.get("MARU_SOAK_SECONDS", "120"))
    llm = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 256}
    b = pair.restart(llm, maru_pool_size="2M", maru_cxl_pool_size="8M", maru_cache_namespace="tiny@traffic")
    b("traffic", seconds=seconds / 3, seed=1)  # everything is touched once
    before = b.counters()
    r = b("traffic", seconds=seconds * 2 / 3, seed=2)
    assert r["requests"] > 20 and r["cached"] > 0
    # What is the connector's: Go's heap and Python's objects. The backend keeps something for each size of a step.
    for what, allowed in (("go", 4 << 20), ("shared", 4 << 20), ("objects", 20_000), ("rest", 96 << 20)):
        values = [m[what] for m in r["memory"]]
        assert max(values[-3:]) - min(values[:3]) < allowed, f"{what} by tenths of the time: {values}"
    state = b("state")
    assert not any(state.values()) or b("reset")["ok"], state
    counters = b.counters()
    assert counters["loaded"] > before["loaded"] and counters["load_failures"] == 0
    assert counters["stored"] <= 32 < counters["dropped"], "8 MiB are 32 chunks, and the rest is given up"
