"""Lookups over a client that is played: what is asked in which call, and that everybody is answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from maru.api import Mode, Verdict
from maru.errors import Code, UnavailableError
from maru_vllm import lookup as module
from maru_vllm.lookup import ClientLookup, lease_id

CXL_HIT = Verdict.HIT | 2 << 2


class FakeClient:
    """Knows keys by target; its first call waits for the gate, so that what follows is queued."""

    def __init__(self, world: int) -> None:
        self.have: dict[int, set[bytes]] = {rank: set() for rank in range(world)}
        self.pending: set[bytes] = set()
        self.workers = b"".join(bytes((rank,)) * 16 for rank in range(world))
        self.connected = True
        self.config = SimpleNamespace(server_address="tcp://played")
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.calls: list[tuple[Any, ...]] = []
        self.raises: Exception | None = None

    def targets(self) -> bytes:
        self.reached.set()
        self.gate.wait(10)
        if self.raises is not None:
            raise self.raises
        return self.workers

    def probe(self, keys: bytes, mode: Mode, *, targets: bytes, request_id: int, timeout: float) -> tuple[int, bytearray]:
        split = [keys[i : i + 32] for i in range(0, len(keys), 32)]
        self.calls.append((mode, split, [targets[i] for i in range(0, len(targets), 16)], request_id))
        out, missed = bytearray(), False
        for key in split:
            if missed and mode == Mode.PREFIX:
                out.append(Verdict.NOT_TRIED)
            elif all(key in self.have[targets[i]] for i in range(0, len(targets), 16)):
                out.append(CXL_HIT)
            else:
                out.append(Verdict.PENDING if key in self.pending else Verdict.MISS)
                missed = True
        return len(out) - len(out.lstrip(bytes((CXL_HIT,)))), out

    def refresh_requests(self, ids: Sequence[int]) -> None:
        self.calls.append(("refresh", list(ids)))

    def end_requests(self, ids: Sequence[int]) -> None:
        self.calls.append(("end", list(ids)))

    def close(self, timeout: float) -> None: ...


def key(name: str, index: int) -> bytes:
    return f"{name}{index}".encode().ljust(32, b".")


def keys(name: str, count: int) -> Callable[[], bytes]:
    return lambda: b"".join(key(name, i) for i in range(count))


Opener = Callable[..., tuple[ClientLookup, FakeClient]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    monkeypatch.setattr(module._lib, "load", lambda: None)
    all_of_them = []

    def make(world: int = 1, replicas: int = 1) -> tuple[ClientLookup, FakeClient]:
        client = FakeClient(world)
        made = ClientLookup(client, bytes(16), world, replicas, 2.0)  # type: ignore[arg-type]
        all_of_them.append((made, client))
        return made, client

    yield make
    for made, client in all_of_them:
        client.gate.set()
        made.close()


def queued(lookup: ClientLookup, client: FakeClient, *names_and_counts: tuple[str, int]) -> list[Any]:
    """Probes that are taken together: they come while another one is under way."""
    first = lookup.probe("first", keys("first", 1))
    assert client.reached.wait(10)
    results = [lookup.probe(name, keys(name, count)) for name, count in names_and_counts]
    client.gate.set()
    settle(lookup)
    assert first.done()
    lookup.end("first")
    return results


def settle(lookup: ClientLookup) -> None:
    """Returns when everything that was put before is done."""
    done = threading.Event()
    lookup._tasks.put((lambda _: done.set(), None))
    assert done.wait(10)


def test_requests_that_come_together_are_asked_for_in_one_call(opened: Opener) -> None:
    lookup, client = opened()
    client.have[0] |= {key("b", 0), key("b", 1), key("b", 3), key("c", 0)}
    client.pending = {key("c", 1)}
    a, b, c = queued(lookup, client, ("a", 2), ("b", 4), ("c", 2))
    assert all(r.done() for r in (a, b, c))
    assert [r.leading() for r in (a, b, c)] == [0, 2, 1]
    assert [r.reason() for r in (a, b, c)] == ["not_stored", "not_stored", "pending"]
    assert b.media(0, 2) == {"cxl": 2} and c.media(0, 1) == {"cxl": 1}
    together = [key("a", 0), key("a", 1), *(key("b", i) for i in range(4)), key("c", 0), key("c", 1)]
    assert client.calls[1] == (Mode.EACH, together, [0], 0), "one call, and no leases for chunks behind a miss"
    assert client.calls[2:] == [
        (Mode.PREFIX, [key("b", 0), key("b", 1)], [0], lease_id("b")),
        (Mode.PREFIX, [key("c", 0)], [0], lease_id("c")),
    ], "the leases of those that hit"


def test_long_prompts_are_asked_for_in_several_calls_and_hashed_as_they_come(opened: Opener) -> None:
    lookup, client = opened()
    client.have[0] |= {key("c", 0)}
    a, b, c = queued(lookup, client, ("a", 4000), ("b", 90), ("c", 90))
    asked = [(mode, len(split)) for mode, split, _, _ in client.calls[1:]]
    assert asked == [(Mode.EACH, 4090), (Mode.PREFIX, 90)], "the last one is alone in its call"
    assert [r.leading() for r in (a, b, c)] == [0, 0, 1]


def test_one_alone_takes_its_leases_by_the_same_call(opened: Opener) -> None:
    lookup, client = opened()
    client.gate.set()
    client.have[0] |= {key("a", 0)}
    a = lookup.probe("a", keys("a", 3))
    settle(lookup)
    assert (a.leading(), a.reason()) == (1, "not_stored")
    assert client.calls == [(Mode.PREFIX, [key("a", i) for i in range(3)], [0], lease_id("a"))]


def test_only_leases_that_may_be_there_are_ended_and_those_together(opened: Opener) -> None:
    lookup, client = opened()
    client.have[0] |= {key("b", 0), key("c", 0)}
    queued(lookup, client, ("a", 1), ("b", 1), ("c", 1))
    client.calls.clear()
    hold, go = threading.Event(), threading.Event()
    lookup._tasks.put((lambda _: (hold.set(), go.wait(10)), None))
    assert hold.wait(10)
    for name in "abc":
        lookup.end(name)
        lookup.end(name)
    go.set()
    settle(lookup)
    assert client.calls == [("end", [lease_id("b"), lease_id("c")])]
    assert not lookup._last, "nothing is kept of requests that ended"


def test_a_probe_under_way_is_ended_behind_it(opened: Opener) -> None:
    lookup, client = opened()
    client.have[0] |= {key("a", 0)}
    a = lookup.probe("a", keys("a", 1))
    assert client.reached.wait(10)
    lookup.end("a")
    client.gate.set()
    settle(lookup)
    assert a.leading() == 1 and client.calls[-1] == ("end", [lease_id("a")])


def test_leases_of_an_earlier_lookup_are_ended_too(opened: Opener) -> None:
    lookup, client = opened()
    client.have[0] |= {key("a", 0)}
    client.gate.set()
    lookup.probe("a", keys("a", 1))
    settle(lookup)
    client.have[0].clear()
    client.gate.clear()
    client.reached.clear()
    _, again = queued(lookup, client, ("x", 1), ("a", 1))
    assert again.leading() == 0 and client.calls[-1][3] == 0, "asked with others, the server keeps the old ones"
    lookup.end("a")
    settle(lookup)
    assert client.calls[-1] == ("end", [lease_id("a")])


def test_a_prompt_that_cannot_be_hashed_is_a_miss_and_the_others_are_answered(
    opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bytes:
        raise OverflowError("a token id is no 32-bit number")

    lookup, client = opened()
    client.have[0] |= {key("b", 0)}
    first = lookup.probe("first", keys("first", 1))
    assert client.reached.wait(10)
    a = lookup.probe("a", broken)
    b = lookup.probe("b", keys("b", 1))
    client.gate.set()
    settle(lookup)
    assert (first.done(), a.leading(), b.leading()) == (True, 0, 1)
    assert "not hashed" in caplog.text


@pytest.mark.parametrize("how", ["no worker", "a worker is missing", "not connected", "refused"])
def test_a_server_that_is_away_answers_everybody(opened: Opener, how: str) -> None:
    lookup, client = opened(world=2)
    if how == "no worker":
        client.raises = UnavailableError(Code.UNAVAILABLE, "no live worker")
    elif how == "refused":
        client.raises = RuntimeError("anything")
    elif how == "a worker is missing":
        client.workers = client.workers[:16]
    else:
        client.connected = False
    results = queued(lookup, client, ("a", 1), ("b", 2))
    assert [(r.leading(), r.reason()) for r in results] == [(0, "unreachable")] * 2
    at_once = lookup.probe("c", keys("c", 1))
    assert at_once.done() and at_once.reason() == "unreachable", "nobody asks for a second"


def test_every_rank_of_a_shard_must_be_able_to_read_it(opened: Opener) -> None:
    lookup, client = opened(world=4, replicas=2)
    for rank in range(4):
        client.have[rank] |= {key("a", 0), key("a", 1), key("b", 0)}
    client.have[3] -= {key("a", 1), key("b", 0)}
    a, b, c = queued(lookup, client, ("a", 2), ("b", 1), ("c", 1))
    assert [r.leading() for r in (a, b, c)] == [1, 0, 0]
    together = [targets for mode, _, targets, _ in client.calls if mode == Mode.EACH]
    assert together == [[0, 2], [1, 3]], "shard 0 lies at ranks 0 and 1, shard 1 at 2 and 3"
