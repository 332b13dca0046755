"""Checks the arguments of ``log()`` and words its errors."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

from nbddp.text import short

FIRST_STEP, LAST_STEP = -(2**63), 2**63 - 1  # a record's step is a signed 64-bit integer


def checked_step(step: Any, call: str = "log") -> int:
    """The step as an int. Raises TypeError or ValueError, in the words of this function."""
    try:
        number = operator.index(step)
    except TypeError:
        advice = "pass the number of batches so far, e.g. step=epoch * len(loader) + i"
        raise TypeError(f"{call}(step={step!r}): a step must be an integer; {advice}") from None
    if not FIRST_STEP <= number <= LAST_STEP:
        raise ValueError(f"{call}(step={step!r}): a step must fit into 64 bits")
    return number


def checked_weight(weight: Any) -> float:
    """The weight as a float. Raises TypeError or ValueError."""
    try:
        if isinstance(weight, (str, bytes)):  # float() would take "3"
            raise TypeError
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"log(weight={weight!r}): a weight must be a number, e.g. the number of samples") from None
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise ValueError(f"log(weight={weight!r}): a weight must be finite and at least 0, e.g. the number of samples")
    return number


def check_value(name: str, value: Any) -> None:
    """Raise what ``log()`` would raise for this value in a run."""
    try:
        if isinstance(value, (str, bytes)) or (hasattr(value, "numel") and value.numel() != 1):
            raise TypeError
        if not hasattr(value, "numel"):
            float(value)
    except (TypeError, ValueError) as error:
        raise refusal(name, value) or error from None


def refusal(name: str, value: Any) -> Exception | None:
    """The error for a value that is not a number; None for a tensor with one element."""
    kind = type(value).__name__
    if isinstance(value, (str, bytes)):
        return TypeError(f"log({name}=...) takes a number, not the text {short(value)}")
    if hasattr(value, "numel") and value.numel() == 1:
        return None
    if getattr(value, "ndim", 0) > 0:  # a tensor, an array
        shape = tuple(value.shape)
        return ValueError(f"log({name}=...) takes one number, not a {kind} of shape {shape}; use its mean()")
    if isinstance(value, Mapping):
        return TypeError(f"log({name}=...) takes a number, not a {kind}; log({{...}}) takes a dict of metrics")
    return TypeError(f"log({name}=...) takes a number or a tensor with one element, not {kind}")
