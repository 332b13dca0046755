"""Take the README's picture of the panel: a real run on real data, in JupyterLab.

python tests/browser/screenshot.py [PATH]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from lab import Lab, browser

DEFAULT = Path(__file__).parents[2] / "notebooks" / "nbddp-panel.png"

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


def main(path: Path) -> None:
    with Lab() as lab, browser() as started:
        lab.write("digits.ipynb", [TRAIN, "run = nbddp.run(train, nprocs=4)"])
        page = started.new_page(viewport={"width": 1120, "height": 900})
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
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
