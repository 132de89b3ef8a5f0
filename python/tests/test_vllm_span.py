"""The installed vLLM beside what span.py says about it: a new release that demands more is noticed here."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

pytestmark = pytest.mark.vllm


def test_the_abstract_methods_are_those_that_are_implemented() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from maru_vllm import MaruKVConnector, span

    assert span.unknown_abstract(KVConnectorBase_V1) == set()
    assert set(KVConnectorBase_V1.__abstractmethods__) == span.ABSTRACT
    assert not getattr(MaruKVConnector, "__abstractmethods__", ()), "everything abstract is implemented"


def test_what_is_overridden_is_known_and_takes_what_the_engine_gives() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from maru_vllm import MaruKVConnector, span

    ours = {
        n
        for n, v in vars(MaruKVConnector).items()
        if not n.startswith("_") and hasattr(KVConnectorBase_V1, n) and (callable(v) or isinstance(v, (property, classmethod)))
    }
    assert ours == span.ABSTRACT | span.OPTIONAL
    for name in ours - {"requires_kv_delivery"}:
        base = inspect.signature(getattr(KVConnectorBase_V1, name)).parameters
        mine = inspect.signature(getattr(MaruKVConnector, name)).parameters
        flexible = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in mine.values())
        needed = [n for n, p in base.items() if p.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)]
        assert flexible or [*mine][: len(needed)] == needed, name


def test_the_fields_that_are_read_are_there() -> None:
    from vllm.config import KVTransferConfig
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    def fields(cls: type) -> set[str]:
        return {f.name for f in dataclasses.fields(cls)}

    step = {"num_scheduled_tokens", "preempted_req_ids", "finished_req_ids", "scheduled_new_reqs", "scheduled_cached_reqs"}
    assert step <= fields(SchedulerOutput)
    assert {"req_id", "block_ids"} <= fields(NewRequestData)
    assert {"req_ids", "new_block_ids", "resumed_req_ids"} <= fields(CachedRequestData)
    assert {"finished_recving", "invalid_block_ids", "kv_connector_worker_meta"} <= fields(KVConnectorOutput)
    assert {"kv_connector_extra_config", "engine_id", "kv_role", "kv_load_failure_policy"} <= fields(KVTransferConfig)
    source = inspect.getsource(Request.__init__)
    for name in (
        "request_id", "all_token_ids", "num_computed_tokens", "cache_salt", "prompt_embeds", "lora_request", "mm_features",
        "resumable", "streaming_queue", "pooling_params", "skip_reading_prefix_cache",
    ):  # fmt: skip
        assert f"self.{name}" in source, name


def test_detection() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from maru_vllm import span

    found = span.detect(KVConnectorBase_V1)
    assert not found.missing and found.block_state and found.request_failures
    text = str(found)
    assert found.version in text and "from the engine" in text

    class Older:
        """A release that knows less."""

        def get_finished(self) -> None: ...

    assert set(span.detect(Older).missing) == span.OPTIONAL - {"get_finished"}


def test_unknown_content_bypasses() -> None:
    from types import SimpleNamespace

    import vllm.v1.core.kv_cache_utils as utils

    from maru_vllm import span

    request = SimpleNamespace(num_tokens=4, lora_request=None, mm_features=[], cache_salt="s", prompt_embeds=None)
    generate = utils.generate_block_hash_extra_keys
    assert not span.extra_key_check()(request)
    try:
        utils.generate_block_hash_extra_keys = lambda request, start, end, mm: ((("weather", "rain"),), 0)
        assert span.extra_key_check()(request)
    finally:
        utils.generate_block_hash_extra_keys = generate
