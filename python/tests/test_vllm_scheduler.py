"""vLLM's real Scheduler with the connector, without a model: the rare interleavings (tests/vllm_sim.py)."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from maru_vllm.worker import Budgets
from vllm_sim import BLOCK, CHUNK, Machine, Store, prompt

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", autouse=True)
def engine_environment() -> None:
    from demo.engine import environment

    os.environ.update(environment())


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_is_stored_is_loaded_by_the_next_engine(monkeypatch: Any, model: Path, async_scheduling: bool) -> None:
    p = prompt(1, 3 * CHUNK + 10)
    a = Machine(monkeypatch, model, 1, async_scheduling=async_scheduling)
    a.add("a", p)
    a.run()
    a.check_idle()
    assert len(a.store.objects) == 3
    b = Machine(monkeypatch, model, 2, async_scheduling=async_scheduling, store=a.store)
    b.add("b", p)
    b.run()
    b.check_idle()
    counters = b.counters()
    assert counters["loaded_tokens"] == 3 * CHUNK and counters["hit_tokens|cxl"] == 3 * CHUNK
    assert counters["miss_tokens|too_short"] == 10
    assert b.finished["b"] == a.finished["a"]
    assert b.lookup.count == 1, "one lookup a request"


def test_requests_on_one_prefix_load_it_once(monkeypatch: Any, model: Path) -> None:
    p = prompt(2, 3 * CHUNK)
    a = Machine(monkeypatch, model, 1)
    a.add("a", [*p, 5])
    a.run()
    b = Machine(monkeypatch, model, 2, store=a.store, blocks=80, delay=8)
    for i in range(4):
        b.add(f"b{i}", [*p, 10 + i])
    b.run()
    b.check_idle()
    counters = b.counters()
    assert counters["loaded_tokens"] == 3 * CHUNK, "four requests, one load"
    assert counters["load_waits"] == 3


def test_every_load_fails_and_all_ends(monkeypatch: Any, model: Path) -> None:
    p = prompt(3, 3 * CHUNK + 1)
    a = Machine(monkeypatch, model, 1)
    a.add("a", p)
    a.run()
    b = Machine(monkeypatch, model, 2, store=a.store)
    b.lose = 1.0
    b.add("b", p)
    b.add("c", p)
    b.run(200)
    b.check_idle()
    assert b.finished["b"] == b.finished["c"] == a.finished["a"]
    counters = b.counters()
    assert counters["loads|failed"] >= 1 and counters.get("loaded_tokens", 0) == 0
    # Another request is offered what failed for the first (S2).
    b.lose = 0.0
    assert b.scheduler.reset_prefix_cache()
    b.add("d", p)
    b.run()
    assert b.counters()["loaded_tokens"] == 3 * CHUNK


def test_aborts_while_loading_and_while_storing(monkeypatch: Any, model: Path) -> None:
    p = prompt(4, 3 * CHUNK)
    a = Machine(monkeypatch, model, 1, delay=6)
    a.add("a", p, max_tokens=50)
    while not a.workers[0]._store_jobs:
        a.step()
    a.abort("a")
    a.run()
    a.check_idle()
    a.add("a2", p)
    a.run()
    b = Machine(monkeypatch, model, 2, store=a.store, delay=6)
    b.add("b", p)
    while not b.workers[0]._load_jobs:
        b.step()
    b.abort("b")
    b.run()
    b.check_idle()


def test_requests_that_must_not_read_or_share(monkeypatch: Any, model: Path) -> None:
    from vllm.lora.request import LoRARequest

    p = prompt(5, 2 * CHUNK + 1)
    a = Machine(monkeypatch, model, 1)
    a.add("a", p)
    a.run()
    b = Machine(monkeypatch, model, 2, store=a.store)
    b.add("salt", p, salt="tenant")
    b.run()
    assert "loaded_tokens" not in b.counters(), "another salt shares nothing"
    b.scheduler.reset_prefix_cache()
    b.add("logprobs", p, params={"prompt_logprobs": 1})
    b.run()
    counters = b.counters()
    assert "loaded_tokens" not in counters and counters["miss_tokens|no_read"] == len(p)
    b.scheduler.reset_prefix_cache()
    b.add("lora", p, lora_request=LoRARequest("adapter", 1, "somewhere"))
    b.run()
    counters = b.counters()
    assert counters["bypassed_requests|lora"] == 1 and "loaded_tokens" not in counters
    b.scheduler.reset_prefix_cache()
    b.add("session", p, resumable=False, salt="tenant")
    b.run()
    assert b.counters()["loaded_tokens"] == 2 * CHUNK, "the same salt does"
    b.check_idle()


def test_an_adapter_with_a_digest_shares_under_it(monkeypatch: Any, model: Path) -> None:
    from vllm.lora.request import LoRARequest

    from maru_vllm.content import ContentRules

    p = prompt(6, 2 * CHUNK + 1)
    m = Machine(monkeypatch, model, 1)
    m.role._rules = ContentRules({"adapter": "sha256:0011223344"})
    m.salts["x"] = ""
    m.add("a", p, lora_request=LoRARequest("adapter", 1, "somewhere"))
    m.run()
    m.content.clear()  # other weights, other KV
    m.scheduler.reset_prefix_cache()
    m.counters()
    m.add("plain", p)
    m.run()
    assert "loaded_tokens" not in m.counters()
    m.scheduler.reset_prefix_cache()
    m.add("b", p, lora_request=LoRARequest("adapter", 2, "elsewhere"))
    m.run()
    assert m.counters()["loaded_tokens"] == 2 * CHUNK
    m.role._rules = ContentRules({"adapter": "sha256:ffffffffff"})
    m.scheduler.reset_prefix_cache()
    m.add("c", p, lora_request=LoRARequest("adapter", 3, "elsewhere"))
    m.run()
    assert "loaded_tokens" not in m.counters(), "another digest is another adapter"
    m.check_idle()


@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (2, 2), (4, 2)])
def test_every_rank_stores_and_loads_its_shard(monkeypatch: Any, model: Path, world: int, replicas: int) -> None:
    p = prompt(7, 4 * CHUNK + 1)
    a = Machine(monkeypatch, model, 1, world=world, replicas=replicas)
    a.add("a", p)
    a.run()
    a.check_idle()
    shards = {key[28] for key in a.store.objects}
    assert shards == set(range(world // replicas)) and len(a.store.objects) == 4 * len(shards), "replicas store once"
    b = Machine(monkeypatch, model, 2, world=world, replicas=replicas, store=a.store)
    b.add("b", p)
    b.run()
    b.check_idle()
    assert b.counters()["loaded_tokens"] == 4 * CHUNK
    # A shard that is missing makes the chunk a miss, however many others are there.
    lost = next(key for key in a.store.objects if key[28] == max(shards))
    del a.store.objects[lost]
    c = Machine(monkeypatch, model, 3, world=world, replicas=replicas, store=a.store)
    c.add("c", p)
    c.run()
    c.check_idle()
    assert c.counters().get("loaded_tokens", 0) < 4 * CHUNK


@pytest.mark.parametrize("group", range(10))
def test_random_traffic(monkeypatch: Any, model: Path, group: int) -> None:
    """Shared prefixes, salts, aborts, preemption, lost and refused transfers, resets; every token's KV is checked."""
    seeds = range(4 * group, 4 * group + 4)
    loads = [random_traffic(monkeypatch, model, seed) for seed in seeds]
    assert sum(loads) > 0, f"seeds {list(seeds)} load nothing and prove nothing"


