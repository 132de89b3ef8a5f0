"""Names that callers of old import from here."""

from __future__ import annotations

from maru.handler import MaruHandler
from maru.memory import OwnedRegionManager

__all__ = ["MaruHandler", "OwnedRegionManager", "RpcClient"]


class RpcClient:
    """The old client of the metadata server spoke a protocol that is gone."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(
            "maru_handler.RpcClient is not there any more: use maru.MaruHandler, or maru.api.Client for metadata alone"
        )
