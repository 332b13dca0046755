"""Reads what a W&B run in offline mode has stored: protobuf records in LevelDB's log format.

In a process of its own, ``python -m tests.wandb_file FILE``: W&B's package changes the one that imports it.
"""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_NBYTES = 32768
_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_FIRST = 7  # W&B's own header
_WHOLE, _LAST = 1, 4


def stored_rows(path: Path) -> list[dict[str, Any]]:
    """Each row of the run's history, with ``_step`` and ``_timestamp``."""
    command = [sys.executable, "-m", "tests.wandb_file", str(path.absolute())]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    data, at, part = path.read_bytes(), _FIRST, b""
    while at < len(data):
        if (left := _BLOCK_NBYTES - at % _BLOCK_NBYTES) < _HEADER.size:
            at += left
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        part += data[at + _HEADER.size : at + _HEADER.size + length]
        at += _HEADER.size + length
        if kind in (_WHOLE, _LAST):
            record = wandb_internal_pb2.Record.FromString(part)
            part = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


if __name__ == "__main__":
    print(json.dumps(list(_rows(Path(sys.argv[1])))))
