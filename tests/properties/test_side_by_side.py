"""A rank has taken part in a collective if and only if one of several ranks is among what it did, in any order."""

from __future__ import annotations

import multiprocessing

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.budget import examples
from tests.support import fresh_main, run
from tests.test_side_by_side import MEETINGS, NO_MEETINGS

_PER_RUN = 20  # a run of two ranks takes longer than what one case does in it
_EVENTS = {**{f"met: {name}": body for name, body in MEETINGS.items()}, **NO_MEETINGS}
_SLOW = {"met: FSDP", "met: monitored_barrier"}
_CASES = st.lists(st.sampled_from(sorted(_EVENTS.keys() - _SLOW)), min_size=0, max_size=4)
_BUDGET = examples(60)

_SOURCE = """
import nbddp, torch, torch.distributed as dist
from nbddp.worker import process_group as ours

def train(cases, events, together):
    return [met(case, events, together) for case in cases]

def meet(together):
    together[1 - nbddp.rank()].release()
    together[nbddp.rank()].acquire()

def destroy(together):
    meet(together)  # the other rank may still be connecting to it
    dist.destroy_process_group()

def met(case, events, together):
    dist.init_process_group("gloo")
    ours._met_before = None
    for name in case:
        if not dist.is_initialized():  # the event before has destroyed it
            dist.init_process_group("gloo")
        if "init_process_group" in events[name]:
            destroy(together)
        meet(together)
        exec(events[name], {"rank": nbddp.rank(), "t": torch.ones(2), "dist": dist, "torch": torch, "nbddp": nbddp})
        meet(together)
    found = ours.has_met()
    if dist.is_initialized():
        destroy(together)
    return found
"""


@settings(_BUDGET, max_examples=max(1, _BUDGET.max_examples // _PER_RUN))
@given(st.lists(_CASES, min_size=_PER_RUN, max_size=_PER_RUN))
def test_collectives_of_several_ranks_are_detected_in_any_order_of_calls(cases: list[list[str]]) -> None:
    with fresh_main() as cell:
        together = [multiprocessing.get_context("spawn").Semaphore(0) for _ in range(2)]
        values = run(cell(_SOURCE).train, cases, _EVENTS, together).values
    expected = [any(name.startswith("met: ") for name in case) for case in cases]
    assert values == [expected, expected]
