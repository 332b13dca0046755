"""Says which part of an object does not pickle, ``train → helper → log_file``, and sends the other parts."""

import io
import itertools
import pickle
import types
from dataclasses import dataclass
from typing import Any

from nbddp.errors import PayloadError
from nbddp.payload.packing import pack
from nbddp.payload.pickler import Packer


class _Tracer(pickle._Pickler):
    """pickle in Python: when it raises, ``way`` leads to the object."""

    def __init__(self, **options: Any) -> None:
        super().__init__(io.BytesIO(), protocol=5, buffer_callback=lambda _: None)
        packer = Packer(io.BytesIO(), **options)
        self.reducer_override, self.dispatch_table = packer.reducer_override, packer.dispatch_table  # type: ignore[method-assign]
        self.way: list[Any] = []

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        self.way.append(obj)
        super().save(obj, save_persistent_id)  # type: ignore[misc]
        self.way.pop()


def explained(named: dict[str, Any], error: Exception, *, what: str, **options: Any) -> PayloadError:
    """Return the error for objects that do not pickle; ``what`` begins its text."""
    for name, obj in named.items():
        tracer = _Tracer(**options)
        try:
            tracer.dump(obj)
        except Exception as found:  # whatever a user's __reduce__ raises
            path = (name, *_names(tracer.way))
            return PayloadError(f"{what}: {' → '.join(path)}: {found or type(found).__name__}", path)
    return PayloadError(f"{what}: {error or type(error).__name__}")


def _names(way: list[Any]) -> list[str]:
    """Return what the user calls the objects on the way: names of globals and closures, attributes, keys, indices."""
    names, function, key = [], None, None
    attributes = {id(vars(obj)) for obj in way if hasattr(obj, "__dict__")}
    for outer, inner in itertools.pairwise(way):
        function = outer if isinstance(outer, types.FunctionType) else function
        if isinstance(outer, dict):
            before, key = key, next((key for key, value in outer.items() if value is inner), None)  # type: ignore[var-annotated]
            if key not in ("__globals__", "__closure__", "__defaults__", "__kwdefaults__", None):
                is_name = before in ("__globals__", "__kwdefaults__") or not isinstance(key, str)
                names.append(f".{key}" if id(outer) in attributes else key if is_name else f"[{key!r}]")
        elif isinstance(inner, types.CellType) and function is not None:
            names.append(function.__code__.co_freevars[outer.index(inner)])
        elif isinstance(outer, list):
            names.append(f"[{next((i for i, item in enumerate(outer) if item is inner), 0)}]")
    return list(map(str, names))


@dataclass(frozen=True)
class Remains:
    """Replaces an object that cannot be sent to the notebook; its repr is the object's, and the reason."""

    text: str
    why: str

    def __repr__(self) -> str:
        return f"{self.text}  (stayed on its rank: {self.why})"


def parts_of(value: Any, depth: int = 20, **options: Any) -> Any:
    """Return the value; of one that does not pickle, a plain copy in which :class:`Remains` replace parts."""
    try:
        pack(value, **options).block.close()
        return value
    except Exception as error:  # whatever a user's __reduce__ raises
        if isinstance(value, dict) and depth:
            return {parts_of(k, 0, **options): parts_of(item, depth - 1, **options) for k, item in value.items()}
        if isinstance(value, (list, tuple)) and depth:
            parts = [parts_of(item, depth - 1, **options) for item in value]
            return parts if isinstance(value, list) else tuple(parts)
        return Remains(repr(value)[:1000], str(error).split("\n")[0] or type(error).__name__)
