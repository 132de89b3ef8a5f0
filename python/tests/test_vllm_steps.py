"""Steps that the scheduler role does not look through have nothing to order: against a role that looks through all."""

from __future__ import annotations

import random

import pytest

from maru_vllm.messages import StepOrders, StepReport
from maru_vllm.scheduler import SchedulerRole
from test_vllm_roles import BLOCK, CHUNK, CHUNK_BLOCKS, FakeLookup, Request, keys_of


class Play:
    """A role with requests that are computed, preempted, loaded and ended as orders say. looks_through: in every step."""

    def __init__(self, looks_through: bool) -> None:
        self.lookup = FakeLookup()
        self.role = SchedulerRole(self.lookup, block_tokens=BLOCK, chunk_blocks=CHUNK_BLOCKS, min_hit_tokens=0, clock=lambda: 0.0)
        self.looks_through = looks_through
        self.looked = self.steps = 0
        through = self.role._look_through

        def count(*args: object) -> None:
            self.looked += 1
            through(*args)  # type: ignore[arg-type]

        self.role._look_through = count  # type: ignore[method-assign,assignment]
        self.requests: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        self.loading: dict[str, int] = {}

    def add(self, name: str, tokens: list[int]) -> None:
        self.waiting[name] = Request(name, tokens)
        self.role.on_new_request(self.waiting[name])

    def admit(self, name: str) -> None:
        r = self.waiting[name]
        tokens, load = self.role.get_num_new_matched_tokens(r, 0)
        if load:
            assert tokens is not None
            self.role.update_state_after_alloc(r, [*range(200)], tokens)
            self.loading[name] = tokens
        else:
            self.requests[name] = r
        del self.waiting[name]

    def step(self, scheduled: dict[str, int], preempted: list[str]) -> StepOrders:
        if self.looks_through:
            self.role._idle_steps = 0
        for name in preempted:
            r = self.requests.pop(name)
            r.num_computed_tokens = 0
            self.waiting[name] = r
        orders = self.role.build_orders(scheduled, preempted, lambda _: [*range(200)])
        self.steps += 1
        for name, tokens in scheduled.items():
            r = self.requests[name]
            r.num_computed_tokens += tokens
            while r.num_computed_tokens >= r.num_tokens:
                r.all_token_ids.append(r.num_computed_tokens % 97)
        return orders

    def loaded(self, name: str, bad: set[int], report: StepReport | None) -> None:
        tokens = self.loading.pop(name)
        self.role.update_output([name], bad, report)
        r = self.requests[name] = self.all_of(name)
        r.num_computed_tokens = 0 if bad else tokens

    def all_of(self, name: str) -> Request:
        request: Request = self.role._requests[name].request
        return request


@pytest.mark.parametrize("seed", range(40))
def test_orders_are_those_of_a_role_that_looks_through_every_step(seed: int) -> None:
    rng = random.Random(seed)
    plays = [Play(False), Play(True)]
    known = [rng.randrange(500) for _ in range(8 * CHUNK)]
    for p in plays:
        p.lookup.have = set(keys_of(known[: 4 * CHUNK]))
    a = plays[0]
    for number in range(600):
        running = list(a.requests)
        if rng.random() < 0.03 and len(running) < 6:
            prefix = known[: rng.randrange(len(known))] if rng.random() < 0.5 else []
            tokens = prefix + [rng.randrange(500) for _ in range(rng.randrange(1, 3 * CHUNK))]
            name = f"r{rng.randrange(4)}"  # ids come again
            if name not in a.requests and name not in a.waiting and name not in a.loading:
                for p in plays:
                    p.add(name, tokens)
        if a.waiting and rng.random() < 0.2:
            name = rng.choice(list(a.waiting))
            for p in plays:
                p.admit(name)
        if a.loading and rng.random() < 0.2:
            name = rng.choice(list(a.loading))
            bad = {rng.randrange(8)} if rng.random() < 0.3 else set()
            for p in plays:
                p.loaded(name, bad, StepReport())
        running = list(a.requests)
        if running and rng.random() < 0.02:
            name = rng.choice(running)
            held = [p.role.request_finished(p.requests.pop(name)) for p in plays]
            assert held[0] == held[1]
            running.remove(name)
        if rng.random() < 0.005:
            for p in plays:
                p.role._generation = b""
                p.role.reset()
        preempted = [rng.choice(running)] if running and rng.random() < 0.02 else []
        scheduled = {}
        for name in running:
            if name in preempted or rng.random() < 0.01:
                continue
            r = a.requests[name]
            left = r.num_tokens - r.num_computed_tokens
            scheduled[name] = min(left, rng.choice((CHUNK, 3 * CHUNK))) if left > 1 else 1
            if rng.random() < 0.005:
                scheduled[name] += 3  # drafts
        one, other = [p.step(dict(scheduled), preempted) for p in plays]
        assert [(s.request_id, s.blocks) for s in one.stores] == [(s.request_id, s.blocks) for s in other.stores], (
            f"step {number}"
        )
        assert (one.finishing, one.preempted, one.step) == (other.finishing, other.preempted, other.step)
        assert [(x.request_id, x.counts, x.skips) for x in one.loads] == [(x.request_id, x.counts, x.skips) for x in other.loads]
        assert plays[0].lookup.ended == plays[1].lookup.ended, f"step {number}"
    assert plays[1].looked == plays[1].steps
    assert plays[0].looked < plays[0].steps, "some steps were not looked through"


