"""Which engines may share KV: the fields of the namespace, from vLLM's own configuration.

Both roles compute them from configuration alone, so that they agree before a
tensor exists; the worker then checks its tensors against them (geometry.py). Model
paths, ranks of data parallelism, hosts and the storage backend are no part of it
(ID-07, ID-11, ID-12).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from maru.keys import fingerprint_config
from maru_vllm import span

__all__ = ["ENGINE_FORMAT", "KVShape", "Ranks", "Unsupported", "kv_ranks", "kv_shape", "namespace_fields", "unsupported_features"]

# Raised by hand when a vLLM release changes what the bytes of a block mean.
ENGINE_FORMAT = 1


class Unsupported(ValueError):
    """A feature of the engine that this version does not cache for."""


@dataclass(frozen=True)
class KVShape:
    """The engine's KV cache as configured. Sizes in bytes, block_tokens in tokens.

    page_bytes: one block of one layer, without padding.
    """

    block_tokens: int
    page_bytes: int
    layer_names: tuple[str, ...]
    num_blocks: int
    kv_heads: int
    head_size: int
    kv_dtype: str
    layout: str | None


@dataclass(frozen=True)
class Ranks:
    """Tensor parallel ranks of one engine: size ranks, of which replicas neighbours hold the same KV.

    Rank r has shard r // replicas; shards are what a key's shard field counts.
    """

    size: int = 1
    replicas: int = 1

    @property
    def shards(self) -> int:
        return self.size // self.replicas

    def place(self, rank: int) -> tuple[int, int]:
        """(shard, replica) of a rank."""
        return rank // self.replicas, rank % self.replicas


def kv_ranks(vllm_config: Any, kv_cache_config: Any) -> Ranks:
    """How the KV of one token lies on the ranks: as the engine says, or by the count of KV heads before 0.32."""
    size = int(getattr(vllm_config.parallel_config, "tensor_parallel_size", 1) or 1)
    replicas = getattr(kv_cache_config, "kv_tp_replicas", None)
    if replicas is None:
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        if "MLA" in type(spec).__name__:
            replicas = size
        else:
            heads = int(vllm_config.model_config.get_total_num_kv_heads())
            replicas = max(1, size // heads)
    if int(replicas) < 1 or size % int(replicas):
        raise Unsupported(f"{size} tensor parallel ranks of which {replicas} hold the same KV do not divide evenly")
    return Ranks(size, int(replicas))


def kv_shape(vllm_config: Any, kv_cache_config: Any) -> KVShape:
    """Reads the one KV cache group; Unsupported when there are more or of another kind."""
    groups = list(kv_cache_config.kv_cache_groups)
    if len(groups) != 1:
        raise Unsupported(f"{len(groups)} KV cache groups (a hybrid model): only one group of full attention is supported")
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    if ("FullAttention" not in kind and "MLA" not in kind) or "SlidingWindow" in kind:
        raise Unsupported(f"KV cache of kind {kind}: only full attention is supported")
    page = getattr(spec, "unpadded_page_size_bytes", None) or getattr(spec, "real_page_size_bytes", None)
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or getattr(vllm_config.cache_config, "kv_cache_layout", None)
    return KVShape(
        block_tokens=int(spec.block_size),
        page_bytes=int(page or spec.page_size_bytes),
        layer_names=tuple(groups[0].layer_names),
        num_blocks=int(kv_cache_config.num_blocks),
        kv_heads=int(getattr(spec, "num_kv_heads", 1)),
        head_size=int(getattr(spec, "head_size", 0)),
        kv_dtype=_name(getattr(spec, "dtype", "")),
        layout=str(layout) if layout else None,
    )


def unsupported_features(vllm_config: Any) -> list[str]:
    """Every feature in use that this version refuses, with the reason."""
    p = vllm_config.parallel_config
    problems = []
    stages = "stages have different layers, so that an object would have another form on each"
    slices = "a rank has a part of each block's tokens, which no other engine could read"
    for name, why in (
        ("pipeline_parallel_size", stages),
        ("decode_context_parallel_size", slices),
        ("prefill_context_parallel_size", slices),
    ):
        value = getattr(p, name, 1)
        if (value or 1) != 1:
            problems.append(f"{name}={value} is not supported, allowed: 1: {why}")
    hosts = int(getattr(p, "nnodes_within_dp", 1) or 1)
    if hosts != 1:
        problems.append(f"an engine over {hosts} hosts is not supported, allowed: all its ranks on one host")
    if getattr(vllm_config, "speculative_config", None) is not None:
        problems.append("speculative decoding is not supported yet: KV of drafts that are rejected later must not be stored")
    dtype = str(getattr(vllm_config.cache_config, "cache_dtype", "auto"))
    if dtype not in ("auto", "float32", "float16", "bfloat16"):
        problems.append(f"cache_dtype={dtype!r} is not supported yet, allowed: auto, float32, float16, bfloat16")
    if (device := device_type(vllm_config)) not in ("cpu", "cuda"):
        problems.append(f"device {device!r} is not supported, allowed: cpu, cuda")
    return problems


def device_type(vllm_config: Any) -> str:
    """What the engine computes on: "cpu", "cuda" or another type."""
    return str(getattr(getattr(vllm_config, "device_config", None), "device_type", "cpu") or "cpu")


def namespace_fields(vllm_config: Any, shape: KVShape, *, weights: str, chunk_tokens: int, piece_bytes: int) -> dict[str, Any]:
    """Fields of maru.keys.Namespace for this engine."""
    model = vllm_config.model_config
    p = vllm_config.parallel_config
    return {
        "weights": weights,
        "engine": "vllm",
        "engine_format": ENGINE_FORMAT,
        "config": fingerprint_config(_clean(_to_dict(model.hf_config))),
        "overrides": _canonical(getattr(model, "hf_overrides", None)),
        "quantization": _quantization(model),
        "model_dtype": _name(getattr(model, "dtype", "")),
        "kv_dtype": shape.kv_dtype,
        "layout": shape.layout or span.device_layout(vllm_config),
        "isa": _cpu_isa(model, shape) if device_type(vllm_config) == "cpu" else "",
        "block_tokens": shape.block_tokens,
        "chunk_tokens": chunk_tokens,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "layers": (len(shape.layer_names),),
        "run_bytes": (shape.page_bytes,),
        "piece_bytes": piece_bytes,
        "tensor_parallel": int(getattr(p, "tensor_parallel_size", 1) or 1),
        "pipeline_parallel": int(getattr(p, "pipeline_parallel_size", 1) or 1),
    }


def _cpu_isa(model: Any, shape: KVShape) -> str:
    """The packing of a CPU block depends on the instruction set that the backend picks."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        import platform

        return f"unknown-{platform.machine()}"
    return str(_get_attn_isa(model.dtype, shape.block_tokens, shape.head_size or None))


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _to_dict(config: Any) -> Any:
    to_dict = getattr(config, "to_dict", None)
    return to_dict() if callable(to_dict) else dict(vars(config))


def _clean(value: Any) -> Any:
    """Plain values only: what has no canonical form is taken by its text."""
    if isinstance(value, Mapping):
        return {str(k): _clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return _name(value)


def _quantization(model: Any) -> str:
    """The method, and what was asked of it where the engine takes arguments (0.32): other arguments, other weights."""
    method = str(getattr(model, "quantization", None) or "")
    arguments = getattr(model, "quantization_config", None)
    if not arguments:
        return method
    if is_dataclass(arguments) and not isinstance(arguments, type):
        arguments = asdict(arguments)
    elif callable(dump := getattr(arguments, "model_dump", None)):
        arguments = dump()
    elif not isinstance(arguments, Mapping):
        arguments = {"text": repr(arguments)}
    return f"{method}:{json.dumps(_clean(arguments), sort_keys=True, separators=(',', ':'))}"


def _canonical(overrides: Any) -> str:
    if not overrides:
        return ""
    if isinstance(overrides, Mapping):
        return json.dumps(_clean(overrides), sort_keys=True, separators=(",", ":"))
    raise Unsupported("hf_overrides that are no mapping cannot be told apart: give a mapping")
