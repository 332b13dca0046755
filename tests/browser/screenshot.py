"""Take the pictures of the README and the docs: real runs in JupyterLab.

python tests/browser/screenshot.py
"""

from __future__ import annotations

import time
from pathlib import Path

from lab import PROMPT, Lab, browser, type_at_prompt
from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]

TRAIN = """
import nbddp, torch, torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset, random_split

digits = load_digits()
data = TensorDataset(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target))
train_set, val_set = random_split(data, [1437, 360], torch.Generator().manual_seed(0))

def train(epochs=12):
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(1024, 10)
    model = nbddp.wrap(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    x_val, y_val = val_set[:]
    batches = nbddp.loader(train_set, 8, shuffle=True)
    for epoch in nbddp.progress(range(epochs), desc="epoch"):
        for x, y in nbddp.progress(batches, desc="step"):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            accuracy = (logits.argmax(1) == y).float().mean()
            nbddp.log({"train/loss": loss, "train/acc": accuracy}, reduce="mean")
        with torch.no_grad():
            logits = model.module(x_val)
        nbddp.log({"val/loss": F.cross_entropy(logits, y_val), "val/acc": (logits.argmax(1) == y_val).float().mean()})
        nbddp.print(f"epoch {epoch}: {int((logits.argmax(1) != y_val).sum())} of 360 wrong")
"""


BREAK = """%%ddp -n 4
x = torch.full((), 10.0 * rank)
breakpoint()
dist.all_reduce(x)"""


def take_panel(page: Page, lab: Lab, path: Path) -> None:
    """A run in the middle of its training."""
    lab.write("digits.ipynb", [TRAIN, "run = nbddp.run(train, nprocs=4)"])
    lab.open(page, "digits.ipynb")
    lab.run_to_end(page, 0)
    lab.run(page, 1)
    panel = page.locator(".nbddp")
    panel.wait_for()
    bar = panel.locator(".nbddp-progress")
    while int(bar.get_attribute("aria-valuenow") or 0) < 70:
        time.sleep(0.05)
    page.mouse.move(0, 0)  # the legend shows the last values, as the tiles do
    panel.screenshot(path=path)


def take_debugger(page: Page, lab: Lab, path: Path) -> None:
    """A cell whose ranks have stopped at a breakpoint, after two commands."""
    lab.write("debugger.ipynb", ["%load_ext nbddp\nimport torch, torch.distributed as dist", BREAK])
    lab.open(page, "debugger.ipynb")
    lab.run_to_end(page, 0)
    lab.run(page, 1)
    for command in ("p x", "n"):
        type_at_prompt(page, command)
    page.locator(PROMPT).wait_for()
    page.wait_for_timeout(600)
    page.locator(".jp-Notebook .jp-CodeCell").nth(1).screenshot(path=path)
    type_at_prompt(page, "q")


PICTURES = {
    ROOT / "notebooks" / "nbddp-panel.png": take_panel,
    ROOT / "docs" / "guides" / "debugger.png": take_debugger,
}


def main() -> None:
    with Lab() as lab, browser() as started:
        for path, take in PICTURES.items():
            take(started.new_page(viewport={"width": 1120, "height": 900}), lab, path)
            print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
