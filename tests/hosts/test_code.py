"""Modules beside the notebook go along with its functions; folders of others on a host are not used."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbddp
from tests.hosts.rig import Rig
from tests.support import Cells, Notebook, run

pytestmark = pytest.mark.slow

TRAIN = """
    import nbddp, os, wave, layers.top as top
    from layers import Wide
    def train(wide):
        import by_name
        from layers import deep
        assert isinstance(wide, Wide)
        return wave.SAYS, top.SAYS, deep.SAYS, by_name.SAYS, wide.says(), wave.__file__, os.getcwd(), os.getpid()
"""
FILES = {
    "wave.py": "SAYS = 'the notebook'",  # the standard library has one, too
    "layers/__init__.py": "class Wide:\n    def says(self):\n        from . import deep\n        return deep.SAYS",
    "layers/top.py": "from .deep import SAYS",
    "layers/deep.py": "from . import deeper\nSAYS = deeper.VALUE",
    "layers/deeper.py": "VALUE = 'deep'",
    "by_name.py": "import broken_on_demand\nSAYS = 'named'",
    "broken_on_demand.py": "def fail():\n    raise ValueError('from a module')",
}


@pytest.fixture
def project(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The notebook's folder, which no host has; on gpu2 somebody else has made one of that name."""
    folder = Path(tempfile.mkdtemp())  # below the /tmp of this machine
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    evil = f"mkdir -p {folder} && echo \"SAYS = 'somebody else'\" > {folder}/wave.py && chown -R 54321 {folder}"
    rig.hosts["gpu2"].run("sh", "-c", evil)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    known = {name: sys.modules.pop(name) for name in ("wave",) if name in sys.modules}
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.modules.pop("wave", None)
    sys.modules.update(known)
    monkeypatch.chdir("/")
    shutil.rmtree(folder)
    rig.hosts["gpu2"].run("rm", "-r", str(folder))


def test_modules_beside_the_notebook_go_along_and_nobody_elses_are_imported(
    cell: Cells, warm: nbddp.Cluster, project: Path, rig: Rig
) -> None:
    names = cell(TRAIN)
    found = run(names.train, names.Wide(), hosts=warm)
    for rank, value in enumerate(found.values):
        said = ("the notebook", "deep", "deep", "named", "deep", str(project / "wave.py"))
        assert value[:6] == said
        assert value[6] == rig.hosts["gpu1" if rank < 2 else "gpu2"].home
    assert f"[gpu1: the notebook's folder {project} does not exist. The ranks here start in /home/ada]" in found.logs(0)
    why = f"is not safe: {project} belongs to user 54321"
    assert f"[gpu2: the notebook's folder {project} {why}. The ranks here start in /home/bob]" in found.logs(2)
    (project / "wave.py").write_text("SAYS = 'an edited one'")
    assert {value[0] for value in run(names.train, names.Wide(), hosts=warm).values} == {"an edited one"}


def test_an_error_in_a_module_that_went_along_shows_its_line(cell: Cells, warm: nbddp.Cluster, project: Path) -> None:
    names = cell("def train():\n    import broken_on_demand\n    broken_on_demand.fail()")
    with pytest.raises(nbddp.RankError) as raised:
        run(names.train, hosts=warm)
    assert "raise ValueError('from a module')" in "\n".join(raised.value._render_traceback_())
    assert str(project / "broken_on_demand.py") in "\n".join(raised.value._render_traceback_())


def test_what_is_missing_on_a_host_is_named_with_the_host_and_both_places(
    cell: Cells, warm: nbddp.Cluster, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = cell("def train(): return open('data.csv').read()")
    (project / "data.csv").touch()
    with pytest.raises(nbddp.RankError, match=r"On gpu[12] relative paths begin at /home/(ada|bob), and files are not"):
        run(names.train, hosts=warm)
    names = cell("def train():\n    import only_here")
    monkeypatch.setattr("nbddp.folders.users", lambda path: [])
    (project / "only_here.py").touch()
    with pytest.raises(nbddp.RankError, match=r"Here it is .*/only_here.py, and gpu[12]'s /\S*python\S* has none"):
        run(names.train, hosts=warm)


def test_a_cell_takes_its_modules_along(project: Path, rig: Rig) -> None:
    path = rig.plain_ssh() + os.pathsep + os.environ["PATH"]
    with Notebook({"PATH": path}, cwd=str(project)) as notebook:
        notebook.ok("%load_ext nbddp")
        line = "%%ddp --hosts gpu1,gpu2 -n 1 --device cpu -o found"
        notebook.ok(f"{line}\nfrom layers import top\nfound = top.SAYS, rank", 120)
        assert "('deep', 0)" in notebook.ok("found").shown
