"""pandas objects that were made of each other without copying: each keeps its values when another is written to.

Imported by ranks, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd  # noqa: TID253 - imported where pandas is

# Each is a view to pandas, kept apart by copy-on-write; of frames with the columns of frame().
WAYS: dict[str, Callable[[pd.DataFrame], Any]] = {
    "column": lambda df: df["a"],
    "columns": lambda df: df[["a", "b"]],
    "rename": lambda df: df.rename(columns={"a": "x"}),
    "drop": lambda df: df.drop(columns="b"),
    "assign": lambda df: df.assign(c=1),
    "reset_index": lambda df: df.reset_index(),
    "reset_index dropped": lambda df: df.reset_index(drop=True),
    "set_index": lambda df: df.set_index("b"),
    "shallow copy": lambda df: df.copy(deep=False),
    "copy.copy": lambda df: copy.copy(df),
    "head": lambda df: df.head(3),
    "rows": lambda df: df.iloc[1:],
    "every other row": lambda df: df.iloc[::2],
    "backwards": lambda df: df.iloc[::-1],
    "loc": lambda df: df.loc[:, "a":],
    "one row": lambda df: df.iloc[0],
    "T": lambda df: df[["a", "b"]].T,
    "add_prefix": lambda df: df.add_prefix("x_"),
    "set_axis": lambda df: df.set_axis(list("uvwxyz"), axis=1),
    "rename_axis": lambda df: df.rename_axis("rows"),
    "astype": lambda df: df.astype({"a": "float64"}),
    "infer_objects": lambda df: df.infer_objects(),
    "to_frame": lambda df: df["a"].to_frame(),
    "Int64": lambda df: df["n"][1:],
    "date": lambda df: df["when"].iloc[1:],
    "category": lambda df: df["kind"].iloc[1:],
    "string": lambda df: df["name"].iloc[1:],
    "values as a frame": lambda df: pd.DataFrame(df[["a", "b"]]),
}


_NAMES = [f"n{i}" for i in range(50)]


def frame(rows: int = 5) -> pd.DataFrame:
    """A frame with a column of every usual kind; rows close to each other differ in all of them."""
    numbers = np.arange(rows)
    return pd.DataFrame({
        "a": numbers + 0.5, "b": numbers + 0.25, "n": pd.array(numbers, dtype="Int64"),
        "when": pd.date_range("2024-01-01", periods=rows, freq="h"),
        "kind": pd.Categorical.from_codes(numbers % 50, _NAMES), "name": [_NAMES[i % 50] for i in range(rows)],
    })  # fmt: skip


def every_way(rows: int = 5) -> dict[str, list[Any]]:
    """Of each way a frame, and what was made of it; of large frames some of them."""
    names = [*WAYS] if rows < 100 else ["column", "rename", "assign", "shallow copy", "rows", "Int64", "date"]
    frames = {name: frame(rows) for name in names}
    return {name: [frames[name], WAYS[name](frames[name])] for name in names}


def written(pairs: dict[str, list[Any]]) -> dict[str, Any]:
    """What is to be seen of each pair when the first of it was written to, and then the second."""
    first, second = [(0, 1, column) for column in range(6)], [(1, 0, 0)]
    return {name: (play(pair, first)[1], play(pair, second)[0]) for name, pair in pairs.items()}


def play(objects: Sequence[Any], writes: Sequence[tuple[int, int, int]]) -> list[Any]:
    """Each write puts into (object, row, column) the last value of that column; what all objects hold afterwards."""
    for number, row, column in writes:
        written = objects[number]
        row %= len(written)
        if isinstance(written, pd.DataFrame):
            if written.shape[1]:
                column %= written.shape[1]
                written.iloc[row, column] = written.iloc[-1, column]
        else:
            written.iloc[row] = written.iloc[-1]
    return [str(each.iloc[(slice(8),) * each.ndim].to_numpy(dtype=object).tolist()) for each in objects]
