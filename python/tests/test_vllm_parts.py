"""Parts of the connector that need no engine: costs, chains, content, counts, records, budgets."""

from __future__ import annotations

import gc
import json
import os
import pickle
import stat
import sys
import time
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest

from maru.keys import Chain, Extra, encode_extras, pack_tokens, root
from maru_vllm.chain import PrefixChain, library_hasher, with_shard
from maru_vllm.content import BYPASS_REASONS, ContentRules, bypass_reason, chunk_extras
from maru_vllm.cost import NEVER, CostModel
from maru_vllm.geometry import LayerRuns
from maru_vllm.identity import Ranks
from maru_vllm.journal import Journal
from maru_vllm.messages import BlockLoad, BlockStore, StepOrders, StepReport
from maru_vllm.scheduler import SchedulerRole
from maru_vllm.stats import METRICS, MISS_REASONS, Tally, merge
from maru_vllm.worker import Budgets, WorkerRole
from test_vllm_roles import (
    BLOCK,
    CHUNK,
    CHUNK_BLOCKS,
    NAMESPACE,
    FakeLookup,
    FakeTransfers,
    Refused,
    Request,
    keys_of,
    make,
    step,
    stored,
)

# -- costs --------------------------------------------------------------------


def taught(load_fixed: float, load_token: float, token: float, step_seconds: float = 0.01) -> CostModel:
    c = CostModel()
    for i in range(40):
        n = 256 * (i % 8 + 1)
        c.step(1, step_seconds)
        c.step(n, step_seconds + n * token)
        c.load(n, load_fixed + n * load_token)
    return c


def test_every_hit_is_taken_until_something_is_known() -> None:
    c = CostModel()
    assert c.worth(1)
    c.load(100, 5.0)
    c.step(1000, 0.1)
    assert c.worth(1) and c.min_hit_tokens == 0


def test_the_shortest_hit_is_where_loading_and_computing_cost_the_same() -> None:
    # 10 ms and 1 us a token against 20 us a token: 10e-3 / 19e-6 = 526 tokens.
    c = taught(10e-3, 1e-6, 20e-6)
    assert 480 <= c.min_hit_tokens <= 580
    assert not c.worth(300) and c.worth(700)


def test_a_store_that_is_slower_than_computing_is_left_alone_and_asked_again_now_and_then() -> None:
    c = taught(10e-3, 50e-6, 20e-6)
    assert c.min_hit_tokens == NEVER
    taken = sum(c.worth(100_000) for _ in range(320))
    assert 5 <= taken <= 10, "one in 32 is tried"
    for _ in range(200):  # it has become fast
        for n in (256, 512, 1024):
            c.load(n, 1e-3 + n * 1e-6)
    assert c.worth(1024)


def test_what_a_step_costs_anyway_is_not_saved() -> None:
    # A step of 50 ms whatever it computes: 1000 tokens save 1 ms, a load of 5 ms is not worth it.
    c = taught(5e-3, 0, 1e-6, step_seconds=0.05)
    assert not c.worth(1000)


def test_one_stall_does_not_decide() -> None:
    c = taught(1e-3, 1e-6, 20e-6)
    c.load(512, 30.0)
    for _ in range(10):
        c.load(512, 1.5e-3)
    assert c.worth(1024)


def test_loads_of_one_size_say_nothing_about_shorter_ones() -> None:
    c = CostModel()
    for _ in range(10):
        c.step(1000, 0.02)
        c.load(1000, 0.01)
    assert c.worth(1000) and not c.worth(400)


def test_a_minimum_of_the_operator_ends_the_learning() -> None:
    c = CostModel(256)
    for _ in range(50):
        c.load(1024, 10.0)
        c.step(1024, 0.001)
    assert c.worth(256) and not any(c.worth(255) for _ in range(100))


# -- chains and content -------------------------------------------------------


def library() -> object:
    from maru import _lib

    return _lib.load()


