"""What of a request is content of its KV: which requests bypass, salt, extra keys of chunks.

KV that depends on anything but the tokens before it may be shared only if that
thing is part of the key (section 4.2 of the guide). What is not understood bypasses
the cache, read and write, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maru.keys import Extra, encode_extras

__all__ = ["BYPASS_REASONS", "ContentRules", "bypass_reason", "chunk_extras", "salt_of"]

BYPASS_REASONS = ("prompt_embeds", "lora", "multimodal", "streaming", "pooling", "unknown_content", "salt", "reset")
"""Why a request neither reads nor writes; labels of a metric."""

_MAX_SALT_BYTES = 4096


@dataclass(frozen=True)
class ContentRules:
    """lora_digests: digests of adapters by name, given by the operator; an adapter
    without one bypasses. multimodal: whether the engine's identifiers of inputs are
    trusted as content. unknown: says whether the engine keeps its own blocks apart by
    something that is not known here."""

    lora_digests: Mapping[str, str] = field(default_factory=dict)
    multimodal: bool = True
    unknown: Callable[[Any], bool] = lambda request: False


def _lora_digest(request: Any, rules: ContentRules) -> str | None:
    return rules.lora_digests.get(str(getattr(request.lora_request, "lora_name", "")))


def bypass_reason(request: Any, rules: ContentRules | None = None) -> str | None:
    """Why a request neither reads nor writes the cache, or None."""
    rules = rules or ContentRules()
    if getattr(request, "prompt_embeds", None) is not None:
        return "prompt_embeds"
    if getattr(request, "lora_request", None) is not None and not _lora_digest(request, rules):
        return "lora"
    features = getattr(request, "mm_features", None)
    if features and not (rules.multimodal and all(_identified(f) for f in features)):
        return "multimodal"
    if getattr(request, "resumable", False) or getattr(request, "streaming_queue", None) is not None:
        return "streaming"
    if getattr(request, "pooling_params", None) is not None:
        return "pooling"
    if len(salt_of(request)) > _MAX_SALT_BYTES:
        return "salt"
    return "unknown_content" if rules.unknown(request) else None


def _identified(feature: Any) -> bool:
    position = getattr(feature, "mm_position", None)
    return bool(getattr(feature, "identifier", None)) and position is not None


def salt_of(request: Any) -> bytes:
    """The request's salt; it goes into the root of its chain."""
    return (getattr(request, "cache_salt", None) or "").encode()


def chunk_extras(request: Any, rules: ContentRules, chunk_tokens: int, first: int, stop: int) -> list[bytes] | None:
    """Encoded extra keys of chunks first to stop; None when none has any."""
    features: Sequence[Any] = getattr(request, "mm_features", None) or ()
    adapter = _lora_digest(request, rules) if getattr(request, "lora_request", None) is not None else None
    if not features and adapter is None:
        return None
    out = []
    for chunk in range(first, stop):
        low, high = chunk * chunk_tokens, (chunk + 1) * chunk_tokens
        extras = []
        if adapter is not None and chunk == 0:  # the chain carries it to the rest
            extras.append(Extra("lora", adapter.encode()))
        for f in features:
            offset, length = int(f.mm_position.offset), int(f.mm_position.length)
            if offset < high and offset + length > low:
                extras.append(Extra("mm", str(f.identifier).encode(), offset - low))
        out.append(encode_extras(extras))
    return out
