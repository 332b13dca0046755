"""Adds what lies outside of docs/ to the site: the notebooks with their outputs, and their pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files
from nbconvert import HTMLExporter

ROOT = Path(__file__).parents[2]
PICTURE = "nbddp-panel.png"


def on_files(files: Files, config: Any) -> Files:
    folder = ROOT / "notebooks"
    readme = (folder / "README.md").read_text().replace(".ipynb)", ".html)")
    files.append(File.generated(config, "notebooks/README.md", content=readme))
    for where in ("images", "notebooks"):
        files.append(File.generated(config, f"{where}/{PICTURE}", content=(folder / PICTURE).read_bytes()))
    for path in sorted((folder / "drawings").glob("*.svg")):
        files.append(File.generated(config, f"notebooks/drawings/{path.name}", content=path.read_bytes()))
    exporter = HTMLExporter(template_name="lab")
    for path in sorted(folder.glob("*.ipynb")):
        page, _ = exporter.from_notebook_node(nbformat.read(path, as_version=4))
        files.append(File.generated(config, f"notebooks/{path.stem}.html", content=page))
    return files