@pytest.mark.parametrize("chunks", [1, 7, 8, 30])
@pytest.mark.parametrize("extras", [False, True])
def test_chains_are_those_of_the_package(chunks: int, extras: bool) -> None:
    tokens = [(7 * i) % 50_000 for i in range(chunks * CHUNK)]
    marks = [encode_extras([Extra("mm", b"x", -3)] if i % 3 == 1 else []) for i in range(chunks)] if extras else None
    want = Chain(root(NAMESPACE))
    for i in range(chunks):
        want.append(pack_tokens(tokens[i * CHUNK : (i + 1) * CHUNK]), marks[i] if marks else b"")
    for hasher in ((), (library_hasher(library()),)):
        chain = PrefixChain(root(NAMESPACE), CHUNK, *hasher)
        half = chunks // 2
        chain.extend(tokens[: half * CHUNK], marks[:half] if marks else None)
        chain.extend(tokens[half * CHUNK :], marks[half:] if marks else None)
        assert len(chain) == chunks
        assert chain.keys() == want.keys() and chain.parents() == want.parents()
        assert chain.keys(1, 3) == want.keys(1, 3) and chain.parents(1, 3) == want.parents(1, 3)
        assert with_shard(chain.keys(), 300) == want.keys(shard=300)


def feature(identifier: str, offset: int, length: int) -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def test_inputs_that_are_no_text_are_in_the_keys_of_their_chunks() -> None:
    rules = ContentRules()
    a = Request("a", range(3 * CHUNK), mm_features=[feature("cat", CHUNK - 10, 20)])
    assert bypass_reason(a, rules) is None
    extras = chunk_extras(a, rules, CHUNK, 0, 3)
    assert extras is not None and extras[0] and extras[1] and not extras[2], "in both chunks that it reaches into"
    b = Request("b", range(3 * CHUNK), mm_features=[feature("dog", CHUNK - 10, 20)])
    assert chunk_extras(b, rules, CHUNK, 0, 3) != extras
    moved = Request("c", range(3 * CHUNK), mm_features=[feature("cat", CHUNK - 11, 20)])
    assert chunk_extras(moved, rules, CHUNK, 0, 3) != extras
    assert bypass_reason(a, ContentRules(multimodal=False)) == "multimodal"


def test_bypasses() -> None:
    assert bypass_reason(Request("a", [1], cache_salt="x" * 5000)) == "salt"
    assert bypass_reason(Request("a", [1]), ContentRules(unknown=lambda r: True)) == "unknown_content"
    lora = SimpleNamespace(lora_name="n")
    assert bypass_reason(Request("a", [1], lora_request=lora)) == "lora"
    assert bypass_reason(Request("a", [1], lora_request=lora), ContentRules({"n": "0123456789"})) is None
    assert set(METRICS["bypassed_requests"].values) == set(BYPASS_REASONS)


# -- the scheduler's role -----------------------------------------------------


