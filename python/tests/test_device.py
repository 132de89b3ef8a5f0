"""Layouts on a GPU, as far as a machine without one can see."""

from __future__ import annotations

import ctypes

import pytest

from maru import _lib
from maru._transfer import ordinal_of


@pytest.mark.parametrize(
    ("device", "ordinal"),
    [(None, None), ("cpu", None), ("cuda", 0), ("cuda:0", 0), ("cuda:7", 7), (3, 3)],
)
def test_devices(device: str | int | None, ordinal: int | None) -> None:
    assert ordinal_of(device) == ordinal


@pytest.mark.parametrize("device", [-1, True, "cuda:", "cuda:x", "cuda:-1", "xpu:0", ""])
def test_other_devices(device: str | int) -> None:
    with pytest.raises(ValueError, match="device"):
        ordinal_of(device)


def test_batch_has_a_stream_at_its_end() -> None:
    assert _lib.Batch.stream.offset == 64
    assert ctypes.sizeof(_lib.Batch) == 72
