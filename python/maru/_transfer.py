"""Sources and destinations of transfers, and the batches that the library reads."""

from __future__ import annotations

import ctypes
import dataclasses
from array import array
from collections.abc import Iterable, Sequence
from ctypes import c_void_p
from typing import Any, Union

from . import _lib
from ._lib import Buffer
from .keys import DIGEST_BYTES, KEY_BYTES

__all__ = ["Blocks", "Device", "Layer", "Memory", "Runs", "batch_of", "codes_of", "count_of", "ordinal_of"]


@dataclasses.dataclass(frozen=True)
class Layer:
    """One tensor of an engine's KV cache: run i of block b begins at
    ``base + b * block_stride_bytes + run_offsets[i]`` and is ``run_bytes`` long."""

    base: int
    block_stride_bytes: int
    run_bytes: int
    run_offsets: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Source or destination of a batch: blocks of a registered layout.

    ``blocks`` are block ids (u32), ``ends[i]`` (u64) is where item i's ids end. An
    item's bytes are block-major: [block][layer][run].
    """

    layout: int
    blocks: array[int]
    ends: array[int]

    @classmethod
    def of(cls, layout: int, items: Iterable[Sequence[int]]) -> Blocks:
        """Packs the block ids of each item."""
        blocks, ends = array("I"), array("Q")
        for ids in items:
            blocks.extend(ids)
            ends.append(len(blocks))
        return cls(layout, blocks, ends)


class Runs:
    """Source or destination of a batch: ranges of memory.

    The object holds what it was made of; keep it until the transfer is done (the
    client does so for submitted ones).
    """

    __slots__ = ("_holds", "ends", "runs")

    def __init__(self, runs: Buffer, ends: array[int], holds: object = None) -> None:
        """``runs`` are pairs of address and length (u64 each), ``ends[i]`` is where
        item i's runs end; ``holds`` is whatever owns the memory."""
        self.runs = runs
        self.ends = ends
        self._holds = (runs, holds)

    @classmethod
    def of(cls, buffers: Iterable[Any], writable: bool = False) -> Runs:
        """One contiguous buffer an item (bytes, bytearray, memoryview, numpy).
        Loads need ``writable``."""
        pins = [_lib.Pinned(b, writable) for b in buffers]
        runs, ends = array("Q"), array("Q", range(1, len(pins) + 1))
        for p in pins:
            runs.append(p.address)
            runs.append(p.bytes)
        return cls(runs, ends, pins)


Memory = Union[Blocks, Runs]
Device = Union[str, int, None]


def ordinal_of(device: Device) -> int | None:
    """The number of a GPU: of "cuda", "cuda:N", N or an object that prints as one of
    them (torch.device); None for memory of the host.

    Raises:
        ValueError: anything else.
    """
    if device is None:
        return None
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    kind, colon, number = str(device).partition(":")
    if kind == "cpu":
        return None
    if kind == "cuda" and (number.isdecimal() or not colon):
        return int(number or 0)
    raise ValueError(f"device {device!r}: allowed are None, 'cpu', 'cuda', 'cuda:N' and N")


def codes_of(n: int) -> array[int]:
    return array("i", bytes(4 * n))


def _size(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer) * getattr(buffer, "itemsize", 1)


def count_of(buffer: Buffer, row: int, name: str) -> int:
    size = _size(buffer)
    if size % row:
        raise ValueError(f"{name} have {size} bytes, no multiple of {row}")
    return size // row


def batch_of(
    keys: Buffer, memory: Memory, parents: Buffer | None, offsets: array[int] | None, stream: int = 0
) -> tuple[int, Any, tuple[object, ...]]:
    """Returns the count of items, the batch, and what must live until the call has
    returned."""
    n = count_of(keys, KEY_BYTES, "keys")
    if len(memory.ends) != n:
        raise ValueError(f"{n} keys, but the ends of {len(memory.ends)} items")
    if parents is not None and _size(parents) != n * DIGEST_BYTES:
        raise ValueError(f"parents have {_size(parents)} bytes, {n} keys need {n * DIGEST_BYTES}")
    if offsets is not None and (offsets.typecode != "Q" or len(offsets) != n):
        raise ValueError(f"offsets must be array('Q') with one item a key, {n} keys")
    if memory.ends.typecode != "Q":
        raise ValueError(f"ends must be array('Q'), not array({memory.ends.typecode!r})")
    batch = _lib.Batch(struct_bytes=ctypes.sizeof(_lib.Batch), count=n, stream=stream)
    key_bytes = keys if isinstance(keys, bytes) else bytes(keys)
    parent_bytes = None if parents is None else bytes(parents)
    # A void pointer field does not take bytes: their address comes from c_char_p.
    batch.keys = ctypes.cast(ctypes.c_char_p(key_bytes), c_void_p).value
    if parent_bytes is not None:
        batch.parents = ctypes.cast(ctypes.c_char_p(parent_bytes), c_void_p).value
    batch.ends = memory.ends.buffer_info()[0]
    if offsets is not None:
        batch.offsets = offsets.buffer_info()[0]
    last = memory.ends[-1] if n else 0
    if isinstance(memory, Blocks):
        if memory.blocks.typecode != "I" or last > len(memory.blocks):
            raise ValueError(f"blocks must be array('I') with at least {last} ids, has {len(memory.blocks)}")
        batch.layout = memory.layout
        batch.blocks = memory.blocks.buffer_info()[0]
    else:
        have = count_of(memory.runs, 16, "runs")
        if last > have:
            raise ValueError(f"ends name {last} runs, there are {have}")
        batch.runs = ctypes.cast(_lib.address(memory.runs), c_void_p).value
    return n, ctypes.byref(batch), (batch, key_bytes, parent_bytes, memory, offsets)