@pytest.mark.vllm  # it needs no engine, but more time than the fast lane has
def test_nothing_grows_with_the_number_of_requests_served() -> None:
    lookup = FakeLookup()
    s = make(lookup)

    def serve(i: int) -> None:
        # Every third one hits, every seventh is aborted while it loads, every fifth's load fails.
        tokens = [i, *range(2 * CHUNK)]
        r = Request(f"r{i}", tokens)
        lookup.have = set(keys_of(tokens)[:2]) if i % 3 == 0 else set()
        s.on_new_request(r)
        external, _ = s.get_num_new_matched_tokens(r, 0)
        if external:
            s.update_state_after_alloc(r, list(range(8)), external)
            step(s, {})
            if i % 7 == 0:
                s.request_finished(r)
                s.update_output([r.request_id], set(), None)
                return
            s.update_output([r.request_id], {2} if i % 5 == 0 else set(), None)
            r.num_computed_tokens = external if i % 5 else 0
        step(s, {r.request_id: len(tokens) - r.num_computed_tokens}, tables={r.request_id: list(range(10))})
        held = s.request_finished(r)
        step(s, {})
        if held:
            s.update_output([], set(), stored({r.request_id: 1}))
        s.stats()

    def forget() -> None:
        for grown in (lookup.probes, lookup.ended, lookup.open):
            grown.clear()

    # The memory of what was stored lately is bounded; let it fill first, so that it is no growth.
    import maru_vllm.scheduler as scheduler

    kept, scheduler._STORED_COUNT = scheduler._STORED_COUNT, 512
    try:
        for i in range(2000):
            serve(i)
        forget()
        gc.collect()
        before = sys.getallocatedblocks()
        for i in range(2000, 102_000):
            serve(i)
            if i % 1000 == 0:
                forget()
        forget()
        gc.collect()
        grown = sys.getallocatedblocks() - before
    finally:
        scheduler._STORED_COUNT = kept
    assert s.live == 0 and s.kept <= 8 and len(s._stored) <= 512
    assert grown < 500, f"{grown} more allocations after 100000 requests"


def test_a_step_asks_for_tables_only_when_a_chunk_is_complete() -> None:
    s = make(FakeLookup())
    r = Request("a", range(CHUNK + 3))
    s.get_num_new_matched_tokens(r, 0)
    asked = []

    def table(request_id: str) -> list[int]:
        asked.append(request_id)
        return list(range(8))

    s.build_orders({"a": CHUNK + 3}, (), table)
    for n in range(CHUNK - 4):
        r.num_computed_tokens = CHUNK + 3 + n
        r.all_token_ids.append(1)
        s.build_orders({"a": 1}, (), table)
    assert asked == ["a"], "once for the first chunk, not for each token behind it"
    r.num_computed_tokens = 2 * CHUNK - 1
    r.all_token_ids.append(1)
    s.build_orders({"a": 1}, (), table)
    assert asked == ["a", "a"]


def test_a_request_waits_for_anothers_load_of_its_prefix_but_not_for_ever() -> None:
    now = [0.0]
    lookup = FakeLookup()
    tokens = list(range(2 * CHUNK + 1))
    lookup.have.update(keys_of(tokens))
    s = SchedulerRole(lookup, block_tokens=BLOCK, chunk_blocks=CHUNK_BLOCKS, min_hit_tokens=0, clock=lambda: now[0])
    a, b = Request("a", tokens), Request("b", tokens)
    assert s.get_num_new_matched_tokens(a, 0) == (2 * CHUNK, True)
    assert s.get_num_new_matched_tokens(b, 0) == (2 * CHUNK, True), "an offer is no load yet"
    s.update_state_after_alloc(a, list(range(8)), 2 * CHUNK)
    assert s.get_num_new_matched_tokens(b, 0) == (None, False)
    s.update_output(["a"], set(), None)
    assert s.get_num_new_matched_tokens(b, 0) == (None, False), "its blocks are not in the engine's cache yet"
    a.num_computed_tokens = 2 * CHUNK
    step(s, {"a": 1})
    assert s.get_num_new_matched_tokens(b, 2 * CHUNK) == (0, False), "now they are"
    c, d = Request("c", tokens), Request("d", tokens)
    s.get_num_new_matched_tokens(c, 0)
    s.update_state_after_alloc(c, list(range(8)), 2 * CHUNK)
    assert s.get_num_new_matched_tokens(d, 0) == (None, False)
    now[0] += 60
    assert s.get_num_new_matched_tokens(d, 0) == (2 * CHUNK, True)
    # The one that is waited for is gone: nobody waits any more.
    e = Request("e", tokens)
    assert s.get_num_new_matched_tokens(e, 0) == (None, False)
    s.request_finished(c)
    assert s.get_num_new_matched_tokens(e, 0) == (2 * CHUNK, True)


