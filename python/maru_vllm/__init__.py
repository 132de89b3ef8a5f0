"""vLLM connector of Maru: ``kv_connector="MaruKVConnector"``, ``kv_connector_module_path="maru_vllm"``.

vLLM imports this module in the API server, the engine core and every worker, for
class methods only in some of them. Importing it therefore has no effects: neither
the Maru library nor vLLM is loaded before :class:`MaruKVConnector` is asked for
(rule R21 of docs/guide/vllm.md).
"""

from __future__ import annotations

from typing import Any

__all__ = ["MaruKVConnector"]


def __getattr__(name: str) -> Any:
    if name == "MaruKVConnector":
        from maru_vllm.connector import MaruKVConnector

        return MaruKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