def random_traffic(monkeypatch: Any, model: Path, seed: int) -> float:
    """Returns the loads that went well; where much is lost or refused there may be none."""
    print("seed", seed)
    rng = random.Random(1000 + seed)
    world = rng.choice([1, 1, 2])
    store = Store(random.Random(seed))
    blocks = rng.choice([36, 48, 80])
    m = Machine(monkeypatch, model, seed, world=world, blocks=blocks, async_scheduling=seed % 2 == 1, store=store)
    m.lose, m.refuse, m.full = rng.choice([0, 0.05, 0.3]), rng.choice([0, 0.1, 0.5]), rng.choice([0, 0.1])
    prefixes = [prompt(50 + i, rng.randrange(CHUNK, 5 * CHUNK)) for i in range(4)]
    live: list[str] = []
    for i in range(120):
        if rng.random() < 0.5:
            base = rng.choice(prefixes)
            cut = rng.randrange(1, len(base) + 1)
            name = f"r{i}"
            tail = prompt(i, rng.randrange(1, 40))
            m.add(name, [*base[:cut], *tail], max_tokens=rng.choice([1, 4, 90]), salt=rng.choice(["", "", "s"]))
            live.append(name)
        if live and rng.random() < 0.1:
            m.abort(live.pop(rng.randrange(len(live))))
        if rng.random() < 0.03:
            # The engine cannot reset while blocks are held for a transfer, or by a request that
            # was loaded and has not run yet.
            idle = not any(
                "REMOTE" in str(r.status) or r.is_finished() or (r.num_computed_tokens and "RUNNING" not in str(r.status))
                for r in m.scheduler.requests.values()
            )
            m.scheduler.reset_prefix_cache(reset_running_requests=idle and rng.random() < 0.5)
        if rng.random() < 0.05:
            store.reachable = not store.reachable
        if rng.random() < 0.1 and store.objects:
            del store.objects[rng.choice(list(store.objects))]
        for _ in range(rng.randrange(1, 5)):
            m.step()
    store.reachable = True
    m.run()
    m.check_idle()
    return float(m.counters().get("loads|ok", 0))