def test_a_lookup_without_an_answer_is_a_miss_after_a_while() -> None:
    now = [0.0]
    lookup = FakeLookup()
    lookup.ready = False
    s = SchedulerRole(lookup, block_tokens=BLOCK, chunk_blocks=CHUNK_BLOCKS, lookup_timeout_s=1.0, clock=lambda: now[0])
    r = Request("a", range(CHUNK + 1))
    assert s.get_num_new_matched_tokens(r, 0) == (None, False)
    now[0] = 1.1
    assert s.get_num_new_matched_tokens(r, 0) == (0, False)
    counters = (s.stats() or {})["counters"]
    assert counters["lookups|timeout"] == 1


@pytest.mark.parametrize("hit_chunks", [0, 1, 2, 3])
@pytest.mark.parametrize("fail", [False, True])
def test_every_token_of_a_prompt_is_accounted_for_once(hit_chunks: int, fail: bool) -> None:
    lookup = FakeLookup()
    tokens = list(range(3 * CHUNK + 5))
    lookup.have.update(keys_of(tokens)[:hit_chunks])
    records: list[dict[str, object]] = []
    s = SchedulerRole(lookup, block_tokens=BLOCK, chunk_blocks=CHUNK_BLOCKS, min_hit_tokens=0, journal=records.append)
    r = Request("a", tokens)
    external, _ = s.get_num_new_matched_tokens(r, 0)
    if external:
        s.update_state_after_alloc(r, list(range(12)), external)
        step(s, {})
        s.update_output(["a"], {0} if fail else set(), StepReport(load_codes={"a": 29} if fail else {}))
        r.num_computed_tokens = 0 if fail else external
        if fail:
            assert s.get_num_new_matched_tokens(r, 0) == (0, False)
    step(s, {"a": len(tokens) - r.num_computed_tokens}, tables={"a": list(range(13))})
    s.request_finished(r)
    counters = (s.stats() or {})["counters"]
    misses = sum(v for k, v in counters.items() if k.startswith("miss_tokens|"))
    assert misses + counters.get("loaded_tokens", 0) == len(tokens)
    assert all(k.partition("|")[2] in MISS_REASONS for k in counters if k.startswith("miss_tokens|"))
    last = records[-1]
    assert all(a is not b for a, b in zip(records[0].values(), last.values()) if isinstance(a, dict)), "nothing is shared"
    assert last["done"] and sum(last["miss"].values()) == misses  # type: ignore[attr-defined]
    if fail and hit_chunks:
        assert last["code"] == 29 and last["miss"]["failed"] == hit_chunks * CHUNK  # type: ignore[index]


def test_evicted_is_told_from_never_stored() -> None:
    lookup = FakeLookup()
    s = make(lookup)
    a = Request("a", range(CHUNK + 1))
    s.get_num_new_matched_tokens(a, 0)
    step(s, {"a": CHUNK + 1}, tables={"a": list(range(5))})
    s.request_finished(a)
    b, c = Request("b", range(CHUNK + 1)), Request("c", range(1, CHUNK + 2))
    for r in (b, c):
        s.get_num_new_matched_tokens(r, 0)
        step(s, {r.request_id: CHUNK + 1}, tables={r.request_id: list(range(5))})
    counters = (s.stats() or {})["counters"]
    assert counters["miss_tokens|evicted"] == CHUNK and counters["miss_tokens|not_stored"] == 2 * CHUNK


def test_steps_and_loads_teach_the_costs() -> None:
    now = [0.0]
    lookup = FakeLookup()
    s = SchedulerRole(lookup, block_tokens=BLOCK, chunk_blocks=CHUNK_BLOCKS, clock=lambda: now[0])
    for i in range(20):
        tokens = [i, *range(4 * CHUNK)]
        r = Request(f"r{i}", tokens)
        s.get_num_new_matched_tokens(r, 0)
        orders = step(s, {r.request_id: len(tokens)}, tables={r.request_id: list(range(17))})
        assert orders.step > 0
        now[0] += 0.1 + 0.001 * len(tokens)
        s.update_output([], set(), StepReport(step=orders.step))
        s.request_finished(r)
    # No step without new tokens was seen, so that all of a step's time counts.
    assert s.cost.seconds_per_token == pytest.approx(0.001 + 0.1 / (4 * CHUNK + 1), rel=0.05)


