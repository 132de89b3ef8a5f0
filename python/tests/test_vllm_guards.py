"""Guards of the connector that an independent review asked for; no engine is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from maru_vllm import span
from maru_vllm.identity import Unsupported, kv_shape, namespace_fields
from maru_vllm.messages import StepOrders
from test_vllm_identity import caches, config, spec
from test_vllm_roles import CHUNK, FakeLookup, FakeTransfers, Request, a_store, keys_of, make, make_worker, step, stored


def test_a_request_that_ends_in_the_last_step_with_tokens_is_let_go() -> None:
    # 0.26 calls start_load_kv and get_finished in a step without tokens, and not wait_for_save.
    t = FakeTransfers()
    w = make_worker(t)
    w.start_loads(StepOrders())
    w.start_stores(a_store())
    assert w.finished() == (set(), set())
    w.start_loads(StepOrders(finishing=["a"]))
    assert w.finished() == (set(), set())
    t.done = [1]
    w.start_loads(StepOrders())
    assert w.finished() == ({"a"}, set())


def test_a_request_that_ends_while_it_loads_is_held_by_its_load_alone() -> None:
    lookup = FakeLookup()
    s = make(lookup)
    r = Request("a", range(2 * CHUNK + 1))
    s.get_num_new_matched_tokens(r, 0)
    assert step(s, {"a": CHUNK}, [], {"a": [*range(1, 9)]}).stores
    # Preempted and resumed in one step, before its store was reported; another engine stored the rest.
    s.build_orders({}, ["a"], lambda _: None)
    lookup.have = set(keys_of(range(2 * CHUNK)))
    assert s.get_num_new_matched_tokens(r, 0) == (2 * CHUNK, True)
    s.update_state_after_alloc(r, [*range(11, 19)], 2 * CHUNK)
    assert s.request_finished(r) is False
    s.update_output(["a"], set(), stored({"a": 1}))
    assert s.live == 0


def test_reset_offers_and_stores_nothing_of_before() -> None:
    lookup = FakeLookup()
    s = make(lookup)
    lookup.have = set(keys_of(range(2 * CHUNK)))
    live = Request("live", range(2 * CHUNK + 1))
    assert s.get_num_new_matched_tokens(live, 0) == (2 * CHUNK, True)
    s.reset()
    assert s.get_num_new_matched_tokens(live, 0) == (0, False)
    assert step(s, {"live": 2 * CHUNK + 1}, [], {"live": [*range(1, 10)]}).stores == []
    late = Request("late", range(2 * CHUNK + 1))
    assert s.get_num_new_matched_tokens(late, 0) == (0, False)
    (order,) = step(s, {"late": 2 * CHUNK + 1}, [], {"late": [*range(11, 20)]}).stores
    assert not set(keys_of(range(2 * CHUNK))) & {order.keys[i : i + 32] for i in range(0, len(order.keys), 32)}
    # What it stored itself since then is its own again, until the next reset.
    lookup.have = {order.keys[i : i + 32] for i in range(0, len(order.keys), 32)}
    assert s.get_num_new_matched_tokens(Request("own", range(2 * CHUNK + 1)), 0) == (2 * CHUNK, True)
    s.reset()
    assert s.get_num_new_matched_tokens(Request("own2", range(2 * CHUNK + 1)), 0) == (0, False)


def test_a_hit_is_judged_once() -> None:
    lookup = FakeLookup()
    s = make(lookup)
    asked: list[int] = []
    s.cost.worth = lambda tokens: asked.append(tokens) or False  # type: ignore[method-assign,func-returns-value]
    lookup.have = set(keys_of(range(2 * CHUNK)))
    r = Request("a", range(2 * CHUNK + 1))
    for _ in range(100):
        assert s.get_num_new_matched_tokens(r, 0) == (0, False)
    assert asked == [2 * CHUNK]


def test_arguments_of_quantization_keep_engines_apart() -> None:
    def quantization(**model: object) -> str:
        shape = kv_shape(config(), caches(spec()))
        return str(namespace_fields(config(model=model), shape, weights="w", chunk_tokens=64, piece_bytes=65536)["quantization"])

    assert quantization() == ""
    assert quantization(quantization="fp8") == "fp8"
    one = quantization(quantization="fp8", quantization_config={"ignore": ["lm_head"]})
    assert one not in ("fp8", quantization(quantization="fp8", quantization_config={"ignore": []}))


def test_a_sliding_window_of_mla_is_refused() -> None:
    class SlidingWindowMLASpec(SimpleNamespace):
        """Named as the engine's."""

    with pytest.raises(Unsupported, match="SlidingWindowMLASpec"):
        kv_shape(config(), caches(spec(SlidingWindowMLASpec)))


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "content"), [(4, False, True), (0, True, True), (0, False, False), (None, False, False)]
)
def test_numbered_inputs_are_no_content(cache_gb: float | None, prefix_caching: bool, content: bool) -> None:
    c = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb)),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )
    assert span.identifiers_are_content(c) is content


def test_a_rank_that_does_not_know_itself_is_refused() -> None:
    assert span.tensor_rank(1) == 0
    with pytest.raises(RuntimeError, match="one of 2"):
        span.tensor_rank(2)
