"""Draw the sketches of DDP and of the collectives: ``python notebooks/draw.py``.

A rank's colour shows where a number comes from. Violet is a sum, or what is the same on
all ranks. Each drawing has a light background of its own, for dark pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

FOLDER = Path(__file__).parent / "drawings"
WIDTH = 700
TEXT, SOFT, LINE, LANE = "#111111", "#5f5f5f", "#d9d9d9", "#f6f7f9"
RANKS = ("#2563eb", "#c2410c", "#15803d")
SHARED = "#7c3aed"
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

Block = tuple[str, str]  # what stands in it, and its colour


# ------------------------------------------------------------------------------- shapes


def card(height: int, title: str, parts: Sequence[str]) -> str:
    """The whole file: ``parts`` on a card; ``title`` is what a screen reader reads."""
    body = "\n".join(parts)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" \
viewBox="0 0 {WIDTH} {height}" role="img" font-family="{SANS}">
<title>{escape(title)}</title>
{box(0.5, 0.5, WIDTH - 1, height - 1, "#ffffff", LINE, 8)}
{body}
</svg>
"""


def box(
    x: float, y: float, w: float, h: float, fill: str, edge: str = "none", r: float = 4
) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r:g}" '
        f'fill="{fill}" stroke="{edge}"/>'
    )


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: float = 13,
    fill: str = TEXT,
    anchor: str = "start",
    bold: bool = False,
    mono: bool = False,
) -> str:
    family = f' font-family="{MONO}"' if mono else ""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" '
        f'text-anchor="{anchor}"{family}{weight}>{escape(words)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, color: str, more: str = "") -> str:
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
        f"{more}/>"
    )


