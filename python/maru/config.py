"""Settings of a MaruHandler."""

from __future__ import annotations

import dataclasses
import os
import uuid

__all__ = ["MaruConfig"]

_TRUE = frozenset(("1", "true", "yes", "on"))
_FALSE = frozenset(("0", "false", "no", "off"))


def _env_bool(name: str, default: bool) -> bool:
    text = os.environ.get(name)
    if text is None:
        return default
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"{name}={text!r} is no boolean: allowed are 1, true, yes, on, 0, false, no, off")


@dataclasses.dataclass
class MaruConfig:
    """Settings of a MaruHandler. Sizes in bytes.

    ``pool_size`` is the usable size of each region that the handler asks for,
    ``chunk_size_bytes`` the size of its pages: one page holds one value. The
    environment variables MARU_EAGER_MAP and MARU_STAT win over ``eager_map`` and
    ``enable_stats``. ``use_async_rpc``, ``max_inflight`` and ``rm_address`` are
    accepted for callers that set them and change nothing: calls never wait for each
    other, and the server names the resource manager.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """

    server_url: str = "tcp://localhost:5555"
    instance_id: str | None = None
    pool_size: int = 100 * 1024 * 1024
    chunk_size_bytes: int = 1024 * 1024
    auto_connect: bool = True
    timeout_ms: int = 2000
    use_async_rpc: bool = True
    max_inflight: int = 64
    eager_map: bool = True
    auto_expand: bool = True
    expand_size: int | None = None
    rm_address: str = "127.0.0.1:9850"
    enable_stats: bool = False

    def __post_init__(self) -> None:
        if self.instance_id is None:
            self.instance_id = str(uuid.uuid4())
        self.eager_map = _env_bool("MARU_EAGER_MAP", self.eager_map)
        self.enable_stats = _env_bool("MARU_STAT", self.enable_stats)
        for name in ("pool_size", "chunk_size_bytes", "timeout_ms", "max_inflight"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be an integer, not {value!r}")
        if self.chunk_size_bytes <= 0:
            raise ValueError(f"chunk_size_bytes must be positive, got {self.chunk_size_bytes}")
        if self.pool_size < self.chunk_size_bytes:
            raise ValueError(
                f"pool_size ({self.pool_size}) must be >= chunk_size_bytes ({self.chunk_size_bytes}): "
                "one region has to hold at least one value"
            )
        if self.timeout_ms <= 0:
            raise ValueError(f"timeout_ms must be positive, got {self.timeout_ms}")
        if self.expand_size is not None:
            if not self.auto_expand:
                raise ValueError(f"expand_size requires auto_expand=True, got expand_size={self.expand_size}")
            if not isinstance(self.expand_size, int) or self.expand_size < self.chunk_size_bytes:
                raise ValueError(f"expand_size ({self.expand_size}) must be >= chunk_size_bytes ({self.chunk_size_bytes})")