def test_a_slow_store_is_not_asked_to_load() -> None:
    now = [0.0]
    lookup = FakeLookup()
    s = SchedulerRole(lookup, block_tokens=BLOCK, chunk_blocks=CHUNK_BLOCKS, clock=lambda: now[0])
    taken = 0
    for i in range(120):
        tokens = [i, *range(4 * CHUNK)]
        lookup.have = set(keys_of(tokens)) if i % 2 else set()
        r = Request(f"r{i}", tokens)
        external, _ = s.get_num_new_matched_tokens(r, 0)
        if external:
            taken += 1
            s.update_state_after_alloc(r, list(range(16)), external)
            step(s, {})
            now[0] += 1.0  # computing it would have taken a quarter of a second
            s.update_output([r.request_id], set(), None)
            r.num_computed_tokens = external
        orders = step(s, {r.request_id: len(tokens) - r.num_computed_tokens}, tables={r.request_id: list(range(17))})
        now[0] += 0.001 * (len(tokens) - r.num_computed_tokens)
        s.update_output([], set(), StepReport(step=orders.step))
        s.request_finished(r)
    assert 4 <= taken <= 8, "a few to learn it, and one in 32 after that"
    counters = (s.stats() or {})["counters"]
    assert counters["miss_tokens|not_worth"] == (60 - taken) * 4 * CHUNK


# -- the worker's role --------------------------------------------------------


def budget_worker(t: FakeTransfers, **kw: int) -> WorkerRole:
    w = WorkerRole(t, chunk_blocks=2, submit_error=Refused, already_code=30, budgets=Budgets(**kw))
    w.register([LayerRuns(0, 100, (0,), 100)], 64)
    return w


def chunks(n: int, tag: int = 0) -> bytes:
    return b"".join(bytes((tag, i)) + bytes(30) for i in range(n))


def test_a_long_load_goes_in_parts_and_is_reported_once() -> None:
    t = FakeTransfers()
    w = budget_worker(t, load_bytes=450, store_bytes=1000, waiting_bytes=1000)
    w.start_loads(StepOrders(loads=[BlockLoad("a", chunks(5), list(range(10, 20)), [2] * 5, [0] * 5)]))
    assert [len(x[2]) for x in t.loads] == [2], "two chunks of 200 bytes fit"
    t.jobs[1] = [0, 29]
    t.done = [1]
    assert w.finished() == (set(), set()) and w.bad_blocks() == set(), "errors come with the report"
    t.done = [2]
    assert w.finished() == (set(), set())
    t.done = [3]
    assert w.finished() == (set(), {"a"})
    assert w.bad_blocks() == {12, 13}
    assert [x[1] for x in t.loads] == [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19]]
    assert w.report() == StepReport(load_codes={"a": 29})
    assert not w.busy


def test_loads_have_room_however_many_stores_there_are() -> None:
    t = FakeTransfers()
    w = budget_worker(t, load_bytes=1000, store_bytes=400, waiting_bytes=10_000)
    w.start_stores(StepOrders(stores=[BlockStore("s", chunks(10), bytes(280), list(range(20)))]))
    assert len(t.jobs) == 1 and len(t.jobs[1]) == 2, "two chunks at a time"
    w.start_loads(StepOrders(loads=[BlockLoad("a", chunks(1, 9), [1, 2], [2], [0])]))
    assert len(t.loads) == 1
    done = 0
    for _ in range(10):
        t.done = list(t.jobs)
        done += len(t.done)
        w.finished()
    assert w.counters.stored == 10 and not w.busy


