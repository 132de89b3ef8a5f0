"""The connector's two roles without an engine: the interleavings that a real one shows rarely."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace

import pytest

from maru.keys import Chain, Namespace, pack_tokens, root
from maru_vllm.chain import PrefixChain
from maru_vllm.geometry import (
    GeometryError,
    LayerRuns,
    TensorShape,
    plan_layer,
    plan_layers,
)
from maru_vllm.messages import StepOrders, StepReport
from maru_vllm.scheduler import SchedulerRole, bypass_reason
from maru_vllm.settings import SettingsError, parse_settings, parse_size
from maru_vllm.worker import Budgets, WorkerRole

BLOCK = 16
CHUNK_BLOCKS = 4
CHUNK = BLOCK * CHUNK_BLOCKS
NAMESPACE = Namespace(weights="w@1", engine="vllm").id()


class FakeResult:
    def __init__(self, leading: int, ready: bool) -> None:
        self.ready, self.count = ready, leading
        self.at: float | None = None

    def done(self) -> bool:
        return self.ready

    def answered_at(self) -> float | None:
        return self.at

    def leading(self) -> int:
        assert self.ready
        return self.count

    def media(self, start: int, stop: int) -> Mapping[str, int]:
        return {"cxl": min(stop, self.count) - start}

    def reason(self) -> str:
        return "not_stored"


class FakeLookup:
    """Knows a set of keys; answers at once or when told."""

    def __init__(self) -> None:
        self.have: set[bytes] = set()
        self.probes: list[tuple[str, int]] = []
        self.ended: list[str] = []
        self.kept: list[str] = []
        self.ready = True
        self.open: list[FakeResult] = []

    def new_chain(self, salt: bytes, chunk_tokens: int) -> PrefixChain:
        return PrefixChain(root(NAMESPACE, salt), chunk_tokens)

    def probe(self, request_id: str, asked: bytes | Callable[[], bytes]) -> FakeResult:
        keys, n = asked if isinstance(asked, bytes) else asked(), 0
        while n * 32 < len(keys) and keys[n * 32 : n * 32 + 32] in self.have:
            n += 1
        self.probes.append((request_id, len(keys) // 32))
        result = FakeResult(n, self.ready)
        self.open.append(result)
        return result

    def keep_due(self) -> bool:
        return True

    def keep(self, request_ids: Iterable[str]) -> None:
        self.kept = list(request_ids)

    def end(self, request_id: str) -> None:
        self.ended.append(request_id)


class Request(SimpleNamespace):
    def __init__(self, request_id: str, tokens: Sequence[int], **kw: object) -> None:
        super().__init__(request_id=request_id, all_token_ids=list(tokens), num_computed_tokens=0, **kw)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def keys_of(tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
    chain = Chain(root(NAMESPACE, salt))
    chain.extend(pack_tokens(tokens), CHUNK)
    packed = chain.keys()
    return [packed[i : i + 32] for i in range(0, len(packed), 32)]


def step(
    s: SchedulerRole, scheduled: dict[str, int], preempted: Sequence[str] = (), tables: dict[str, list[int]] | None = None
) -> StepOrders:
    return s.build_orders(scheduled, preempted, (tables or {}).get)


def stored(counts: dict[str, int]) -> StepReport:
    return StepReport(stored=counts)


def make(lookup: FakeLookup, **kw: int) -> SchedulerRole:
    return SchedulerRole(lookup, block_tokens=BLOCK, chunk_blocks=CHUNK_BLOCKS, **kw)


def test_a_hit_leaves_the_last_token_and_loads_part_of_a_chunk() -> None:
    lookup = FakeLookup()
    tokens = list(range(2 * CHUNK))
    lookup.have.update(keys_of(tokens))
    s = make(lookup)
    r = Request("a", tokens)
    s.on_new_request(r)
    # 128 tokens: the last block must be computed, so 112 are offered.
    assert s.get_num_new_matched_tokens(r, 0) == (2 * CHUNK - BLOCK, True)
    s.update_state_after_alloc(r, list(range(100, 107)), 2 * CHUNK - BLOCK)
    orders = step(s, {})
    (load,) = orders.loads
    assert load.blocks == list(range(100, 107))
    assert load.counts == [4, 3] and load.skips == [0, 0]
    assert load.keys == b"".join(keys_of(tokens))
    assert lookup.probes == [("a", 2)], "one probe for the request"


def test_a_local_hit_inside_a_chunk_is_never_written() -> None:
    lookup = FakeLookup()
    tokens = list(range(2 * CHUNK + 5))
    lookup.have.update(keys_of(tokens))
    s = make(lookup)
    r = Request("a", tokens)
    local = 6 * BLOCK  # two blocks into the second chunk
    assert s.get_num_new_matched_tokens(r, local) == (2 * CHUNK - local, True)
    s.update_state_after_alloc(r, list(range(100, 108)), 2 * CHUNK - local)
    (load,) = step(s, {}).loads
    assert load.blocks == [106, 107]
    assert load.counts == [2] and load.skips == [2]
    assert load.keys == keys_of(tokens)[1]


def test_the_engine_is_asked_to_come_again_until_the_lookup_is_done() -> None:
    lookup = FakeLookup()
    lookup.ready = False
    tokens = list(range(CHUNK + 1))
    lookup.have.update(keys_of(tokens))
    s = make(lookup)
    r = Request("a", tokens)
    s.on_new_request(r)
    for _ in range(3):
        assert s.get_num_new_matched_tokens(r, 0) == (None, False)
    lookup.open[0].ready = True
    assert s.get_num_new_matched_tokens(r, 0) == (CHUNK, True)
    assert len(lookup.probes) == 1


def test_a_lookup_took_as_long_as_its_answer() -> None:
    lookup = FakeLookup()
    lookup.ready = False
    now = [100.0]
    s = SchedulerRole(
        lookup, block_tokens=BLOCK, chunk_blocks=CHUNK_BLOCKS, min_hit_tokens=0, lookup_timeout_s=50, clock=lambda: now[0]
    )
    seconds = []
    for name, answered in (("a", 100.002), ("b", None)):
        r = Request(name, list(range(CHUNK + 1)))
        now[0] = 100.0
        s.on_new_request(r)
        lookup.open[-1].ready, lookup.open[-1].at = True, answered
        now[0] = 103.0  # the engine was busy meanwhile
        assert s.get_num_new_matched_tokens(r, 0) == (0, False)
        stats = s.stats()
        assert stats is not None
        seconds.append(stats["samples"]["lookup_seconds"])
    assert seconds[0] == [pytest.approx(0.002)] and seconds[1] == [pytest.approx(3.0)]


def test_a_failed_chunk_is_not_offered_again_to_the_same_request_only() -> None:
    lookup = FakeLookup()
    tokens = list(range(3 * CHUNK + 1))
    lookup.have.update(keys_of(tokens))
    s = make(lookup)
    r = Request("a", tokens)
    assert s.get_num_new_matched_tokens(r, 0) == (3 * CHUNK, True)
    s.update_state_after_alloc(r, list(range(12)), 3 * CHUNK)
    step(s, {})
    s.update_output(["a"], {5}, None)  # block 5 is of the second chunk
    assert s.get_num_new_matched_tokens(r, 0) == (CHUNK, True)
    s.update_state_after_alloc(r, list(range(4)), CHUNK)
    step(s, {})
    s.update_output(["a"], {0}, None)
    assert s.get_num_new_matched_tokens(r, 0) == (0, False), "must end (R14)"
    assert s.tally.take()["counters"]["loads|failed"] == 2
    other = Request("b", tokens)
    assert s.get_num_new_matched_tokens(other, 0) == (3 * CHUNK, True)


def test_chunks_are_stored_when_final_across_steps_and_not_after_a_hit() -> None:
    lookup = FakeLookup()
    tokens = list(range(3 * CHUNK))
    keys = keys_of(tokens)
    s = make(lookup)
    r = Request("a", tokens)
    assert s.get_num_new_matched_tokens(r, 0) == (0, False)
    table = list(range(50, 62))
    assert step(s, {"a": 40}, [], {"a": table[:3]}).stores == []
    r.num_computed_tokens = 40
    (store,) = step(s, {"a": 100}, [], {"a": table[:9]}).stores
    assert store.keys == b"".join(keys[:2]) and store.blocks == table[:8]
    assert store.parents == bytes(28) + keys[0][:28]
    r.num_computed_tokens = 140
    (store,) = step(s, {"a": 52}, [], {"a": table}).stores
    assert store.keys == keys[2] and store.blocks == table[8:]

    lookup.have.update(keys[:2])
    r2 = Request("b", tokens)
    assert s.get_num_new_matched_tokens(r2, 0) == (2 * CHUNK, True)
    s.update_state_after_alloc(r2, list(range(8)), 2 * CHUNK)
    step(s, {})
    s.update_output(["b"], set(), None)
    r2.num_computed_tokens = 2 * CHUNK
    (store,) = step(s, {"b": CHUNK}, [], {"b": list(range(12))}).stores
    assert store.keys == keys[2], "what was loaded is not stored again (VL-17)"


def test_output_tokens_are_stored_too_and_chains_do_not_mix() -> None:
    s = make(FakeLookup())
    r = Request("a", range(CHUNK - 1))
    s.get_num_new_matched_tokens(r, 0)
    assert step(s, {"a": CHUNK - 1}, [], {"a": [1, 2, 3, 4]}).stores == []
    r.num_computed_tokens = CHUNK - 1
    r.all_token_ids.append(7)
    (store,) = step(s, {"a": 1}, [], {"a": [1, 2, 3, 4]}).stores
    assert store.keys == keys_of([*range(CHUNK - 1), 7])[0]


def test_blocks_are_held_until_every_worker_reported_its_stores() -> None:
    s = make(FakeLookup(), worker_count=2)
    r = Request("a", range(CHUNK))
    s.get_num_new_matched_tokens(r, 0)
    assert step(s, {"a": CHUNK}, [], {"a": [1, 2, 3, 4]}).stores
    assert s.request_finished(r) is True
    assert step(s, {}).finishing == ["a"]
    assert s.live == 1
    s.update_output([], set(), stored({"a": 1}))
    assert s.live == 1
    s.update_output([], set(), stored({"a": 1}))
    assert s.live == 0


def test_nothing_is_held_without_stores_and_leases_end() -> None:
    lookup = FakeLookup()
    s = make(lookup)
    r = Request("a", range(CHUNK))
    s.on_new_request(r)
    s.get_num_new_matched_tokens(r, 0)
    assert s.request_finished(r) is False
    assert lookup.ended == ["a"] and s.live == 0
    s.update_output(["a"], {1}, stored({"a": 3}))  # late news of the dead change nothing


def test_a_preempted_request_is_looked_up_again() -> None:
    lookup = FakeLookup()
    s = make(lookup)
    tokens = list(range(2 * CHUNK + 3))
    r = Request("a", tokens)
    assert s.get_num_new_matched_tokens(r, 0) == (0, False)
    orders = step(s, {}, ["a"])
    assert orders.preempted == ["a"]
    lookup.have.update(keys_of(tokens))
    assert s.get_num_new_matched_tokens(r, 0) == (2 * CHUNK, True)


def test_an_aborted_load_stays_ordered() -> None:
    lookup = FakeLookup()
    tokens = list(range(CHUNK + 1))
    lookup.have.update(keys_of(tokens))
    s = make(lookup)
    r = Request("a", tokens)
    s.get_num_new_matched_tokens(r, 0)
    s.update_state_after_alloc(r, [1, 2, 3, 4], CHUNK)
    assert s.request_finished(r) is False
    assert [load.request_id for load in step(s, {}).loads] == ["a"], "R11"


def test_short_hits_and_salts_and_skips() -> None:
    lookup = FakeLookup()
    tokens = list(range(CHUNK + 1))
    lookup.have.update(keys_of(tokens))
    assert make(lookup, min_hit_tokens=CHUNK + 1).get_num_new_matched_tokens(Request("a", tokens), 0) == (0, False)
    assert make(lookup).get_num_new_matched_tokens(Request("b", tokens, cache_salt="s"), 0) == (0, False)
    skip = Request("c", tokens, skip_reading_prefix_cache=True)
    s = make(lookup)
    probes = len(lookup.probes)
    s.on_new_request(skip)
    assert s.get_num_new_matched_tokens(skip, 0) == (0, False) and len(lookup.probes) == probes
    assert step(s, {"c": CHUNK}, [], {"c": [1, 2, 3, 4]}).stores, "its prompt is stored all the same"


@pytest.mark.parametrize(
    ("kw", "reason"),
    [
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"lora_request": object()}, "lora"),
        ({"mm_features": [1]}, "multimodal"),
        ({"resumable": True}, "streaming"),
        ({"pooling_params": object()}, "pooling"),
        ({}, None),
    ],
)
def test_requests_whose_identity_is_not_their_tokens_bypass(kw: dict[str, object], reason: str | None) -> None:
    lookup = FakeLookup()
    s = make(lookup)
    r = Request("a", range(CHUNK), **kw)
    assert bypass_reason(r) == reason
    s.on_new_request(r)
    assert s.get_num_new_matched_tokens(r, 0) == (0, False)
    stored = bool(step(s, {"a": CHUNK}, [], {"a": [1, 2, 3, 4]}).stores)
    assert stored == (reason is None) and bool(lookup.probes) == (reason is None)
    counters = (s.stats() or {})["counters"]
    assert counters.get(f"bypassed_requests|{reason}", 0) == (1 if reason else 0)


class Refused(Exception):
    pass


class FakeTransfers:
    def __init__(self) -> None:
        self.jobs: dict[int, list[int]] = {}
        self.done: list[int] = []
        self.loads: list[tuple[bytes, list[int], list[int], list[int]]] = []
        self.next = 0
        self.limit = 256
        self.refuse = False
        self.finish_on_wait = False
        self.copied_on_wait: set[int] = set()
        self.read: set[int] = set()
        self.waits = 0
        self.asked = 0
        self.entered = 0  # times that the library was entered

    def register_layout(self, layers: Sequence[LayerRuns], block_count: int) -> int:
        return 1

    def _job(self, n: int) -> int:
        self.entered += 1
        if self.refuse:
            raise Refused("queue full")
        self.next += 1
        self.jobs[self.next] = [0] * n
        return self.next

    def submit_store(self, layout: int, keys: bytes, parents: bytes, blocks: array, ends: array) -> int:  # type: ignore[type-arg]
        return self._job(len(ends))

    def submit_load(self, layout: int, keys: bytes, blocks: array, ends: array, offsets: array) -> int:  # type: ignore[type-arg]
        self.loads.append((keys, list(blocks), list(ends), list(offsets)))
        return self._job(len(ends))

    def ready(self) -> bool:
        self.asked += 1
        return bool(self.done)

    def completed(self) -> list[int]:
        self.entered += 1
        done, self.done = self.done[: self.limit], self.done[self.limit :]
        return done

    def job_codes(self, job: int) -> Sequence[int]:
        self.entered += 1
        return self.jobs.pop(job)

    def copied(self, job: int) -> bool:
        self.entered += 1
        return job in self.read

    def wait(self, timeout_s: float) -> None:
        self.waits += 1
        assert self.waits < 100, "nobody will ever wake this one"
        self.read |= self.copied_on_wait
        if self.finish_on_wait:
            self.done += [j for j in self.jobs if j not in self.done]

    def close(self, timeout_s: float) -> None: ...


def make_worker(t: FakeTransfers, **kw: object) -> WorkerRole:
    w = WorkerRole(t, chunk_blocks=CHUNK_BLOCKS, submit_error=Refused, already_code=30, **kw)  # type: ignore[arg-type]
    w.register([LayerRuns(0, 100, (0,), 100)], 64)
    return w


def a_load(request_id: str = "a") -> StepOrders:
    from maru_vllm.messages import BlockLoad

    return StepOrders(loads=[BlockLoad(request_id, bytes(64), [1, 2, 3, 4, 5], [3, 2], [1, 0])])


def a_store(request_id: str = "a") -> StepOrders:
    from maru_vllm.messages import BlockStore

    return StepOrders(stores=[BlockStore(request_id, bytes(32), bytes(28), [1, 2, 3, 4])])


def test_a_load_is_reported_once_with_its_bad_blocks() -> None:
    t = FakeTransfers()
    w = make_worker(t)
    w.start_loads(a_load())
    assert t.loads[0][3] == [100, 0], "the object is entered behind the local hit"
    assert w.finished() == (set(), set())
    t.jobs[1] = [0, 29]
    t.done = [1]
    assert w.finished() == (set(), {"a"})
    assert w.bad_blocks() == {4, 5}
    assert w.finished() == (set(), set()) and w.bad_blocks() == set()
    assert not w.busy


def test_a_refused_load_fails_at_once_and_is_reported() -> None:
    t = FakeTransfers()
    t.refuse = True
    w = make_worker(t)
    w.start_loads(a_load())
    assert w.finished() == (set(), {"a"})
    assert w.bad_blocks() == {1, 2, 3, 4, 5}


def test_sent_is_reported_once_and_only_when_the_stores_ended() -> None:
    t = FakeTransfers()
    w = make_worker(t)
    w.start_stores(a_store())
    w.start_loads(StepOrders(finishing=["a"]))
    assert w.finished() == (set(), set())
    t.done = [1]
    assert w.finished() == ({"a"}, set())
    assert w.report() == StepReport({"a": 1}) and w.report() is None
    assert w.finished() == (set(), set())


def test_a_dropped_store_frees_its_request() -> None:
    t = FakeTransfers()
    t.refuse = True
    w = make_worker(t)
    w.start_stores(a_store())
    w.start_loads(StepOrders(finishing=["a"]))
    assert w.finished() == ({"a"}, set())
    assert w.report() == StepReport({"a": 1}) and w.counters.dropped == 1


def test_stores_of_preempted_requests_end_before_their_blocks_are_overwritten() -> None:
    t = FakeTransfers()
    w = make_worker(t)
    w.start_stores(a_store("a"))
    w.start_stores(a_store("b"))
    t.finish_on_wait = True
    w.before_overwrite(StepOrders(preempted=["a", "never seen"]))
    assert w.report() == StepReport({"a": 1, "b": 1})


def test_a_preemption_waits_for_copies_not_for_commits() -> None:
    t = FakeTransfers()
    w = make_worker(t)
    w.start_stores(a_store("a"))
    w.start_stores(a_store("b"))
    w.start_loads(a_load("c"))
    t.copied_on_wait = {1}
    w.before_overwrite(StepOrders(preempted=["a", "c"]))
    assert t.waits == 1 and w.busy and w.report() is None, "the commits of both are under way"
    w.before_overwrite(StepOrders(preempted=["a"]))
    assert t.waits == 1, "what was copied is not waited for again"
    t.done = [1, 2]
    w.start_loads(StepOrders(finishing=["a"]))
    assert w.finished() == ({"a"}, set()) and w.report() == StepReport({"a": 1, "b": 1})


def a_step(w: WorkerRole, orders: StepOrders | None = None) -> tuple[set[str], set[str]]:
    """What the engine calls in a step."""
    orders = orders or StepOrders()
    w.before_overwrite(orders)
    w.start_loads(orders)
    w.start_stores(orders)
    ended = w.finished()
    w.bad_blocks()
    w.tally.take()
    return ended


def test_a_step_enters_the_library_only_for_something_that_happened() -> None:
    t = FakeTransfers()
    w = make_worker(t)
    for _ in range(5):
        assert a_step(w) == (set(), set()) and w.report() is None
    assert t.entered == t.asked == 0, "nothing is under way: nobody is asked"
    a_step(w, a_load("a"))
    a_step(w, a_store("b"))
    entered = t.entered
    for _ in range(5):
        assert a_step(w, StepOrders(finishing=["b"])) == (set(), set()) and w.report() is None
    assert t.entered == entered and t.asked >= 5, "nothing has ended: the descriptor says so"
    t.done = [1, 2]
    assert a_step(w) == ({"b"}, {"a"}) and w.report() == StepReport({"b": 1})
    entered, asked = t.entered, t.asked
    for _ in range(5):
        assert a_step(w) == (set(), set()) and w.report() is None
    assert (t.entered, t.asked) == (entered, asked) and not w.busy


def test_jobs_beyond_what_one_call_hands_out_are_seen_in_the_next_step() -> None:
    t = FakeTransfers()
    t.limit = 1
    w = make_worker(t)
    for r in "abc":
        a_step(w, a_load(r))
    t.done = [1, 2, 3]
    assert [a_step(w) for _ in range(4)] == [(set(), {"a"}), (set(), {"b"}), (set(), {"c"}), (set(), set())]


def test_what_waits_for_its_budget_goes_on_when_a_job_ends_and_not_before() -> None:
    t = FakeTransfers()
    w = make_worker(t, budgets=Budgets(load_bytes=500, store_bytes=400, waiting_bytes=1 << 30))
    a_step(w, a_load("a"))
    a_step(w, a_load("b"))
    a_step(w, a_store("c"))
    a_step(w, a_store("d"))
    for _ in range(3):
        a_step(w)
    assert t.next == 2 and w.busy, "a load and a store are under way, two wait"
    t.done = [1, 2]
    assert a_step(w) == (set(), {"a"}) and t.next == 4
    t.done = [3, 4]
    assert a_step(w) == (set(), {"b"}) and not w.busy


def test_sets_that_were_handed_out_do_not_change() -> None:
    t = FakeTransfers()
    w = make_worker(t)
    bad, (sent, received) = w.bad_blocks(), w.finished()
    t.refuse = True
    w.start_loads(a_load())
    assert not bad and not sent and not received, "the engine still has them with async scheduling"


def test_reports_of_workers_add_up() -> None:
    assert StepReport({"a": 1}).add(StepReport({"a": 2, "b": 1})) == StepReport({"a": 3, "b": 1})


# -- geometry -----------------------------------------------------------------


def shape(dims: Sequence[int], strides: Sequence[int], itemsize: int = 4) -> TensorShape:
    return TensorShape("l", 0x1000, tuple(dims), tuple(strides), itemsize)


def test_one_run_a_block_where_blocks_are_compact() -> None:
    t = shape((4096, 2, 128, 64), (16384, 8192, 64, 1))
    assert plan_layer(t, 4096, 65536, block_first=True) == LayerRuns(0x1000, 65536, (0,), 65536)


def test_keys_and_values_apart_are_two_runs() -> None:
    t = shape((2, 64, 2, 16, 8), (64 * 256, 256, 128, 8, 1))
    assert plan_layer(t, 64, 2048, block_first=False) == LayerRuns(0x1000, 1024, (0, 64 * 1024), 1024)


def test_permuted_heads_are_one_run_and_kernel_blocks_join() -> None:
    # (kernel blocks, heads, tokens, content) kept as tokens-major: still one run.
    t = shape((128, 2, 16, 8), (256, 8, 16, 1))
    assert plan_layer(t, 64, 2048, block_first=True) == LayerRuns(0x1000, 2048, (0,), 2048)


def test_blocks_outermost_have_the_packed_stride() -> None:
    t = shape((64, 2, 16, 8), (4 * 256, 128, 8, 1))
    assert plan_layer(t, 64, 1024, block_first=True) == LayerRuns(0x1000, 4096, (0,), 1024)


@pytest.mark.parametrize(
    ("dims", "strides", "blocks", "page", "first"),
    [
        ((64, 64, 8), (512, 8, 1), 64, 2048, False),  # two dimensions fit
        ((63, 64), (64, 1), 64, 256, True),  # ... 64 is the second, tokens: page does not add up
        ((10, 8), (8, 1), 64, 32, True),  # none fits
        ((64, 8), (8, 1), 64, 64, True),  # the engine says another size
        ((64, 8), (0, 1), 64, 32, True),  # blocks on top of one another
    ],
)
def test_what_does_not_add_up_is_refused(
    dims: Sequence[int], strides: Sequence[int], blocks: int, page: int, first: bool
) -> None:
    with pytest.raises(GeometryError):
        plan_layer(shape(dims, strides), blocks, page, block_first=first)


def test_layers_of_different_forms_are_refused() -> None:
    a = shape((64, 8), (8, 1))
    b = TensorShape("b", 0x9000, (64, 2, 4), (4, 256, 1), 4)
    with pytest.raises(GeometryError, match="different forms"):
        plan_layers([a, b], 64, 32, block_first=True)


# -- settings -----------------------------------------------------------------

GOOD = {"maru_cache_namespace": "m@1"}


def parse(extra: dict[str, object], policy: str | None = "recompute", role: str = "kv_both"):  # type: ignore[no-untyped-def]
    return parse_settings(extra, engine_id="e1", kv_role=role, load_failure_policy=policy)


def test_defaults() -> None:
    s = parse(GOOD)
    assert (s.server_url, s.backend, s.region_bytes, s.chunk_tokens) == ("tcp://localhost:5555", "cxl", 1 << 30, 256)
    assert s.write_order == ("cxl",) and s.engine_id == "e1"


def test_mixed_orders() -> None:
    s = parse(
        GOOD
        | {
            "maru_storage_backend": "mixed",
            "maru_cpu_pool_size": "8G",
            "maru_cxl_pool_size": "32G",
            "maru_write_order": "cxl,cpu",
            "maru_read_order": ["cpu", "cxl"],
            "maru_cpu_numa_node": "0, 1",
            "maru_cpu_hugepages": "2M",
        }
    )
    assert s.cpu_numa_nodes == (0, 1) and s.cpu_hugepages == "2M"
    assert s.write_order == ("cxl", "cpu") and s.read_order == ("cpu", "cxl")
    assert (s.cpu_pool_bytes, s.cxl_pool_bytes) == (8 << 30, 32 << 30)


CPU = GOOD | {"maru_storage_backend": "cpu", "maru_cpu_pool_size": "1G"}


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({}, "maru_cache_namespace is missing"),
        (GOOD | {"maru_server_ulr": "x"}, "did you mean maru_server_url"),
        (GOOD | {"maru_server_url": " , "}, "names no server"),
        (GOOD | {"maru_server_url": "tcp://a:1,tcp://b:1"}, "name one"),
        (GOOD | {"maru_storage_backend": "remote_cxl"}, "not in this version"),
        (GOOD | {"maru_storage_backend": "cpu"}, "maru_cpu_pool_size is missing"),
        (GOOD | {"maru_storage_backend": "cpu", "maru_cpu_pool_size": "1G", "maru_pool_size": "1G"}, "CFG-03"),
        (GOOD | {"maru_cpu_numa_node": 0}, "maru_cpu_numa_node has no meaning on the cxl backend"),
        (CPU | {"maru_cpu_numa_node": "0;1"}, "maru_cpu_numa_node='0;1'"),
        (CPU | {"maru_cpu_numa_node": [0, -1]}, "one for each rank"),
        (CPU | {"maru_cpu_hugepages": "4M"}, "maru_cpu_hugepages='4M'"),
        (GOOD | {"maru_pool_size": "-1"}, "maru_pool_size"),
        (GOOD | {"maru_pool_size": 0}, "positive"),
        (GOOD | {"maru_async_load": False}, "asynchronous only"),
        (GOOD | {"maru_kv_chunk_tokens": 0}, "maru_kv_chunk_tokens=0"),
        (GOOD | {"maru_eager_map": "maybe"}, "true or false"),
        (GOOD | {"maru_write_order": "cpu"}, "order of ['cxl']"),
    ],
)
def test_bad_settings_are_named(extra: dict[str, object], text: str) -> None:
    with pytest.raises(SettingsError) as e:
        parse(extra)
    assert text in str(e.value)


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(SettingsError) as e:
        parse({"maru_storage_backend": "mixed", "x": 1}, policy="fail", role="kv_producer")
    assert len(e.value.problems) == 6, e.value.problems


@pytest.mark.parametrize(
    ("value", "size"), [("4G", 4 << 30), ("512M", 512 << 20), ("1.5GiB", 3 << 29), (4096, 4096), ("100", 100)]
)
def test_sizes(value: object, size: int) -> None:
    assert parse_size(value) == size


@pytest.mark.parametrize("value", ["", "4X", "-1G", 0, -5, True, None, "nan", float("nan"), float("inf"), 1.5])
def test_bad_sizes(value: object) -> None:
    with pytest.raises(ValueError):
        parse_size(value)
