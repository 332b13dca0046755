"""Adds the notebooks with their outputs, and their pictures, to the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files
from nbconvert import HTMLExporter

FOLDER = Path(__file__).parents[2] / "notebooks"


def on_files(files: Files, config: Any) -> Files:
    readme = (FOLDER / "README.md").read_text().replace(".ipynb)", ".html)")
    pages: dict[str, str | bytes] = {"README.md": readme}
    for path in [*FOLDER.glob("*.png"), *FOLDER.glob("drawings/*.svg")]:
        pages[str(path.relative_to(FOLDER))] = path.read_bytes()
    for path in FOLDER.glob("*.ipynb"):
        page, _ = HTMLExporter(template_name="lab").from_notebook_node(nbformat.read(path, as_version=4))
        page = re.sub(r'href="(\w+)\.ipynb"', r'href="\1.html"', page)
        pages[f"{path.stem}.html"] = re.sub(r'href="\.\./docs/([\w/]+)\.md', r'href="../\1/', page)
    for name, content in sorted(pages.items()):
        files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files