def test_stores_under_pressure_are_dropped_and_counted() -> None:
    t = FakeTransfers()
    w = budget_worker(t, load_bytes=1000, store_bytes=400, waiting_bytes=600)
    for r in "abc":
        w.start_stores(StepOrders(stores=[BlockStore(r, chunks(3), bytes(84), list(range(6)))]))
    assert w.counters.dropped == 6, "the newest of them"
    w.start_loads(StepOrders(finishing=["b", "c"]))
    assert w.finished()[0] == {"b", "c"}, "what is dropped holds no blocks"
    for _ in range(6):
        t.done = list(t.jobs)
        w.finished()
    assert w.counters.stored == 3 and not w.busy
    data = w.tally.take()
    assert data is not None and data["counters"]["store_chunks|dropped"] == 6


def test_a_full_queue_of_the_library_is_waited_for_step_by_step() -> None:
    t = FakeTransfers()
    w = budget_worker(t, load_bytes=1000, store_bytes=1000, waiting_bytes=1000)
    w.start_loads(StepOrders(loads=[BlockLoad("a", chunks(1), [1, 2], [2], [0])]))
    t.refuse = True
    w.start_loads(StepOrders(loads=[BlockLoad("b", chunks(1), [3, 4], [2], [0])]))
    assert w.finished() == (set(), set()), "b waits, it has not failed"
    t.refuse = False
    t.done = [1]
    assert w.finished() == (set(), {"a"})
    t.done = [2]
    assert w.finished() == (set(), {"b"}) and w.bad_blocks() == set()


def test_gauges_are_zero_when_everything_has_ended() -> None:
    t = FakeTransfers()
    w = budget_worker(t, load_bytes=1000, store_bytes=400, waiting_bytes=10_000)
    w.start_stores(StepOrders(stores=[BlockStore("s", chunks(3), bytes(84), list(range(6)))]))
    w.finished()
    data = w.tally.take()
    assert data is not None and data["gauges"]["stores_in_flight_bytes"] == 400
    assert data["gauges"]["stores_waiting_chunks"] == 1
    for _ in range(3):
        t.done = list(t.jobs)
        w.finished()
    data = w.tally.take()
    assert data is not None and data["gauges"]["stores_in_flight_bytes"] == 0 == data["gauges"]["stores_waiting_chunks"]


def test_a_load_waits_for_room_that_stores_have_taken() -> None:
    t = FakeTransfers()
    w = budget_worker(t, load_bytes=1000, store_bytes=1000, waiting_bytes=1000)
    w.start_stores(StepOrders(stores=[BlockStore("s", chunks(1), bytes(28), [1, 2])]))
    t.refuse = True
    w.start_loads(StepOrders(loads=[BlockLoad("b", chunks(1), [3, 4], [2], [0])]))
    assert w.finished() == (set(), set())
    t.refuse = False
    t.done = [1]
    w.finished()
    t.done = [2]
    assert w.finished() == (set(), {"b"}) and w.bad_blocks() == set()


def test_preemption_drops_what_is_not_submitted() -> None:
    t = FakeTransfers()
    w = budget_worker(t, load_bytes=1000, store_bytes=400, waiting_bytes=10_000)
    w.start_stores(StepOrders(stores=[BlockStore("a", chunks(6), bytes(168), list(range(12)))]))
    t.finish_on_wait = True
    w.before_overwrite(StepOrders(preempted=["a"]))
    assert w.counters.stored == 2 and w.counters.dropped == 4 and not w.busy
    assert w.report() == StepReport({"a": 1})


