"""An error names the variables of its failing line: shapes, types, devices, values; no secrets, no user code run."""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import nbddp
from nbddp.worker import failing_line
from tests.support import Cells, Notebook, run


def raised_by(function: Any, *args: Any) -> BaseException:
    try:
        function(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def found(function: Any, *args: Any) -> dict[str, str]:
    return dict(failing_line.names(raised_by(function, *args)))


def test_tensors_have_shape_type_and_device_numbers_their_value() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor, rate: float) -> None:
        rate * (x @ weight)

    assert found(step, torch.zeros(2, 3), torch.zeros(4, 5, dtype=torch.float64), 0.1) == {
        "rate": "0.1",
        "x": "Tensor (2, 3) float32 cpu",
        "weight": "Tensor (4, 5) float64 cpu",
    }


def test_attributes_are_named_with_their_object_and_modules_and_functions_are_left_out() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3, 3))
            self.scale = np.float32(2)

        def forward(self, x: Any) -> Any:
            return torch.relu(x) @ self.weight * self.scale

    assert found(Net(), np.zeros((2, 2), dtype=np.int8)) == {
        "x": "ndarray (2, 2) int8",
        "self": "Net float32 cpu",
        "self.weight": "Parameter (3, 3) float32 cpu",
        "self.scale": "float32 float32 = 2.0",
    }


def test_a_statement_over_several_lines_is_one() -> None:
    first, second, third = [1, 2], {"a": 1}, "text"

    def fail() -> None:
        print(
            first,
            second,
            third + 1,  # type: ignore[operator]
        )

    names = found(fail)
    assert names["third"] == "'text'"


def test_names_in_an_f_string_count() -> None:
    def check(step: int, total: int, width: int, sep: str) -> None:
        raise ValueError(rf"{{no}} at {step + 1:>{width}} of {total!r}".join(sep), f"no name")  # noqa: F541

    assert found(check, 3, 9, 4, "-") == {"step": "3", "width": "4", "total": "9", "sep": "'-'"}


def test_the_innermost_line_of_the_user_counts_not_a_librarys() -> None:
    def fail(a: Any) -> None:
        torch.nn.functional.linear(a, torch.zeros(3, 4))

    assert found(fail, torch.zeros(2, 5)) == {"a": "Tensor (2, 5) float32 cpu"}


def test_the_innermost_line_of_the_user_counts_not_the_standard_librarys() -> None:
    def read(text: str, rate: float) -> None:
        json.loads(text) * rate

    assert found(read, "{", 0.1) == {"text": "'{'", "rate": "0.1"}


def test_without_names_on_the_line_it_is_the_functions_variables() -> None:
    def fail(x: torch.Tensor, step: int) -> None:
        raise ValueError("bad batch")

    assert found(fail, torch.zeros(2), 7) == {"x": "Tensor (2,) float32 cpu", "step": "7"}


def test_secrets_and_long_values_are_not_shown() -> None:
    def fail(api_token: str, text: str, huge: int, data: bytes, password: str) -> None:
        raise ValueError(len(api_token), len(text), huge > 1, len(data), len(password))

    names = found(fail, "hf_123", "x" * 10**6, 10**5000, b"y" * 99, "letmein")
    assert names["api_token"] == names["password"] == "str (not shown)"
    assert names["text"] == f"'{'x' * 50}'... of 1,000,000"
    assert names["huge"] == "int"
    assert names["data"].endswith("of 99")


class Angry:
    """Raises whatever is asked of it."""

    def __repr__(self) -> str:
        raise AssertionError("repr was called")

    def __len__(self) -> int:
        raise AssertionError("len was called")

    @property
    def x(self) -> int:
        raise AssertionError("a property was read")


@pytest.mark.parametrize(
    "name", ["self.key", "passphrase", "db_pwd", "privateKey", "config.api_key", "HF_TOKEN", "key"]
)
def test_names_of_secrets(name: str) -> None:
    assert failing_line.describe(name, "sk-123") == "str (not shown)"


@pytest.mark.parametrize("name", ["monkey", "text", "keys", "model.name"])
def test_names_of_no_secrets(name: str) -> None:
    assert failing_line.describe(name, "abc") == "'abc'"


def test_a_value_that_cannot_be_described_does_not_hide_the_others() -> None:
    def step(rate: float, ragged: torch.Tensor) -> None:
        raise ValueError(rate, ragged)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its nested tensors once in a process
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert found(step, 0.1, ragged) == {"rate": "0.1", "ragged": "Tensor"}


def test_no_code_of_the_users_classes_is_called() -> None:
    def fail(angry: Angry, many: list[Angry]) -> None:
        raise ValueError(angry.__class__, many, angry.x if many is None else 0)

    assert found(fail, Angry(), [Angry()]) == {"angry": "Angry", "many": "list of 1"}


def test_it_takes_milliseconds_and_at_most_4_kb() -> None:
    lines = "\n".join(f"    name_{number} = 'x' * 40" for number in range(400))
    source = f"def fail():\n{lines}\n    raise ValueError({', '.join(f'name_{number}' for number in range(400))})\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, __file__.replace(".py", "_made.py"), "exec"), namespace)
    import linecache

    linecache.cache[__file__.replace(".py", "_made.py")] = (1, None, source.splitlines(keepends=True), "made")
    error = raised_by(namespace["fail"])
    began = time.perf_counter()
    names = failing_line.names(error)
    took = time.perf_counter() - began
    assert 0 < sum(len(name) + len(text) for name, text in names) <= 4000
    assert took < 0.1  # 2 ms; here with everything else that this machine does


def test_the_error_of_a_rank_has_them_and_a_cell_shows_them(cell: Cells) -> None:
    here = cell(
        """
        import torch

        def train(width):
            weight = torch.zeros(3, width)
            return torch.zeros(2, 4) @ weight
        """
    )
    with pytest.raises(nbddp.RankError) as raised:
        run(here.train, 5)
    assert raised.value.locals == {"weight": "Tensor (3, 5) float32 cpu"}
    assert "weight  Tensor (3, 5) float32 cpu" in "\n".join(raised.value._render_traceback_())


def test_a_ddp_cell_shows_them_below_its_lines(notebook: Notebook) -> None:
    notebook.ok("%load_ext nbddp")
    reply = notebook.cell("%%ddp -n 2 --device cpu\nx = torch.zeros(4, rank + 2)\nx @ torch.zeros(3, 3)")
    assert reply.ename == "RankError"
    assert "on rank 0:\n  x  Tensor (4, 2) float32 cpu" in reply.traceback
