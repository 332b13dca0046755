"""An error names the variables of its failing line: shapes, types, devices, values."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from nbddp.worker import failing_line
from tests.support import Cells, error_of


def test_the_error_of_a_rank_has_them_and_a_cell_shows_them_also_of_a_line_that_calls_a_helper(cell: Cells) -> None:
    names = cell("""
        import nbddp, torch
        def train(width):
            weight = torch.zeros(3, width)
            return torch.zeros(2, 4) @ weight
        def reduce(mine):
            nbddp.all_reduce(mine, "median")
    """)
    error = error_of(names.train, 5)
    assert error.locals == {"weight": "Tensor (3, 5) float32 cpu"}
    assert "weight  Tensor (3, 5) float32 cpu" in "\n".join(error._render_traceback_())
    assert error_of(names.reduce, 3).locals == {"mine": "3"}


def found(function: Any, *args: Any) -> dict[str, str]:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whichever
        function(*args)
    return dict(failing_line.names(raised.value))


def test_secrets_and_long_values_are_not_shown() -> None:
    def fail(api_token: str, text: str, huge: int, data: bytes, key: str, user: str) -> None:
        raise ValueError(len(api_token), len(text), huge > 1, len(data), key + user, f"{user}:{key}")

    names = found(fail, "hf_123", "x" * 10**6, 10**5000, b"y" * 99, "sk-123", "me")
    assert names["api_token"] == names["key"] == names["key + user"] == "str (not shown)"
    assert (names["text"], names["huge"]) == (f"'{'x' * 60}'... (length 1,000,000)", "int")
    assert names["data"] == f"b'{'y' * 60}'... (length 99)"
    assert not [text for text in names.values() if "hf_123" in text or "sk-123" in text]
    secret = ["self.key", "passphrase", "db_pwd", "privateKey", "config.api_key", "HF_TOKEN", "key[:3]", "password"]
    secret += ["db_passwd", "client_secret", "credentials", "auth_header"]
    assert {failing_line.describe(name, "sk-123") for name in secret} == {"str (not shown)"}
    assert failing_line.describe("api_token", b"sk-123") == "bytes (not shown)"
    assert {failing_line.describe(name, "abc") for name in ("monkey", "text", "keys", "model.name")} == {"'abc'"}


def test_a_line_without_names_shows_the_functions_variables() -> None:
    def step(rate: float, many: list[int]) -> None:
        raise ValueError("boom")

    assert found(step, 0.1, [1]) == {"rate": "0.1", "many": "list of 1"}


def test_a_modules_parameter_is_a_variable_of_the_line() -> None:
    named = found(lambda net, x: x @ net.weight, torch.nn.Linear(5, 3), torch.zeros(2, 4))
    assert named["net.weight"] == "Parameter (3, 5) float32 cpu"


class Angry:
    """Raises whatever is asked of it."""

    def __repr__(self) -> str:
        raise AssertionError("repr was called")

    def __len__(self) -> int:
        raise AssertionError("len was called")

    @property
    def x(self) -> int:
        raise AssertionError("a property was read")


def test_each_value_is_described_without_its_class_and_one_that_cannot_be_hides_no_other() -> None:
    def step(rate: float, scale: Any, ragged: torch.Tensor, angry: Angry, many: list[Angry]) -> None:
        raise ValueError(rate, scale, ragged, angry.__class__, many, angry.x if many is None else 0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its nested tensors once in a process
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    names = found(step, 0.1, np.float32(2), ragged, Angry(), [Angry()])
    assert names.pop("many is None") == "False"
    assert names == {
        "rate": "0.1", "scale": "float32 = 2.0", "ragged": "Tensor", "angry": "Angry", "many": "list of 1"
    }  # fmt: skip
