"""Lookups over a client that is played: what is submitted, and that everybody is answered."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from maru.api import LOOKUP_AWAY, Verdict
from maru.errors import ClosedError, Code
from maru_vllm import lookup as module
from maru_vllm.lookup import ClientLookup, lease_id

CXL_HIT = Verdict.HIT | 2 << 2


class FakeClient:
    """Knows keys, and answers when it is told to, in any order."""

    def __init__(self) -> None:
        self.have: set[bytes] = set()
        self.pending: set[bytes] = set()
        self.config = SimpleNamespace(server_address="tcp://played")
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.calls: list[tuple[Any, ...]] = []
        self.open: dict[int, list[bytes]] = {}
        self.finished: list[int] = []
        self.codes: dict[int, array[int]] = {}
        self.last = 0
        self.raises: Exception | None = None
        self.submitted = threading.Event()

    def submit_lookup(self, keys: bytes, workers: int, replicas: int, request_id: int, timeout: float) -> int:
        if self.raises is not None:
            raise self.raises
        self.last += 1
        self.open[self.last] = [keys[i : i + 32] for i in range(0, len(keys), 32)]
        self.calls.append(("lookup", len(keys) // 32, workers, replicas, request_id, timeout))
        self.submitted.set()
        return self.last

    def answer(self, job: int | None = None, away: bool = False) -> None:
        """One of the open jobs, or all."""
        for j in list(self.open) if job is None else [job]:
            out, missed = array("i"), False
            for key in self.open.pop(j):
                if missed:
                    out.append(Verdict.NOT_TRIED)
                elif key in self.have:
                    out.append(CXL_HIT)
                else:
                    out.append(Verdict.PENDING if key in self.pending else Verdict.MISS)
                    missed = True
            if away:
                out = array("i", [LOOKUP_AWAY] * len(out))
            out.append(1500)
            self.codes[j] = out
            self.finished.append(j)
            os.eventfd_write(self.event_fd, 1)

    def completed(self) -> list[int]:
        if self.raises is not None:
            raise self.raises
        done, self.finished = self.finished, []
        os.eventfd_read(self.event_fd)
        return done

    def job_result(self, job: int) -> array[int]:
        return self.codes.pop(job)

    def refresh_requests(self, ids: Sequence[int], *, wait: bool) -> None:
        assert not wait
        self.calls.append(("refresh", list(ids)))

    def end_requests(self, ids: Sequence[int], *, wait: bool) -> None:
        assert not wait
        if self.raises is not None:
            raise self.raises
        self.calls.append(("end", list(ids)))

    def close(self, timeout: float) -> None:
        os.close(self.event_fd)


def key(name: str, index: int) -> bytes:
    return f"{name}{index}".encode().ljust(32, b".")


def keys(name: str, count: int) -> bytes:
    return b"".join(key(name, i) for i in range(count))


Opener = Callable[..., tuple[ClientLookup, FakeClient]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    monkeypatch.setattr(module._lib, "load", lambda: None)
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    all_of_them = []

    def make(world: int = 1, replicas: int = 1) -> tuple[ClientLookup, FakeClient]:
        client = FakeClient()
        made = ClientLookup(client, bytes(16), world, replicas, 2.0)  # type: ignore[arg-type]
        all_of_them.append(made)
        return made, client

    yield make
    for made in all_of_them:
        made.close()


def test_lookups_are_submitted_at_once_and_answered_in_any_order(opened: Opener) -> None:
    lookup, client = opened(world=4, replicas=2)
    client.have = {key("b", 0), key("b", 1), key("b", 3), key("c", 0)}
    client.pending = {key("c", 1)}
    a, b, c = (lookup.probe(name, keys(name, count)) for name, count in (("a", 2), ("b", 4), ("c", 2)))
    assert client.calls == [("lookup", n, 4, 2, lease_id(name), 2.0) for name, n in (("a", 2), ("b", 4), ("c", 2))]
    assert not (a.done() or b.done() or c.done())
    client.answer(2)
    assert b.done() and not a.done() and not c.done()
    client.answer()
    assert a.done() and c.done()
    assert [r.leading() for r in (a, b, c)] == [0, 2, 1]
    assert [r.reason() for r in (a, b, c)] == ["not_stored", "not_stored", "pending"]
    assert b.media(0, 2) == {"cxl": 2} and c.media(0, 1) == {"cxl": 1}
    assert not lookup._asked, "nothing is kept of answers"


def test_an_answer_is_dated_when_it_came(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    lookup, client = opened()
    a = lookup.probe("a", keys("a", 1))
    client.answer()
    now[0] = 107.0
    assert a.done() and a.answered_at() == pytest.approx(100.0015)


def test_keys_of_a_long_prompt_are_hashed_elsewhere(opened: Opener) -> None:
    lookup, client = opened()
    go, threads = threading.Event(), []

    def hashed() -> bytes:
        threads.append(threading.current_thread())
        assert go.wait(10)
        return keys("a", 3)

    a, b = lookup.probe("a", hashed), lookup.probe("b", keys("b", 1))
    client.answer()
    assert b.done() and not a.done(), "the short one does not wait"
    client.submitted.clear()
    go.set()
    assert client.submitted.wait(10) and threads != [threading.current_thread()]
    client.answer()
    assert a.done() and a.leading() == 0
    assert [call[1] for call in client.calls] == [1, 3]


def test_only_leases_that_may_be_there_are_ended(opened: Opener) -> None:
    lookup, client = opened()
    client.have = {key("b", 0)}
    for name in "abc":
        lookup.probe(name, keys(name, 1))
    client.answer(1)
    client.answer(2)
    client.calls.clear()
    for name in "abcd":
        lookup.end(name)
        lookup.end(name)
    assert client.calls == [("end", [lease_id("b")]), ("end", [lease_id("c")])], "c is under way, a was a miss"
    assert not lookup._last, "nothing is kept of requests that ended"
    client.answer()
    lookup.probe("e", keys("e", 1)).done()
    assert len(lookup._asked) == 1, "an answer that nobody wants is taken all the same"


def test_a_prompt_that_is_being_hashed_when_its_request_ends_is_not_asked_for(opened: Opener) -> None:
    lookup, client = opened()
    began, go = threading.Event(), threading.Event()

    def hashed() -> bytes:
        began.set()
        assert go.wait(10)
        return keys("a", 1)

    a = lookup.probe("a", hashed)
    assert began.wait(10)
    lookup.end("a")
    go.set()
    done = threading.Event()
    lookup.probe("b", lambda: done.set() or keys("b", 1))
    assert done.wait(10) and a.done() and a.leading() == 0
    assert [call[:2] for call in client.calls if call[0] == "lookup" and call[4] == lease_id("a")] == []


def test_leases_of_an_earlier_lookup_are_ended_too(opened: Opener) -> None:
    lookup, client = opened()
    client.have = {key("a", 0)}
    lookup.probe("a", keys("a", 1))
    client.answer()
    client.have.clear()
    again = lookup.probe("a", keys("a", 1))
    client.answer()
    assert again.done() and again.leading() == 0
    lookup.end("a")
    assert client.calls[-1] == ("end", [lease_id("a")])


def test_a_prompt_that_cannot_be_hashed_is_a_miss_and_the_others_are_answered(
    opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bytes:
        raise OverflowError("a token id is no 32-bit number")

    lookup, client = opened()
    client.have = {key("b", 0)}
    a, b = lookup.probe("a", broken), lookup.probe("b", lambda: keys("b", 1))
    assert client.submitted.wait(10)
    client.answer()
    assert a.done() and a.leading() == 0 and b.done() and b.leading() == 1
    assert "not hashed" in caplog.text


def test_a_server_that_is_away_is_said_once(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    lookup, client = opened()
    a, b = lookup.probe("a", keys("a", 1)), lookup.probe("b", keys("b", 2))
    client.answer(away=True)
    assert [(r.done(), r.leading(), r.reason()) for r in (a, b)] == [(True, 0, "unreachable")] * 2
    assert caplog.text.count("no hits for now") == 1
    lookup.end("a")
    assert client.calls[-1] == ("end", [lease_id("a")]), "it may have heard the question"
    c = lookup.probe("c", keys("c", 1))
    client.answer()
    assert c.done() and caplog.text.count("hits are back") == 1


def test_a_library_that_takes_nothing_more_is_a_miss(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    lookup, client = opened()
    client.raises = ClosedError(Code.CLOSED, "the client is closed")
    a, b = lookup.probe("a", keys("a", 1)), lookup.probe("b", keys("b", 1))
    assert [(r.done(), r.reason()) for r in (a, b)] == [(True, "unreachable")] * 2
    assert caplog.text.count("the client is closed") == 1, "said once"
    lookup.keep([])
    lookup.end("a")


def test_everybody_is_answered_when_the_library_fails(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    lookup, client = opened()
    a, b = lookup.probe("a", keys("a", 1)), lookup.probe("b", keys("b", 1))
    client.answer(1)
    client.raises = ClosedError(Code.CLOSED, "the client is closed")
    assert a.done() and b.done() and a.reason() == b.reason() == "unreachable"
    assert caplog.text.count("answers of lookups are lost") == 1


def test_after_close_nothing_is_asked_and_nothing_raised(opened: Opener) -> None:
    lookup, client = opened()
    a = lookup.probe("a", keys("a", 1))
    client.close = lambda timeout: None  # type: ignore[method-assign]  # the fixture closes once more
    lookup.close()
    os.close(client.event_fd)
    client.event_fd, count = os.eventfd(0), len(client.calls)
    b, c = lookup.probe("b", keys("b", 1)), lookup.probe("c", lambda: keys("c", 1))
    again = lookup.probe("a", keys("a", 1))
    assert all(r.done() and r.reason() == "unreachable" for r in (a, b, c, again)) and len(client.calls) == count
    lookup.end("b")


def test_a_lookup_that_another_one_replaced_is_not_asked_for(opened: Opener) -> None:
    lookup, client = opened()
    began, go, second = threading.Event(), threading.Event(), threading.Event()

    def hashed() -> bytes:
        began.set()
        assert go.wait(10)
        return keys("a", 1)

    def late() -> bytes:
        raise AssertionError("nobody wants these keys any more")

    lookup.probe("a", hashed)
    assert began.wait(10)
    lookup.probe("b", late)
    lookup.end("b")
    lookup.probe("a", keys("a", 2))
    lookup.end("a")
    go.set()
    lookup.probe("c", lambda: second.set() or keys("c", 1))
    client.submitted.clear()
    assert second.wait(10) and client.submitted.wait(10)
    ends = [("end", [lease_id(name)]) for name in "ba"]
    assert [call[:2] for call in client.calls] == [ends[0], ("lookup", 2), ends[1], ("lookup", 1)]


def test_leases_are_kept_for_those_that_are_named(opened: Opener) -> None:
    lookup, client = opened()
    lookup.keep(["a", "b"])
    assert client.calls == [("refresh", [lease_id("a"), lease_id("b")])]
    assert not lookup.keep_due()
