"""Finds the tensors that the user shares on purpose, with ``share_memory_()``, so that all ranks write to one tensor.

torch's ``is_shared()`` is also true for tensors from another process (a batch of a DataLoader's worker), for tensors
that torch itself moved to shared memory to send them to another process, and for every ``torch.from_file()``. Those
are copied, as pickle does. ``share_memory_()`` on such a tensor leaves no trace that nbddp could see: ``clone()`` the
tensor first.
"""

from __future__ import annotations

import bisect
import functools
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

_MAPS = Path("/proc/self/maps")
# A line of the file; the name of a torch file holds the pid of the process that created it.
_SHARED_FILE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*/torch_([0-9]+)_[0-9]+_[0-9]+(?: \(deleted\))?$", re.MULTILINE)

# References to storages. They are remembered because nbddp sends them to ranks with torch's own pickling, after which
# they look like tensors that torch moved to shared memory.
_on_purpose: set[Any] = set()


class SharedHere:
    """The storages that this process shares on purpose. Create one for each pickling: it reads the mappings once."""

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        if storage.device.type != "cpu" or not storage.nbytes() or not storage.is_shared():
            return False
        reference = reductions.StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if reference not in _on_purpose and reference not in self._sent_by_torch and self._was_made_here(storage):
            _on_purpose.add(reference)
        return reference in _on_purpose

    def _was_made_here(self, storage: torch.UntypedStorage) -> bool:
        if not _MAPS.exists():
            return storage.filename is None  # not from_file()
        starts, stops = self._extents
        index = bisect.bisect_right(starts, storage.data_ptr()) - 1
        return index >= 0 and storage.data_ptr() < stops[index]

    @functools.cached_property
    def _sent_by_torch(self) -> set[Any]:
        """The storages that torch has sent or received; private, of torch 2.6 to 2.15."""
        _on_purpose.difference_update([each for each in list(_on_purpose) if each.expired()])
        return set(getattr(reductions, "shared_cache", {}).values())

    @functools.cached_property
    def _extents(self) -> tuple[list[int], list[int]]:
        """The first and the last addresses of shared files that this process has created."""
        mapped = [found.groups() for found in _SHARED_FILE.finditer(_MAPS.read_text())]
        ours = [(int(start, 16), int(stop, 16)) for start, stop, maker in mapped if int(maker) == os.getpid()]
        return [start for start, _ in ours], [stop for _, stop in ours]
