"""Names that callers of old import from here."""

from __future__ import annotations

import dataclasses
import enum

from maru.memory import MaruHandle

__all__ = [
    "DEFAULT_ALIGN_BYTES",
    "MAP_PRIVATE",
    "MAP_SHARED",
    "PROT_EXEC",
    "PROT_NONE",
    "PROT_READ",
    "PROT_WRITE",
    "DaxType",
    "MaruHandle",
    "MaruPoolInfo",
    "MaruShmClient",
]

PROT_NONE, PROT_READ, PROT_WRITE, PROT_EXEC = 0, 1, 2, 4
MAP_SHARED, MAP_PRIVATE = 1, 2
DEFAULT_ALIGN_BYTES = 2 << 20
"""Regions begin on this border."""


class DaxType(enum.IntEnum):
    """What a pool is made of."""

    DEV_DAX = 0
    FS_DAX = 1


@dataclasses.dataclass
class MaruPoolInfo:
    """A pool's sizes, in bytes."""

    pool_id: int = 0
    dax_type: DaxType = DaxType.DEV_DAX
    total_size: int = 0
    free_size: int = 0
    align_bytes: int = DEFAULT_ALIGN_BYTES


class MaruShmClient:
    """The old client of the resource manager spoke a protocol that is gone."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(
            "maru_shm.MaruShmClient is not there any more: MaruHandler maps what it needs, and 'maru rm' shows pools and regions"
        )
