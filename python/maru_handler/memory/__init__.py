"""Names that callers of old import from here."""

from maru.memory import (
    AllocHandle,
    DaxMapper,
    MappedRegion,
    MemoryInfo,
    OwnedRegion,
    OwnedRegionManager,
    PagedMemoryAllocator,
)

__all__ = [
    "AllocHandle",
    "DaxMapper",
    "MappedRegion",
    "MemoryInfo",
    "OwnedRegion",
    "OwnedRegionManager",
    "PagedMemoryAllocator",
]
