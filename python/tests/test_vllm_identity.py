"""What is refused at engine start, and what keeps two engines' KV apart; no engine is needed for either."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from maru.keys import Namespace
from maru_vllm import identity
from maru_vllm.identity import Ranks, Unsupported, kv_ranks, kv_shape, namespace_fields, unsupported_features


class FullAttentionSpec(SimpleNamespace):
    """Named as the engine's."""


class SlidingWindowSpec(SimpleNamespace):
    """Named as the engine's."""


class MLAAttentionSpec(SimpleNamespace):
    """Named as the engine's."""


def spec(kind: type = FullAttentionSpec, **kw: Any) -> Any:
    usual = {"block_size": 16, "page_size_bytes": 65536, "num_kv_heads": 8, "head_size": 128, "dtype": "torch.bfloat16"}
    return kind(**{**usual, **kw})


def caches(*specs: Any, **kw: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=s, layer_names=["l0", "l1"]) for s in specs or (spec(),)]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=100, kv_cache_layout="LBNHC", **kw)


def config(parallel: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **kw: Any) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            **{"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1, **(parallel or {})}
        ),
        model_config=SimpleNamespace(
            **{
                "hf_config": SimpleNamespace(hidden=256),
                "dtype": "torch.bfloat16",
                "get_total_num_kv_heads": lambda: 8,
                **(model or {}),
            }
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="cuda"),
        **kw,
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size=2"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size=2"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel_size=2"),
        ({"parallel": {"nnodes_within_dp": 2}}, "over 2 hosts"),
        ({"speculative_config": object()}, "speculative decoding"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_with_a_reason(change: dict[str, Any], text: str) -> None:
    (problem,) = unsupported_features(config(**change))
    assert text in problem and len(problem) > len(text) + 20


def test_all_problems_at_once_and_none_for_a_usual_engine() -> None:
    assert unsupported_features(config(parallel={"tensor_parallel_size": 4, "data_parallel_size": 2})) == []
    c = config(parallel={"pipeline_parallel_size": 2}, speculative_config=object())
    c.cache_config.cache_dtype, c.device_config.device_type = "fp8", "tpu"
    assert len(unsupported_features(c)) == 4


@pytest.mark.parametrize("groups", [(spec(), spec(SlidingWindowSpec)), (spec(SlidingWindowSpec),)])
def test_hybrid_models_are_refused(groups: tuple[Any, ...]) -> None:
    with pytest.raises(Unsupported, match="full attention"):
        kv_shape(config(), caches(*groups))


@pytest.mark.parametrize(
    ("size", "told", "kind", "want"),
    [
        (1, 1, FullAttentionSpec, Ranks(1, 1)),
        (4, 1, FullAttentionSpec, Ranks(4, 1)),
        (16, 2, FullAttentionSpec, Ranks(16, 2)),
        (16, None, FullAttentionSpec, Ranks(16, 2)),  # 8 KV heads on 16 ranks, by an engine that does not say it
        (4, None, FullAttentionSpec, Ranks(4, 1)),
        (4, None, MLAAttentionSpec, Ranks(4, 4)),
        (4, 4, MLAAttentionSpec, Ranks(4, 4)),
    ],
)
def test_ranks(size: int, told: int | None, kind: type, want: Ranks) -> None:
    told_so = {} if told is None else {"kv_tp_replicas": told}
    ranks = kv_ranks(config(parallel={"tensor_parallel_size": size}), caches(spec(kind), **told_so))
    assert ranks == want
    places = [ranks.place(r) for r in range(size)]
    assert len(set(places)) == size and {s for s, _ in places} == set(range(ranks.shards))


def fields(c: Any, k: Any, **kw: Any) -> Namespace:
    return Namespace(**namespace_fields(c, kv_shape(c, k), **{"weights": "w@1", "chunk_tokens": 256, "piece_bytes": 16384, **kw}))


def test_whatever_changes_the_bytes_is_in_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    base = fields(config(), caches())
    others = {
        "weights": fields(config(), caches(), weights="w@2"),
        "chunk_tokens": fields(config(), caches(), chunk_tokens=512),
        "tensor_parallel": fields(config(parallel={"tensor_parallel_size": 2}), caches()),
        "model_dtype": fields(config(model={"dtype": "torch.float16"}), caches()),
        "kv_dtype": fields(config(), caches(spec(dtype="torch.float16"))),
        "block_tokens": fields(config(), caches(spec(block_size=32))),
        "config": fields(config(model={"hf_config": SimpleNamespace(hidden=512)}), caches()),
        "quantization": fields(config(model={"quantization": "awq"}), caches()),
        "run_bytes": fields(config(), caches(spec(page_size_bytes=32768))),
    }
    for name, other in others.items():
        differ = [d.split(":")[0] for d in base.diff(other)]
        assert differ == [name] and other.id() != base.id(), (name, differ)
    # An engine that does not name its layout shares with its like only.
    monkeypatch.setattr(identity.span, "device_layout", lambda c: "0.26.0/FLASH_ATTN//H200")
    old = caches()
    old.kv_cache_layout = None
    assert [d.split(":")[0] for d in base.diff(fields(config(), old))] == ["layout"]


def test_ranks_and_data_parallel_ranks_are_no_part_of_it() -> None:
    a = config(parallel={"data_parallel_rank": 0, "rank": 0})
    b = config(parallel={"data_parallel_rank": 3, "rank": 1, "data_parallel_size": 4})
    assert fields(a, caches()).id() == fields(b, caches()).id()
