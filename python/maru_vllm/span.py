"""What of vLLM is used, and what the installed release has of it: 0.26 to 0.33 by detection.

The abstract methods are there in every release. Everything else is taken where
it is: a release that lacks it is served by what it had before. test_vllm_span.py
compares the installed release with this table, so that a new one is noticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ABSTRACT",
    "OPTIONAL",
    "Features",
    "current_stream",
    "detect",
    "device_layout",
    "extra_key_check",
    "tensor_rank",
    "unknown_abstract",
]

ABSTRACT = frozenset(
    {
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
    }
)
"""Methods that every release demands; register_kv_caches and get_finished are always overridden too."""

OPTIONAL = frozenset(
    {
        "requires_kv_delivery",
        "on_new_request",
        "update_connector_output",
        "request_finished",
        "reset_cache",
        "register_kv_caches",
        "handle_preemptions",
        "get_finished",
        "get_block_ids_with_load_errors",
        "build_connector_worker_meta",
        "get_kv_connector_stats",
        "build_kv_connector_stats",
        "build_prom_metrics",
        "shutdown",
    }
)
"""Methods that are overridden and called where the release knows them."""

# First elements of the tuples by which the engine keeps blocks apart; all of them are in
# our keys, or their requests bypass.
_KNOWN_EXTRA_KEYS = frozenset({"lora", "mm", "cache_salt", "prompt_embeds"})


@dataclass(frozen=True)
class Features:
    """What the installed release has. missing: optional methods that it does not know."""

    version: str
    missing: tuple[str, ...]
    block_state: bool
    request_failures: bool

    def __str__(self) -> str:
        return (
            f"vLLM {self.version}: block tables {'from the engine' if self.block_state else 'tracked here'}, "
            f"failed requests {'reported' if self.request_failures else 'not known'}"
            + (f", without {', '.join(self.missing)}" if self.missing else "")
        )


def unknown_abstract(base: type) -> set[str]:
    """Abstract methods of the installed connector class that are not known here."""
    return set(getattr(base, "__abstractmethods__", ())) - ABSTRACT


def detect(base: type) -> Features:
    """Reads the installed release."""
    import vllm
    from vllm.v1.core.sched import output
    from vllm.v1.outputs import KVConnectorOutput

    fields = getattr(output.SchedulerOutput, "__dataclass_fields__", {})
    return Features(
        version=str(getattr(vllm, "__version__", "unknown")),
        missing=tuple(sorted(m for m in OPTIONAL if not hasattr(base, m))),
        block_state="kv_connector_block_state" in fields,
        request_failures="failed_recving" in getattr(KVConnectorOutput, "__dataclass_fields__", {}),
    )


def extra_key_check() -> Callable[[Any], bool]:
    """Whether the engine keeps a request's blocks apart by something unknown; always False where it does not say.

    Releases that do not tag their keys (before 0.32) do not: an identifier would be
    taken for a tag.
    """
    try:
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys as generate
    except ImportError:
        return lambda request: False
    if not hasattr(kv_cache_utils, "to_event_extra_keys"):
        return lambda request: False
    if len(inspect.signature(generate).parameters) != 4:
        return lambda request: False

    def unknown(request: Any) -> bool:
        keys, _ = generate(request, 0, max(1, request.num_tokens), 0)
        # Releases that do not tag their keys have text or pairs here, of the kinds that are known.
        tags = [k[0] for k in keys or () if isinstance(k, tuple) and len(k) >= 2 and isinstance(k[0], str)]
        return any(t not in _KNOWN_EXTRA_KEYS for t in tags) if tags and len(tags) == len(keys or ()) else False

    return unknown


def identifiers_are_content(vllm_config: Any) -> bool:
    """Whether the engine's identifier of a multimodal input is a digest of it.

    Without a processor cache and without prefix caching the engine numbers the inputs
    of a process instead: another input has the same number in the next process.
    """
    model = vllm_config.model_config
    config = getattr(model, "multimodal_config", None) or model
    size = getattr(config, "mm_processor_cache_gb", None)
    return bool(size) or bool(getattr(vllm_config.cache_config, "enable_prefix_caching", False))


def tensor_rank(size: int) -> int:
    """This worker's tensor parallel rank of `size`.

    Raises RuntimeError where the engine has no groups yet: ranks that take each other's
    place would share keys of different KV.
    """
    if size == 1:
        return 0
    try:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        return int(get_tensor_model_parallel_rank())
    except (ImportError, AssertionError) as e:
        raise RuntimeError(f"one of {size} tensor parallel ranks does not know which one it is") from e


def current_stream(device: str) -> Callable[[], int]:
    """Raw handle of the stream that the engine's work is on when it is called."""
    import torch

    place = torch.device(device)
    return lambda: int(torch.cuda.current_stream(place).cuda_stream)


def device_layout(vllm_config: Any) -> str:
    """Stands for the inside of a block on a device, for releases that do not say it.

    Until 0.31 the attention backend chooses it, which is known only where the tensors
    are made; but one release with one configuration on one kind of device always
    chooses the same. Engines of several kinds then share nothing, which is safe.
    """
    import os

    import vllm

    attention = getattr(vllm_config, "attention_config", None)
    try:
        from vllm.platforms import current_platform

        device = str(current_platform.get_device_name())
    except (ImportError, NotImplementedError):
        device = ""
    parts = (
        getattr(vllm, "__version__", ""),
        getattr(attention, "backend", None) or os.environ.get("VLLM_ATTENTION_BACKEND", ""),
        os.environ.get("VLLM_KV_CACHE_LAYOUT", ""),
        device,
    )
    return "/".join(str(p) for p in parts)