def test_replicas_share_the_stores_of_their_shard() -> None:
    seen: list[bytes] = []
    for replica in range(2):
        t = FakeTransfers()
        w = WorkerRole(t, chunk_blocks=2, submit_error=Refused, already_code=30, shard=1, replica=replica, replicas=2)
        w.register([LayerRuns(0, 100, (0,), 100)], 64)
        submit = t.submit_store
        t.submit_store = lambda layout, keys, *a, submit=submit: seen.append(keys) or submit(layout, keys, *a)  # type: ignore[method-assign,func-returns-value]
        keys = b"".join(bytes((i,)) + bytes(31) for i in range(5))
        w.start_stores(StepOrders(stores=[BlockStore("a", keys, bytes(140), list(range(10)))]))
        t.done = list(t.jobs)
        w.finished()
        assert w.report() == StepReport({"a": 1}), "every rank reports"
    assert sorted(k[0] for part in seen for k in (part[i : i + 32] for i in range(0, len(part), 32))) == [0, 1, 2, 3, 4]
    assert all(part[28] == 1 for part in seen)
    assert Ranks(8, 4).shards == 2 and Ranks(8, 4).place(5) == (1, 1)


def test_shutdown_ends_in_time() -> None:
    t = FakeTransfers()
    w = budget_worker(t, load_bytes=1000, store_bytes=400, waiting_bytes=10_000)
    w.start_stores(StepOrders(stores=[BlockStore("a", chunks(6), bytes(168), list(range(12)))]))
    t.wait = lambda timeout_s: time.sleep(timeout_s)  # type: ignore[method-assign]
    began = time.monotonic()
    w.shutdown(0.4)
    assert time.monotonic() - began < 1.0, "jobs that never end hold it only so long"


def test_messages_are_plain_and_small() -> None:
    orders = StepOrders(stores=[BlockStore("r", bytes(32 * 64), bytes(28 * 64), list(range(1024)))], step=3)
    assert pickle.loads(pickle.dumps(orders)) == orders
    assert len(pickle.dumps(StepOrders())) < 300


# -- counts and records -------------------------------------------------------


def test_tallies_add_up() -> None:
    a, b = Tally(), Tally()
    assert a.take() is None
    a.add("lookups", 2, "hit")
    a.gauge("min_hit_tokens", 5)
    a.sample("load_seconds", 0.5)
    b.add("lookups", 1, "hit")
    b.gauge("min_hit_tokens", 9)
    b.sample("load_seconds", 0.7)
    x, y = a.take(), b.take()
    assert x is not None and y is not None
    both = merge(x, y)
    assert both == {"counters": {"lookups|hit": 3}, "gauges": {"min_hit_tokens": 9}, "samples": {"load_seconds": [0.5, 0.7]}}
    a.gauge("min_hit_tokens", 5)
    assert a.take() is None, "a gauge that stays is said once"


def test_records_are_for_one_user_and_bounded(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    j = Journal(directory, "engine/1", {"namespace": {"weights": "w"}})
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700 and stat.S_IMODE(j.path.stat().st_mode) == 0o600
    assert j.path.parent == directory, "an id is no path"
    for i in range(3000):
        j.put({"request": f"r{i}", "filling": "x" * 1000})
        if i % 500 == 0:
            time.sleep(0.05)
    j.close(5.0)
    files = sorted(directory.iterdir())
    assert len(files) == 2 and all(f.stat().st_size < (1 << 20) + (1 << 17) for f in files)
    lines = [json.loads(line) for line in j.path.read_text().splitlines()]
    assert lines[0]["header"]["namespace"] == {"weights": "w"} and lines[-1]["request"] == "r2999"


def test_old_engines_records_go(tmp_path: Path) -> None:
    for i in range(20):
        Journal(tmp_path, f"e{i}", {}).close()
        os.utime(tmp_path / f"explain-e{i}.jsonl", (i, i))
    Journal(tmp_path, "last", {}).close()
    names = {f.name for f in tmp_path.iterdir()}
    assert len(names) == 16 and "explain-last.jsonl" in names and "explain-e19.jsonl" in names


def test_a_directory_of_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match="not this user's alone"):
        Journal(tmp_path, "e", {})


def test_blocks_are_arrays() -> None:
    assert array("I", [1]).itemsize == 4 and array("Q", [1]).itemsize == 8