def test_a_request_with_the_id_of_one_that_ended_is_looked_at() -> None:
    p = Play(False)
    p.add("a", [1] * 20)
    p.admit("a")
    p.step({"a": 20}, [])
    p.step({"a": 1}, [])
    p.step({"a": 1}, [])
    p.role.request_finished(p.requests.pop("a"))
    r = p.requests["a"] = Request("a", [2] * (CHUNK + 1), skip_reading_prefix_cache=True)  # no lookup
    p.role.on_new_request(r)
    assert p.role.get_num_new_matched_tokens(r, CHUNK) == (0, False)
    r.num_computed_tokens = CHUNK  # in the engine's own cache
    assert len(p.step({"a": 1}, []).stores) == 1


def test_a_request_that_is_preempted_and_resumed_in_one_step_is_looked_at() -> None:
    p = Play(False)
    p.add("a", [1] * (CHUNK + 8))
    p.admit("a")
    p.step({"a": CHUNK + 8}, [])
    p.step({"a": 1}, [])
    p.step({"a": 1}, [])
    ended = len(p.lookup.ended)
    r = p.requests["a"]
    p.role.build_orders({}, ["a"], lambda _: None)
    p.step({"a": 1}, [])
    assert p.role.get_num_new_matched_tokens(r, 0) == (0, False)
    p.step({"a": 1}, [])
    assert len(p.lookup.ended) == ended + 1, "it was looked up again, and runs"


def test_a_step_that_only_waits_for_lookups_lets_their_thread_run(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("maru_vllm.scheduler.time.sleep", slept.append)
    p = Play(False)
    p.lookup.ready = False
    p.add("a", [1] * 2 * CHUNK)
    r = p.waiting["a"]
    assert p.role.get_num_new_matched_tokens(r, 0) == (None, False)
    p.step({}, [])
    assert slept == [0], "it gives the lock away and does not wait"
    p.step({}, [])
    assert p.role.get_num_new_matched_tokens(r, 0) == (None, False)
    p.requests["b"] = Request("b", [2] * 5)
    p.step({"b": 1}, [])
    p.lookup.open[-1].ready = True
    assert p.role.get_num_new_matched_tokens(r, 0) == (0, False)
    p.step({}, [])
    assert slept == [0], "nothing is asked, something is computed, everything is answered"


def test_steps_of_decoding_requests_are_not_looked_through() -> None:
    p = Play(False)
    for i in range(8):
        p.add(f"r{i}", [i] * (CHUNK + 8 * i))
        p.admit(f"r{i}")
    p.step({f"r{i}": CHUNK + 8 * i for i in range(8)}, [])
    p.looked = 0
    stores = 0
    for _ in range(CHUNK):
        stores += len(p.step({f"r{i}": 1 for i in range(8)}, []).stores)
    assert stores == 8 and p.looked <= 2 * 8, "once for each chunk that becomes complete, and once behind it"
