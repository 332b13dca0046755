"""Says where the ranks have not logged a metric alike, in a line for each."""

from __future__ import annotations

from collections.abc import Iterator

from nbddp.history.points import Metric


def notices(metric: Metric) -> Iterator[str]:
    """Without the metric's name."""
    first, op = min(metric.ops), metric.op
    for rank, other in [(rank, op) for rank, ops in sorted(metric.ops.items()) for op in ops]:
        if other != op:
            who = "later" if rank == first else f"rank {rank}"
            yield (
                f"rank {first} logged it with reduce={op!r} and {who} with reduce={other!r}; "
                f"{'the first' if rank == first else f'that of rank {first}'} is used for the whole run"
            )
            break
    if op is None:
        return
    steps, ranks, of = metric.counts()
    fewer = ranks < of
    if not fewer.any():
        return
    low, high, most = ranks[fewer].min(), ranks[fewer].max(), of[fewer].max()
    logged_by = f"only {low if low == high else f'{low} to {high}'} of {most} ranks"
    result = {"min": "the minimum", "max": "the maximum"}.get(op, f"the {op}")
    if fewer.all() and low == high:
        yield f"{logged_by} logged it; {result} is over {'that rank' if low == 1 else 'those ranks'}"
        return
    number, left_out = int(fewer.sum()), len(steps) - len(metric.points().steps)
    part = f"{number:,} of {len(steps):,} steps were logged by {logged_by} (the first is step {steps[fewer][0]})"
    if left_out:
        yield f"{part}; the sums leave out {'these steps' if left_out == number else f'{left_out:,} of them'}"
    else:
        yield f"{part}; for these, {result} is over the ranks that logged it"
