"""What a MaruHandler gives out, and views of its regions."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any, Protocol

__all__ = [
    "AllocHandle",
    "DaxMapper",
    "MappedRegion",
    "MaruHandle",
    "MemoryInfo",
    "OwnedRegion",
    "OwnedRegionManager",
    "PagedMemoryAllocator",
]


@dataclasses.dataclass(eq=False)
class AllocHandle:
    """A page to write a value into: fill ``buf``, then give the handle to ``store``.

    ``buf`` is writable, of format "B" and as long as was asked for. Callers may
    build one from a location; only the three numbers count then.
    """

    buf: memoryview
    _region_id: int
    _page_index: int
    _size: int

    @property
    def region_id(self) -> int:
        """Region of the page."""
        return self._region_id

    @property
    def page_index(self) -> int:
        """Place of the page in its region."""
        return self._page_index

    @property
    def size(self) -> int:
        """Bytes that were asked for, and that store publishes."""
        return self._size


@dataclasses.dataclass
class MemoryInfo:
    """A stored value, in place. ``view`` is read-only and exactly the value. It is
    protected while this object, ``view`` or anything made of it lives."""

    view: memoryview
    region_id: int = 0
    page_index: int = 0


_HANDLE = struct.Struct("<QQQQ")


@dataclasses.dataclass
class MaruHandle:
    """A region as callers of old saw it. ``length // chunk size`` is its page count.
    ``auth_token`` is a number of this process; the real token stays in the library."""

    region_id: int = 0
    offset: int = 0
    length: int = 0
    auth_token: int = dataclasses.field(default=0, repr=False)

    def pack(self) -> bytes:
        """Returns four little-endian u64."""
        return _HANDLE.pack(self.region_id, self.offset, self.length, self.auth_token)

    @classmethod
    def unpack(cls, data: bytes) -> MaruHandle:
        """Reads what :meth:`pack` wrote.

        Raises:
            ValueError: fewer than 32 bytes.
        """
        if len(data) < _HANDLE.size:
            raise ValueError(f"a packed handle has {_HANDLE.size} bytes, got {len(data)}")
        return cls(*_HANDLE.unpack_from(data))

    def to_dict(self) -> dict[str, Any]:
        """Returns the four fields by name."""
        return {
            "region_id": self.region_id,
            "offset": self.offset,
            "length": self.length,
            "auth_token": self.auth_token,
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> MaruHandle:
        """Reads what :meth:`to_dict` gave."""
        return cls(fields["region_id"], fields["offset"], fields["length"], fields["auth_token"])


class _Views(Protocol):
    def get_buffer_view(self, region_id: int, offset: int, size: int) -> memoryview | None: ...


class _Regions(_Views, Protocol):
    def get_owned_region_ids(self) -> list[int]: ...
    def get_region_page_count(self, region_id: int) -> int | None: ...
    def get_region_free_count(self, region_id: int) -> int: ...
    def get_chunk_size(self) -> int: ...


class PagedMemoryAllocator:
    """Counts of one own region. Pages are given out by the library alone."""

    def __init__(self, regions: _Regions, region_id: int, chunk_size: int) -> None:
        self._regions = regions
        self._region_id = region_id
        self.chunk_size = chunk_size

    @property
    def page_count(self) -> int:
        """Pages of the region."""
        return self._regions.get_region_page_count(self._region_id) or 0

    @property
    def num_free_pages(self) -> int:
        """Pages that can be allocated now."""
        return self._regions.get_region_free_count(self._region_id)

    @property
    def num_allocated(self) -> int:
        """Pages that hold a value, are written, or wait for their last reader."""
        return self.page_count - self.num_free_pages

    @property
    def pool_size(self) -> int:
        """Usable bytes of the region."""
        return self.page_count * self.chunk_size

    def get_stats(self) -> dict[str, Any]:
        """Sizes and counts of the region."""
        count, free = self.page_count, self.num_free_pages
        return {
            "region_id": self._region_id,
            "pool_size": count * self.chunk_size,
            "chunk_size": self.chunk_size,
            "page_count": count,
            "free_pages": free,
            "allocated_pages": count - free,
            "utilization": (count - free) / count if count else 0.0,
        }


class OwnedRegionManager:
    """The own regions of a connected handler."""

    def __init__(self, regions: _Regions) -> None:
        self._regions = regions

    def get_region_ids(self) -> list[int]:
        """Own regions, oldest first."""
        return self._regions.get_owned_region_ids()

    def get_first_region_id(self) -> int | None:
        """The region that connect asked for."""
        ids = self.get_region_ids()
        return ids[0] if ids else None

    def is_owned(self, region_id: int) -> bool:
        """Whether this handler allocates the region's pages."""
        return region_id in self.get_region_ids()

    def get_stats(self) -> dict[str, Any]:
        """Sums over all regions, and each region."""
        chunk = self._regions.get_chunk_size()
        regions = [PagedMemoryAllocator(self._regions, r, chunk).get_stats() for r in self.get_region_ids()]
        pages = sum(r["page_count"] for r in regions)
        free = sum(r["free_pages"] for r in regions)
        return {
            "num_regions": len(regions),
            "total_pool_size": sum(r["pool_size"] for r in regions),
            "total_page_count": pages,
            "total_free_pages": free,
            "total_allocated_pages": pages - free,
            "utilization": (pages - free) / pages if pages else 0.0,
            "regions": regions,
        }


class DaxMapper:
    """Views of mapped regions, for callers that ask a mapper instead of the handler."""

    def __init__(self, views: _Views) -> None:
        self._views = views

    def get_buffer_view(self, region_id: int, offset: int, size: int) -> memoryview | None:
        """The same as MaruHandler.get_buffer_view."""
        return self._views.get_buffer_view(region_id, offset, size)


@dataclasses.dataclass
class MappedRegion:
    """A mapped region by id and size, with views through its mapper."""

    region_id: int
    size: int
    mapper: _Views = dataclasses.field(repr=False)

    def get_buffer_view(self, offset: int, size: int) -> memoryview | None:
        """Bytes of this region, or None when out of range."""
        return self.mapper.get_buffer_view(self.region_id, offset, size)


@dataclasses.dataclass
class OwnedRegion:
    """An own region and the counts of its pages."""

    region_id: int
    allocator: PagedMemoryAllocator