def curve(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    """From left to right, level at both ends."""
    half = (x2 - x1) / 2
    path = f"M{x1:g} {y1:g}C{x1 + half:g} {y1:g} {x2 - half:g} {y2:g} {x2:g} {y2:g}"
    return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2"/>'


def head(x: float, y: float, color: str) -> str:
    """The tip of an arrow that points to the right."""
    return f'<path d="M{x:g} {y:g}l-9 -5v10z" fill="{color}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return curve(x1, y1, x2 - 8, y2, color) + head(x2, y2, color)


# -------------------------------------------------------------------------- collectives

LEFT, RIGHT, SIDE, ROW, TOP = 18, 450, 232, 38, 50
FROM, TO = LEFT + SIDE + 4, RIGHT - 4  # where arrows begin and end
MIDDLE = (FROM + TO) / 2


def row(rank: int) -> float:
    """The height of a rank's middle."""
    return TOP + rank * (ROW + 10) + ROW / 2


def process(x: float, rank: int, blocks: Sequence[Block | None]) -> str:
    """A rank and what it holds. None: a place with nothing of use in it."""
    y = row(rank)
    parts = [
        box(x, y - ROW / 2, SIDE, ROW, LANE, LINE, 6),
        text(x + 12, y + 4.5, f"rank {rank}", fill=RANKS[rank], bold=True),
    ]
    for i, block in enumerate(blocks):
        parts.append(held(x + 76 + i * 50, y, block))
    return "".join(parts)


def held(x: float, y: float, block: Block | None) -> str:
    if block is None:
        empty = f'fill="none" stroke="{SOFT}" stroke-dasharray="3 3"'
        return f'<rect x="{x:g}" y="{y - 13:g}" width="42" height="26" rx="4" {empty}/>'
    words, color = block
    label = text(
        x + 21, y + 5, words, size=14, fill="#ffffff", anchor="middle", bold=True
    )
    return box(x, y - 13, 42, 26, color) + label


def plus(y: float) -> str:
    circle = f'<circle cx="{MIDDLE:g}" cy="{y:g}" r="13" fill="{SHARED}"/>'
    cross = f"M{MIDDLE - 6:g} {y:g}h12M{MIDDLE:g} {y - 6:g}v12"
    return f'{circle}<path d="{cross}" stroke="#ffffff" stroke-width="2.5"/>'


def into_plus(rank: int, y: float) -> str:
    return curve(FROM, row(rank), MIDDLE - 12, y, RANKS[rank])


def out_of_plus(y: float, rank: int) -> str:
    return arrow(MIDDLE + 12, y, TO, row(rank), SHARED)


def direct(source: int, target: int) -> str:
    return arrow(FROM, row(source), TO, row(target), RANKS[source])


def one_of_three(source: int, target: int) -> str:
    """An arrow that meets two others: their tips lie under each other."""
    y = row(target) + 10 * (source - 1)
    return arrow(FROM, row(source), TO, y, RANKS[source])


def collective(
    name: str,
    caption: str,
    before: Sequence[Sequence[Block | None]],
    arrows: Sequence[str],
    after: Sequence[Sequence[Block | None]],
) -> str:
    """The ranks before on the left, after on the right, and what moves between them."""
    parts = [
        text(LEFT, 32, name, size=15, bold=True, mono=True),
        text(RIGHT + SIDE, 32, caption, fill=SOFT, anchor="end"),
        *arrows,
        *(process(LEFT, rank, blocks) for rank, blocks in enumerate(before)),
        *(process(RIGHT, rank, blocks) for rank, blocks in enumerate(after)),
    ]
    return card(int(row(len(before) - 1) + ROW / 2) + 18, f"{name}: {caption}", parts)


def own(*labels: str) -> list[list[Block | None]]:
    """Each rank holds one block, of its own colour."""
    return [[(label, color)] for label, color in zip(labels, RANKS)]


PAIRS = [(source, target) for source in range(3) for target in range(3)]


def send_recv() -> str:
    blue = RANKS[0]
    before, after = [[("42", blue)], [None]], [[("42", blue)], [("42", blue)]]
    caption = "rank 1 gets rank 0's tensor"
    return collective("send, recv", caption, before, [direct(0, 1)], after)


def broadcast() -> str:
    after = [[("1", RANKS[0])]] * 3
    arrows = [direct(0, rank) for rank in range(3)]
    caption = "every rank gets rank 0's tensor"
    return collective("broadcast", caption, own("1", "2", "3"), arrows, after)


def all_reduce() -> str:
    arrows = [into_plus(rank, row(1)) for rank in range(3)]
    arrows += [out_of_plus(row(1), rank) for rank in range(3)] + [plus(row(1))]
    caption = "every rank gets the sum"
    after = [[("6", SHARED)]] * 3
    return collective("all_reduce", caption, own("1", "2", "3"), arrows, after)


def reduce() -> str:
    arrows = [into_plus(rank, row(1)) for rank in range(3)]
    arrows += [out_of_plus(row(1), 0), plus(row(1))]
    caption = "rank 0 gets the sum"
    after = [[("6", SHARED)], [None], [None]]
    return collective("reduce", caption, own("1", "2", "3"), arrows, after)


def all_gather() -> str:
    after = [[("1", RANKS[0]), ("2", RANKS[1]), ("3", RANKS[2])]] * 3
    arrows = [one_of_three(*pair) for pair in PAIRS]
    caption = "every rank gets the tensors of all"
    return collective("all_gather", caption, own("1", "2", "3"), arrows, after)


def gather() -> str:
    after = [[("1", RANKS[0]), ("2", RANKS[1]), ("3", RANKS[2])], [], []]
    arrows = [one_of_three(rank, 0) for rank in range(3)]
    caption = "rank 0 gets the tensors of all"
    return collective("gather", caption, own("1", "2", "3"), arrows, after)


def scatter() -> str:
    blue = RANKS[0]
    before = [[("1", blue), ("2", blue), ("3", blue)], [None], [None]]
    after = [[("1", blue)], [("2", blue)], [("3", blue)]]
    arrows = [direct(0, rank) for rank in range(3)]
    return collective("scatter", "each rank gets one piece", before, arrows, after)


def reduce_scatter() -> str:
    before = [
        [(str(3 * rank + i), RANKS[rank]) for i in (1, 2, 3)] for rank in range(3)
    ]
    after = [[(words, SHARED)] for words in ("12", "15", "18")]
    arrows = [into_plus(source, row(target)) for source, target in PAIRS]
    arrows += [out_of_plus(row(rank), rank) + plus(row(rank)) for rank in range(3)]
    caption = "each rank gets the sum of one piece"
    return collective("reduce_scatter", caption, before, arrows, after)


def all_to_all() -> str:
    pieces = [
        [(f"{letter}{i}", color) for i in range(3)]
        for letter, color in zip("abc", RANKS)
    ]
    arrows = [one_of_three(*pair) for pair in PAIRS]
    caption = "each rank sends one piece to every rank"
    return collective("all_to_all", caption, pieces, arrows, list(zip(*pieces)))


def barrier() -> str:
    """Over time: each rank works, waits, and goes on when the last has come."""
    caption = "no rank goes on before all are there"
    begin, meet, end = LEFT + 64, 412, RIGHT + SIDE
    parts = [
        text(LEFT, 32, "barrier", size=15, bold=True, mono=True),
        text(end, 32, caption, fill=SOFT, anchor="end"),
    ]
    for rank, comes in enumerate((230, meet - 8, 322)):
        y, color = row(rank), RANKS[rank]
        parts += [
            text(LEFT, y + 4.5, f"rank {rank}", fill=color, bold=True),
            box(begin, y - 9, comes - begin, 18, color),
            box(meet + 8, y - 9, end - meet - 8, 18, color),
        ]
        if comes < meet - 8:
            parts.append(waiting(comes + 8, meet - 8, y, color))
    parts.append(line(meet, TOP, meet, row(2) + ROW / 2, SHARED, 'stroke-width="3"'))
    return card(int(row(2) + ROW / 2) + 18, f"barrier: {caption}", parts)


def waiting(x1: float, x2: float, y: float, color: str) -> str:
    dots = 'stroke-width="2" stroke-dasharray="1 6" stroke-linecap="round"'
    words = text((x1 + x2) / 2, y - 8, "waits", size=11, fill=SOFT, anchor="middle")
    return line(x1, y, x2, y, color, dots) + words


# ---------------------------------------------------------------------------------- DDP

LANES = (66, 148, 230)  # the tops of the ranks' lanes
LANE_HEIGHT = 72
GRADIENTS = ((16, -10, 6, -16), (4, -20, 14, -4), (10, -6, -2, -10))
SHUFFLED = (0, 2, 1, 1, 0, 2, 2, 1, 0, 0, 1, 2, 1, 2, 0, 2, 0, 1)  # each sample's rank
DATA, SHARD, REPLICA, GRADIENT, REDUCE, MEAN, SAME = 46, 144, 240, 338, 432, 524, 626
COLUMNS = (
    (DATA, "data", ""),
    (SHARD, "shards", "nbddp.loader"),
    (REPLICA, "replicas", "nbddp.wrap"),
    (GRADIENT, "gradients", "loss.backward()"),
    (REDUCE, "all_reduce", "in DDP"),
    (MEAN, "mean", ""),
    (SAME, "same weights", "optimizer.step()"),
)


def samples(x: float, y: float, owners: Sequence[int]) -> str:
    """Training samples, three in a line, in the colours of their ranks."""
    return "".join(
        box(x + i % 3 * 17, y + i // 3 * 17, 13, 13, RANKS[owner], r=3)
        for i, owner in enumerate(owners)
    )


def network(x: float, y: float) -> str:
    """A small network of three layers around a point."""
    layers = [
        [(x + dx, y + (i - (n - 1) / 2) * 17) for i in range(n)]
        for dx, n in ((-30, 2), (0, 3), (30, 2))
    ]
    edges = [
        line(*a, *b, SHARED, 'stroke-opacity="0.45"')
        for left, right in pairwise(layers)
        for a in left
        for b in right
    ]
    nodes = [
        f'<circle cx="{cx:g}" cy="{cy:g}" r="5.5" fill="{SHARED}"/>'
        for layer in layers
        for cx, cy in layer
    ]
    return "".join(edges + nodes)


def bars(x: float, y: float, heights: Sequence[float], color: str) -> str:
    """Numbers as bars above and below a line."""
    parts = [line(x - 29, y, x + 29, y, LINE)]
    for i, height in enumerate(heights):
        left, top = x - 26 + i * 14, y - max(height, 0)
        parts.append(box(left, top, 10, abs(height), color, r=2))
    return "".join(parts)


def lane(rank: int) -> str:
    """What one process does in a step."""
    y, color = middle(rank), RANKS[rank]
    mean = [sum(numbers) / 3 for numbers in zip(*GRADIENTS)]
    return "".join(
        [
            box(96, LANES[rank], 586, LANE_HEIGHT, LANE, LINE, 6),
            text(104, y - 24, f"rank {rank}", size=11.5, fill=color, bold=True),
            samples(SHARD - 24, y - 10, [rank] * 6),
            arrow(SHARD + 34, y, REPLICA - 40, y, color),
            network(REPLICA, y),
            arrow(REPLICA + 40, y, GRADIENT - 36, y, color),
            bars(GRADIENT, y, GRADIENTS[rank], color),
            curve(GRADIENT + 36, y, REDUCE - 22, y, color),
            arrow(REDUCE + 22, y, MEAN - 36, y, SHARED),
            bars(MEAN, y, mean, SHARED),
            arrow(MEAN + 36, y, SAME - 40, y, SHARED),
            network(SAME, y),
        ]
    )


def middle(rank: int) -> float:
    """The height of what lies in a lane, below its label."""
    return LANES[rank] + LANE_HEIGHT / 2 + 3


def ddp() -> str:
    """Data, shards, replicas, gradients, all_reduce, and the same weights again."""
    title = (
        "DDP: the data are split into shards, one for each rank. Each rank computes "
        "gradients with its replica of the model, all_reduce averages them, and every "
        "rank takes the same step to the same weights."
    )
    parts = [
        *(text(x, 32, name, anchor="middle", bold=True) for x, name, _ in COLUMNS),
        *(
            text(x, 50, code, size=11, fill=SOFT, anchor="middle", mono=True)
            for x, _, code in COLUMNS
            if code
        ),
        *(lane(rank) for rank in range(3)),
        samples(DATA - 23, middle(1) - 49, SHUFFLED),
        *(
            arrow(DATA + 32, middle(1), SHARD - 28, middle(rank), RANKS[rank])
            for rank in range(3)
        ),
        box(
            REDUCE - 22,
            LANES[0] - 8,
            44,
            LANES[2] + LANE_HEIGHT - LANES[0] + 16,
            SHARED,
            r=8,
        ),
        text(REDUCE, middle(1) - 2, "Σ", size=20, fill="#ffffff", anchor="middle"),
        text(REDUCE, middle(1) + 17, "÷ 3", fill="#ffffff", anchor="middle"),
        next_batch(LANES[2] + LANE_HEIGHT),
    ]
    return card(LANES[2] + LANE_HEIGHT + 62, title, parts)


def next_batch(y: float) -> str:
    """From the weights back to the replicas."""
    path = f"M{SAME} {y:g}v20q0 10 -10 10H{REPLICA + 10}q-10 0 -10 -10v-12"
    words = text(REDUCE, y + 47, "the next batch", size=12, fill=SOFT, anchor="middle")
    return (
        f'<path d="{path}" fill="none" stroke="{SHARED}" stroke-width="2"/>'
        f'<path d="M{REPLICA} {y + 1:g}l-5 9h10z" fill="{SHARED}"/>{words}'
    )


DRAWINGS: tuple[Callable[[], str], ...] = (
    ddp,
    send_recv,
    broadcast,
    all_reduce,
    reduce,
    all_gather,
    gather,
    scatter,
    reduce_scatter,
    all_to_all,
    barrier,
)


def main(folder: Path = FOLDER) -> None:
    folder.mkdir(exist_ok=True)
    for draw in DRAWINGS:
        (folder / f"{draw.__name__}.svg").write_text(draw())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
