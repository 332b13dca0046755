"""What a type checker sees."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)  # torch, without a cache
def test_a_type_checker_knows_what_a_run_returns_and_which_options_there_are() -> None:
    config = Path(__file__).parents[2] / "pyproject.toml"
    example = Path(__file__).with_name("typing_example.py")
    done = subprocess.run([sys.executable, "-m", "mypy", "--config-file", config, example], capture_output=True)
    assert done.returncode == 0, done.stdout.decode()
