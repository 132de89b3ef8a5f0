"""Maru: a KV cache store for LLM inference.

``MaruHandler`` keeps values under keys of the caller's choice in shared memory,
zero copy. ``maru.api`` is the typed client that engine adapters are built on.
Importing this package loads no library and starts no thread.
"""

from __future__ import annotations

from .config import MaruConfig
from .errors import MaruError
from .handler import MaruHandler
from .memory import AllocHandle, MaruHandle, MemoryInfo

__version__ = "0.1.0"

__all__ = ["AllocHandle", "MaruConfig", "MaruError", "MaruHandle", "MaruHandler", "MemoryInfo", "__version__"]
