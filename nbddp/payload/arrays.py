"""Finds the memory of arrays with gaps or steps backwards, and copies arrays whose gaps would take much memory."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from nbddp.payload.layout import Area, Extent, Piece, mappings_for, merged

_SMALL_NBYTES = 1 << 20  # gaps up to this size are not worth a copy


def compact(arrays: Sequence[npt.NDArray[Any]], others: Sequence[Area]) -> list[npt.NDArray[Any]]:
    """The arrays, with copies in place of those that would take along much memory that no array sees.

    An array that overlaps itself is copied, too, because a write to one of its elements must not change another. So is
    an array that overlaps others if it is small or consists mostly of gaps.

    Args:
        others: other memory that goes into the block.
    """
    arrays = [_copied(array) if _overlaps_itself(array) else array for array in arrays]
    extents = [extent_of(array) for array in arrays]
    mappings = mappings_for(
        [*(area.extent for area in others), *extents],
        [*(area.nbytes for area in others), *(array.nbytes for array in arrays)],
    )[len(others) :]
    wide = _are_in_wide_regions(extents, [array.nbytes for array in arrays], others)
    return [
        _copied(array) if is_wide or mapping is None or (mapping and stop - start > 2 * array.nbytes) else array
        for array, mapping, is_wide, (start, stop) in zip(arrays, mappings, wide, extents)
    ]


def _copied(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    copy = array.copy("K")
    copy.flags.writeable = array.flags.writeable
    return copy


def _overlaps_itself(array: npt.NDArray[Any]) -> bool:
    """May a write to one element change another? Not if each step is larger than the reach of all smaller steps."""
    reach = array.itemsize
    for step, size in sorted((abs(step), size) for step, size in zip(array.strides, array.shape) if size > 1):
        if step < reach:
            return array.flags.writeable
        reach += step * (size - 1)
    return False


def _are_in_wide_regions(extents: Sequence[Extent], nbytes: Sequence[int], others: Sequence[Area]) -> list[bool]:
    """For each extent: is it in a region that is large and consists mostly of gaps?"""
    seen_extents = [piece.extent for area in others for piece in area.pieces]
    regions = merged([*seen_extents, *extents])
    firsts = [start for start, _ in regions]
    region_of = [bisect.bisect_right(firsts, start) - 1 for start, _ in extents]
    seen = [0] * len(regions)
    for start, stop in seen_extents:
        if start < stop:
            seen[bisect.bisect_right(firsts, start) - 1] += stop - start
    for (start, stop), size, region in zip(extents, nbytes, region_of):
        seen[region] += min(size, stop - start)
    wide = [stop - start > max(2 * nbytes, _SMALL_NBYTES) for (start, stop), nbytes in zip(regions, seen)]
    return [wide[region] for region in region_of]


def extent_of(array: npt.NDArray[Any]) -> Extent:
    """The addresses of an array's lowest byte and after its highest byte."""
    reaches = [(size - 1) * step for size, step in zip(array.shape, array.strides)]
    first = array.ctypes.data
    return first + sum(r for r in reaches if r < 0), first + sum(r for r in reaches if r > 0) + array.itemsize


def memory_of(array: npt.NDArray[Any]) -> Piece:
    """All bytes from an array's lowest to its highest, including gaps."""
    start, stop = extent_of(array)
    forwards: Any = tuple(slice(None, None, -1 if step < 0 else 1) for step in array.strides)
    # The ellipsis keeps an array without dimensions an array: indexed otherwise it would be a number, which is a copy.
    first: Any = (*(slice(1),) * array.ndim, ...)
    lowest = array.view(np.ndarray)[(*forwards, ...)][first].reshape(1).view(np.uint8)
    return Piece(start, memoryview(as_strided(lowest, (stop - start,), (1,))))  # type: ignore[arg-type]
