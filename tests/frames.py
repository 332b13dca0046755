"""Ways in which pandas makes one object of another without copying; each of them keeps its values when that is written to.

Imported by ranks, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

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
    "head": lambda df: df.head(),
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
    "index of a column": lambda df: df.set_index("a").index,
    "array": lambda df: df["a"].array,
    "numpy": lambda df: df["a"].to_numpy(),
    "values": lambda df: df[["a", "b"]].to_numpy(),
}


def frame(rows: int = 5) -> pd.DataFrame:
    """A frame with a column of every usual kind."""
    numbers = np.arange(rows)
    return pd.DataFrame({
        "a": numbers + 0.5, "b": numbers + 0.25, "n": pd.array(numbers, dtype="Int64"),
        "when": pd.date_range("2024-01-01", periods=rows, freq="h"),
        "kind": pd.Categorical(["u", "v"] * (rows // 2) + ["u"] * (rows % 2)),
        "name": ["one", "two"] * (rows // 2) + ["one"] * (rows % 2),
    })  # fmt: skip


def every_way(rows: int = 5) -> dict[str, tuple[pd.DataFrame, Any]]:
    """A frame each, and what was made of it."""
    made = {}
    for name, way in WAYS.items():
        df = frame(rows)
        made[name] = df, way(df)
    return made


def written(pairs: dict[str, tuple[pd.DataFrame, Any]]) -> dict[str, Any]:
    """What is left of the first and last values, after one frame or what was made of it was written to."""
    return {name: (_write_first(*pair), _write_second(*pair)) for name, pair in pairs.items()}


def _write_first(df: pd.DataFrame, made: Any) -> Any:
    df.iloc[1, 0], df.iloc[1, 1], df.iloc[1, 2], df.iloc[1, 5] = 99.0, 98.0, 97, "written"
    df.iloc[1, 3], df.iloc[1, 4] = pd.Timestamp("1999-09-09"), "u"
    return _ends(made)


def _write_second(df: pd.DataFrame, made: Any) -> Any:
    try:
        (made.iloc if hasattr(made, "iloc") else made)[0] = made.iloc[-1] if hasattr(made, "iloc") else made[-1]
    except (ValueError, TypeError) as error:  # an Index, or read-only
        return type(error).__name__
    return _ends(df)


def _ends(thing: Any) -> str:
    return repr(thing.head(3) if hasattr(thing, "head") else thing[:3])
