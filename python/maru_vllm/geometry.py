"""Where the bytes of a KV block lie: from tensors to runs.

An object holds whole blocks, block-major: ``[block][layer][run]``, so that a part
of a chunk which starts or ends at a block border is one range of the object. Only
raw whole blocks are copied: the inside of a block is the attention backend's own
(on CPU the layout inside a head is not the logical one).

Units: bytes, unless a name says elements. Nothing here imports torch or vLLM:
tensors come as :class:`TensorShape`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["GeometryError", "LayerRuns", "TensorShape", "block_bytes", "plan_layer", "plan_layers"]


class GeometryError(ValueError):
    """The tensors do not add up to the engine's own page size; caching would be wrong."""


@dataclass(frozen=True)
class TensorShape:
    """A layer's KV tensor. Shape and strides are in elements, address and itemsize in bytes."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def end(self) -> int:
        """Address behind the last element of the view."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.address + (last + 1) * self.itemsize


@dataclass(frozen=True)
class LayerRuns:
    """Block b of a layer is the runs at ``base + b * block_stride + o`` for o in ``offsets``."""

    base: int
    block_stride: int
    offsets: tuple[int, ...]
    run_bytes: int

    @property
    def block_bytes(self) -> int:
        return len(self.offsets) * self.run_bytes


def block_dimension(t: TensorShape, num_blocks: int, *, block_first: bool) -> int:
    """The dimension that counts blocks, or kernel blocks of which a block has k.

    block_first: the engine's layout says that it is the first (vLLM 0.32 and later).
    Otherwise it is the only dimension that fits, or the engine is refused.
    """
    fits = [d for d, n in enumerate(t.shape) if n >= num_blocks and n % num_blocks == 0]
    if block_first and 0 in fits:
        return 0
    exact = [d for d in fits if t.shape[d] == num_blocks]
    for found in (exact, fits):
        if len(found) == 1:
            return found[0]
    raise GeometryError(
        f"layer {t.name}: shape {t.shape} has {'no' if not fits else 'more than one'} dimension that could count "
        f"{num_blocks} blocks"
    )


def plan_layer(t: TensorShape, num_blocks: int, page_bytes: int, *, block_first: bool) -> LayerRuns:
    """Runs of one layer's blocks. page_bytes: what the engine says a block of this layer has.

    Raises GeometryError when the runs do not add up to page_bytes or leave the tensor.
    """
    if len(t.shape) != len(t.strides) or not t.shape or num_blocks <= 0:
        raise GeometryError(f"layer {t.name}: shape {t.shape} with strides {t.strides} and {num_blocks} blocks")
    d = block_dimension(t, num_blocks, block_first=block_first)
    per_block = t.shape[d] // num_blocks
    dims = [(s, n) for i, (n, s) in enumerate(zip(t.shape, t.strides, strict=True)) if i != d and n > 1]
    if per_block > 1:
        dims.append((t.strides[d], per_block))
    dims.sort()
    run_elements = 1
    outer: list[tuple[int, int]] = []
    for stride, count in dims:
        if not outer and stride == run_elements:
            run_elements *= count
        else:
            outer.append((stride, count))
    offsets = [0]
    for stride, count in reversed(outer):
        offsets = [o + i * stride for o in offsets for i in range(count)]
    runs = LayerRuns(
        base=t.address,
        block_stride=per_block * t.strides[d] * t.itemsize,
        offsets=tuple(o * t.itemsize for o in sorted(offsets)),
        run_bytes=run_elements * t.itemsize,
    )
    if runs.block_bytes != page_bytes:
        raise GeometryError(
            f"layer {t.name}: a block has {runs.block_bytes} bytes in {len(runs.offsets)} runs, the engine says {page_bytes}"
        )
    last = runs.base + (num_blocks - 1) * runs.block_stride + runs.offsets[-1] + runs.run_bytes
    if runs.block_stride <= 0 or last > t.end:
        raise GeometryError(f"layer {t.name}: the last block ends at {last:#x}, the tensor at {t.end:#x}")
    return runs


def plan_layers(tensors: Sequence[TensorShape], num_blocks: int, page_bytes: int, *, block_first: bool) -> list[LayerRuns]:
    """Runs of every layer, in the order given. All layers must be cut alike (one object format)."""
    if not tensors:
        raise GeometryError("the engine has registered no KV tensors")
    layers = [plan_layer(t, num_blocks, page_bytes, block_first=block_first) for t in tensors]
    first = layers[0]
    for t, layer in zip(tensors, layers, strict=True):
        if (len(layer.offsets), layer.run_bytes) != (len(first.offsets), first.run_bytes):
            raise GeometryError(
                f"layer {t.name} has {len(layer.offsets)} runs of {layer.run_bytes} bytes, layer {tensors[0].name} "
                f"{len(first.offsets)} of {first.run_bytes}: layers of different forms are not supported"
            )
    return layers


def block_bytes(layers: Sequence[LayerRuns]) -> int:
    """Bytes of one block over all layers."""
    return sum(layer.block_bytes for layer in layers)
