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
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"^::$", "", text, flags=re.MULTILINE)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Write out the ``**options`` of ``run``, as its signature does in a notebook."""
        if "options" not in func.parameters or not hasattr(found := pydoc.locate(func.path), "__signature__"):
            return
        shown = inspect.signature(found).parameters
        func.parameters = griffe.Parameters(
            *(p for p in func.parameters if p.name in shown),
            *(
                griffe.Parameter(
                    name,
                    annotation=parameter.annotation,
                    kind=griffe.ParameterKind.keyword_only,
                    default=repr(parameter.default),
                )
                for name, parameter in shown.items()
                if name not in func.parameters
            ),
        )
