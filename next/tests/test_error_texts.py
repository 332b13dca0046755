"""Error texts: what happened and what to do come first, with the user's own lines, at a bounded length."""

from __future__ import annotations

import re
from typing import Any

import pytest

import nbddp
from tests.support import Cells, Notebook, run


def _error(fn: Any, *args: Any, **options: Any) -> nbddp.RankError:
    with pytest.raises(nbddp.RankError) as caught:
        run(fn, *args, **options)
    return caught.value


@pytest.mark.parametrize(("ranks", "who"), [(2, "both ranks"), (3, "all 3 ranks")])
def test_an_error_of_all_ranks_says_that_all_failed(cell: Cells, ranks: int, who: str) -> None:
    names = cell("""
        import nbddp
        def train():
            nbddp.barrier()
            raise ValueError(f"bad data on rank {nbddp.rank()}")
    """)
    error = _error(names.train, nprocs=ranks)
    assert error.alike
    assert str(error) == f"{who} failed, rank {error.rank} first: ValueError: bad data on rank {error.rank}"


FOLDED = """
    import nbddp, torch
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 4
        def __getitem__(self, i): return {}["image"]  # the culprit
    def train():
        for _ in torch.utils.data.DataLoader(Data(), 2): pass
    def forward():
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(2, 3))(torch.ones(1, 2))
    def during():
        try:
            forward()
        except RuntimeError as error:
            raise ValueError("outer") from error
"""


def test_a_cells_traceback_folds_library_frames(notebook: Notebook) -> None:
    notebook.ok(FOLDED)
    shown = notebook.cell("nbddp.run(train, nprocs=1, device='cpu', show=False)").traceback
    lines = re.sub(r"\d+", "N", shown).splitlines()
    fold = lines.index("    [N frames in torch]")
    assert "in train()" in lines[fold - 4]
    assert "in Data.__getitem__()" in lines[fold + 2]
    assert "site-packages" not in shown
    assert "# the culprit" in shown
    shown = notebook.cell("nbddp.run(during, nprocs=1, device='cpu', show=False)").traceback
    assert shown.count("frames in torch]") == 1
    assert shown.count("site-packages") == 1  # the line of torch's that raised
    assert "skipping hidden" not in shown
    assert shown.index("frames in torch]") < shown.index("direct cause") < shown.index("ValueError: outer")
