"""Both sides. Which tensors this process shares on purpose: ``share_memory_()`` says that ranks write to one tensor.

torch's ``is_shared()`` is true for more: for what another process made (a batch of a DataLoader's worker), for what
torch moved to shared memory by itself to send it to another process, and for every ``torch.from_file()``. These are
copied, as pickle does. ``share_memory_()`` afterwards changes nothing that could be seen: ``clone()`` first.
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
# A line of it; the file's name holds the pid of the process that made it.
_SHARED_FILE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*/torch_([0-9]+)_[0-9]+_[0-9]+(?: \(deleted\))?$", re.MULTILINE)

_on_purpose: set[Any] = (
    set()
)  # StorageWeakRef; the ranks get them by torch's way, which looks as if a user had sent them


class SharedHere:
    """The storages that this process shares on purpose. It looks once at what is mapped: make one for each pickling."""

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        if storage.device.type != "cpu" or not storage.nbytes() or not storage.is_shared():
            return False
        reference = reductions.StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if reference not in _on_purpose and reference not in self._passed and self._made_here(storage):
            _on_purpose.add(reference)
        return reference in _on_purpose

    def _made_here(self, storage: torch.UntypedStorage) -> bool:
        if not _MAPS.exists():
            return storage.filename is None  # not from_file()
        starts, stops = self._extents
        index = bisect.bisect_right(starts, storage.data_ptr()) - 1
        return index >= 0 and storage.data_ptr() < stops[index]

    @functools.cached_property
    def _passed(self) -> set[Any]:
        """What torch has sent or received; private, of torch 2.6 to 2.13."""
        _on_purpose.difference_update([each for each in list(_on_purpose) if each.expired()])
        return set(getattr(reductions, "shared_cache", {}).values())

    @functools.cached_property
    def _extents(self) -> tuple[list[int], list[int]]:
        """Where in memory the shared files of this process's making begin, and where they end."""
        mapped = [found.groups() for found in _SHARED_FILE.finditer(_MAPS.read_text())]
        ours = [(int(start, 16), int(stop, 16)) for start, stop, maker in mapped if int(maker) == os.getpid()]
        return [start for start, _ in ours], [stop for _, stop in ours]