def test_preempted_requests_go_on_from_the_store(monkeypatch: Any, model: Path) -> None:
    m = Machine(monkeypatch, model, 1, blocks=36)
    for i in range(4):
        m.add(f"r{i}", prompt(80 + i, 2 * CHUNK), max_tokens=120)
    m.run()
    m.check_idle()
    assert m.counters()["loaded_tokens"] >= CHUNK, "a preempted request's own chunks come back"


def test_a_preemption_does_not_wait_for_commits(monkeypatch: Any, model: Path) -> None:
    """Blocks of a preempted request are overwritten once they were copied, while the server is asked."""
    m = Machine(monkeypatch, model, 3, blocks=36, delay=0, commit_delay=60)
    m.workers[0]._budgets = Budgets(load_bytes=64, store_bytes=64)  # or the stores would wait for one another
    for i in range(4):
        m.add(f"r{i}", prompt(80 + i, 2 * CHUNK), max_tokens=120)
    m.run()
    m.check_idle()
    assert m.transfers[0].uncommitted > 0, "no preemption came between a copy and its commit"


def test_prompts_that_are_hashed_elsewhere(monkeypatch: Any, model: Path) -> None:
    import maru_vllm.scheduler as scheduler

    monkeypatch.setattr(scheduler, "_HASH_HERE_TOKENS", CHUNK)
    p = prompt(9, 4 * CHUNK + BLOCK)
    a = Machine(monkeypatch, model, 1)
    a.add("a", p)
    a.run()
    b = Machine(monkeypatch, model, 2, store=a.store)
    b.role._timeout_s = 0.0  # and one whose lookup never comes in time
    b.lookup.delay = 40
    b.add("b", p)
    b.run()
    b.check_idle()
    b.role._timeout_s = 10.0
    b.scheduler.reset_prefix_cache()
    b.add("c", p)
    b.run()
    b.check_idle()
    assert b.counters()["loaded_tokens"] == 4 * CHUNK
