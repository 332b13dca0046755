"""Prepares the docstrings for Markdown, and shows the options of a run in the signatures that take them."""

from __future__ import annotations

import inspect
import pydoc
import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|exc):`~?([^`]+)`")


class Docstrings(griffe.Extension):
    """Called by griffe for every object that it has read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Turn ``:func:`nbddp.log` `` into code, and remove the ``::`` before an indented block."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^::$", "", ROLE.sub(r"`\1`", obj.docstring.value), flags=re.MULTILINE)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Write out the options, as the signature does in a notebook: griffe reads the function below a decorator."""
        if "options" in func.parameters:
            shown = inspect.signature(pydoc.locate(func.path)).parameters
            func.parameters = griffe.Parameters(
                *(
                    griffe.Parameter(
                        name,
                        annotation=str(each.annotation) if each.annotation is not each.empty else None,
                        kind=griffe.ParameterKind[each.kind.name.lower()],
                        default=None if each.default is each.empty else repr(each.default),
                    )
                    for name, each in shown.items()
                )
            )
