"""What ranks import although no object names it; and the notebook's own modules, for nodes without its folders."""

import ast
import functools
import sys
from collections.abc import Iterable
from importlib import util
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from nbddp.errors import LaunchError
from nbddp.text import words

# Often imported for a later cell, and slow.
_WITHOUT_EFFECTS = sys.stdlib_module_names | {
    *("nbddp", "IPython", "ipywidgets", "torch", "numpy", "pandas", "polars", "matplotlib", "seaborn", "plotly", "PIL"),
    *("cv2", "scipy", "sklearn", "tqdm", "wandb", "tensorboard", "mlflow", "torchvision", "torchaudio", "torchmetrics"),
    *("transformers", "datasets", "accelerate", "lightning", "pytorch_lightning", "timm", "einops", "ray", "optuna"),
    *("tensorflow", "keras", "jax", "flax", "gradio", "mpi4py", "xgboost", "lightgbm", "catboost", "spacy", "nltk"),
    *("skimage", "albumentations", "evaluate", "peft", "sentence_transformers", "requests", "h5py", "google"),
}
Modules = dict[str, tuple[str, bytes]]
_MOST_BYTES = 8 << 20


def sources(folders: Iterable[str]) -> Modules:
    """Return file and source by name: the modules and packages in these folders, and what was imported from there."""
    found: dict[str, str] = {}
    for folder in map(Path, folders):
        packages = [init.parent for init in folder.glob("*/__init__.py")]
        for file in [*folder.glob("*.py"), *(file for package in packages for file in package.rglob("*.py"))]:
            parts = file.relative_to(folder).with_suffix("").parts
            found.setdefault(".".join(parts[:-1] if parts[-1] == "__init__" else parts), str(file))
        for name, module in list(sys.modules.items()):  # also of packages without an __init__.py
            path = getattr(module, "__file__", None) or ""
            if path.endswith(".py") and name != "__main__" and Path(path).is_relative_to(folder):
                found.setdefault(name, path)
    modules = {name: (path, Path(path).read_bytes()) for name, path in found.items() if name}
    if sum(len(source) for _, source in modules.values()) > _MOST_BYTES:
        raise LaunchError("the modules next to the notebook are too large to send: install them on the nodes")
    return modules


def for_their_effects(cells: Iterable[str]) -> tuple[str, ...]:
    """Return what cells have imported and never named, such as plugins, and all of ``from fastai.vision.all import *``.

    Args:
        cells: as IPython transforms them.
    """
    found, read = dict[str, str](), set[str]()
    for imported, names in map(_imports, cells):
        found.update(imported)
        read |= names
    return tuple(
        module
        for module, name in found.items()
        if module in sys.modules
        and name not in read
        and (name == "*" or ".experimental." in module or module.partition(".")[0] not in _WITHOUT_EFFECTS)
    )


@functools.lru_cache(maxsize=10_000)
def _imports(cell: str) -> tuple[dict[str, str], set[str]]:
    """Return the modules that a cell imports, each with its name here, "*" for all of them, and what it reads."""
    try:
        nodes = list(ast.walk(tree := ast.parse(cell)))
    except (SyntaxError, ValueError):  # it hasn't run
        return {}, set()
    found, read = dict[str, str](), {node.id for node in nodes if isinstance(node, ast.Name)}
    if "get_ipython" in read:  # the cell of a magic is a text
        read |= {word for node in nodes if isinstance(node, ast.Constant) for word in words(str(node.value))}
    for statement in [each for top in tree.body for each in (top.body if isinstance(top, ast.Try) else [top])]:
        if isinstance(statement, ast.Import):
            found.update({each.name: each.asname or each.name.partition(".")[0] for each in statement.names})
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            for each in statement.names:
                inner = f"{statement.module}.{each.name}"
                found[inner if inner in sys.modules else statement.module] = each.asname or each.name
    return found, read


class Importer(MetaPathFinder, SourceLoader):  # type: ignore[misc]
    """Imports these modules before those of the same name on this machine."""

    def __init__(self, modules: Modules) -> None:
        self._modules, self._sources = modules, dict(modules.values())

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname in self._modules:
            return util.spec_from_file_location(fullname, self.get_filename(fullname), loader=self)
        if any(name.startswith(f"{fullname}.") for name in self._modules):  # a package without an __init__.py
            return util.spec_from_loader(fullname, None, is_package=True)
        return None

    def get_filename(self, fullname: str) -> str:
        return self._modules[fullname][0]

    def get_data(self, path: str) -> bytes:
        return self._sources[path]
