"""Follows one order on a crew, until every rank has reported: the first failure, interrupts, stop, timeout.

It runs on the thread that waits for the ranks. Meanwhile an interrupt of the cell is a request, so that it ends nothing
of ours halfway.
"""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nbddp.kernel import failure, hang
from nbddp.kernel.crew import POLL_S, Crew
from nbddp.kernel.interrupts import interrupts_to
from nbddp.kernel.page import Page
from nbddp.kernel.prompt import Prompt
from nbddp.kernel.rank_state import RankState
from nbddp.messages import CountSteps, Release, Steps, StopAfter
from nbddp.process.machine import Event
from nbddp.text import ranks_text

_CONSEQUENCE_WINDOW_S = 1.0  # for the failure from which the known ones follow
_ALSO_S = 0.5  # for other ranks' timeouts
_LOSS_NOTICED_S = 5.0  # the same on several machines: it takes Ray 2 s to notice that one is gone
_ANSWER_S = 5.0  # for the thread that follows to ask the ranks where they are
_WHERE_S = 0.1  # for the ranks to say where they are, when somebody waits for their end
_COUNT_S = 0.5  # for the ranks to say how many optimizer steps they have taken
_OWN_INTERRUPT_S = 0.5  # for the cell's, after the ranks'
_SAME_STEP_S = 1.0  # and twice what a step takes: for the ranks to come to the step after which they stop
_FIRST_STEP_S = 0.5  # the same, if none has taken one yet: they may never
_RELEASE_S = 0.03  # between failure, release, and interrupt: a rank that waits for others may fail with a better text
_AGAIN_S = 1.0  # until ranks that have swallowed an interrupt get another one

_Plan = list[tuple[float, Callable[[Sequence[RankState]], None]]]  # when, and what to do to ranks that still work


@dataclass(frozen=True)
class Patience:
    """How long ranks that should end an order may take, before they are killed.

    Attributes:
        after_failure_s: of another rank, for their ``finally`` blocks.
        after_interrupts_s: the first, the second; inf: the ranks aren't even asked to end. One more interrupt raises
            KeyboardInterrupt here, whatever the ranks do.
    """

    after_failure_s: float
    after_interrupts_s: tuple[float, float]


OF_A_RUN = Patience(0.3, (5.0, 0.0))
OF_A_SESSION = Patience(10.0, (10.0, 10.0))  # whose state would be lost
OF_AN_ANSWER = Patience(10.0, (math.inf, math.inf))  # to an order that runs nothing of the user's


class Attempt:
    """One order to some ranks of a crew.

    A failure, an interrupt of the cell, ``stop()``, or the timeout makes a plan, which replaces the one before: let all
    ranks come to the same optimizer step, if they train; interrupt them; release those that wait for others; and kill,
    after its ``Patience``, those that still haven't reported.

    Args:
        look: is called again and again.

    Attributes:
        printed_before: how much each rank of the crew had printed before.
        ending: why ranks that haven't reported should: "failed" (another rank has), "late" (its deadline), or "stopped"
            (an interrupt or ``stop()``), whichever came first; "" as long as they needn't.
        interrupts: how often the cell was interrupted.
        released: ranks have been asked to leave what they were doing, so the default group has to be replaced.
        where: where the ranks were when they were stopped, or a collective timed out; "" if nobody asked.
        cut: who was killed while it saved a file; "" if nobody was.
    """

    def __init__(
        self,
        crew: Crew,
        order: Any,
        ranks: Sequence[RankState],
        page: Page,
        patience: Patience,
        *,
        deadline: float = float("inf"),
        look: Callable[[Attempt], None] = lambda attempt: None,
    ) -> None:
        self._crew, self._ranks, self._page, self._patience = crew, ranks, page, patience
        self._order, self.printed_before = order, [rank.output.size for rank in crew.ranks]
        self._deadline, self._look = deadline, look
        self._prompt = Prompt(crew, ranks, page)
        self._plan: _Plan = []
        self._taken: dict[int, Steps] = {}
        self._failed_at: float | None = None
        self._grace_s: float | None = None  # of stop(), as soon as it's asked for
        self.ending, self.interrupts, self.released = "", 0, False
        self.locator = hang.Locator(crew, ranks)
        self.where = self.cut = ""

    def follow(self) -> None:
        """Give the order. Return when every rank has reported or ended, and from whose end failures follow is known."""
        with interrupts_to(self._interrupted), contextlib.ExitStack() as stack:
            stack.callback(self._page.finish)
            stack.callback(self._replace_plan, [])  # it refers to this attempt, which would live until gc comes
            self._crew.give(self._order, self._ranks)
            while self._waiting() or self._awaits_the_cause():
                due = self._plan[0][0] - time.monotonic() if self._plan else POLL_S
                self._note(self._crew.take(min(POLL_S, max(0.0, due))))
                self._look(self)
                self._end_what_has_failed()
                if not self.ending:  # where they stood stays known
                    self.locator.look_for_a_stall()
                self._end_what_is_late()
                if not self._plan and self._crew.inbox.empty():  # the rank that asks may have ended
                    self._prompt.serve(self.stop)
                while self._plan and self._plan[0][0] <= time.monotonic():
                    self._plan.pop(0)[1](self._waiting())
            if all(rank.raised == "KeyboardInterrupt" for rank in self._ranks):
                self._wait_for_own_interrupt()

    @property
    def was_stopped(self) -> bool:
        """Whether it was stopped, and no rank had failed before."""
        return self.ending in ("stopped", "late")

    def stop(self, grace_s: float | None = None) -> None:
        """End the order: after the same optimizer step if all ranks train, otherwise where they are.

        Args:
            grace_s: until they are killed; None: as after an interrupt.
        """
        self.ending, before_s = self.ending or "stopped", self._grace_s
        grace_s = self._patience.after_interrupts_s[0] if grace_s is None else grace_s
        self._grace_s = grace_s if before_s is None else min(grace_s, before_s)
        if before_s is not None or grace_s <= 0:
            return self._replace_plan(self._to_stop(0.0, self._grace_s))
        if self._waiting():
            self.where = self.where or self.locator.summary(_WHERE_S)
        self._taken = {}
        self._crew.send(CountSteps(), [rank for rank in self._waiting() if rank.interruptible])
        self._replace_plan(self._to_stop(_COUNT_S, grace_s))

    def stacks(self) -> str:
        """Return where the ranks are, to another thread than the one that follows them; "" if they are done."""
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._crew.inbox.put(lambda: answers.put(self.locator.report()))
        deadline = time.monotonic() + _ANSWER_S
        while self._waiting() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=POLL_S)
        return "no answer: the cell is waiting for input, or the ranks aren't responding" if self._waiting() else ""

    def _waiting(self) -> list[RankState]:
        return [rank for rank in self._ranks if not rank.over]

    def _interrupted(self) -> None:
        """Handle SIGINT, between any two instructions of this thread."""
        self.interrupts += 1
        if self.interrupts > len(self._patience.after_interrupts_s):
            raise KeyboardInterrupt
        grace_s = self._patience.after_interrupts_s[self.interrupts - 1]
        if grace_s < math.inf:
            self.ending = self.ending or "stopped"
            self._crew.inbox.put(functools.partial(self.stop, grace_s))

    def _wait_for_own_interrupt(self) -> None:
        """VS Code interrupts all processes below the kernel first, then the kernel itself."""
        deadline = time.monotonic() + _OWN_INTERRUPT_S
        while self._grace_s is None and (left := deadline - time.monotonic()) > 0:
            self._note(self._crew.take(left))

    def _note(self, event: Event | None) -> None:
        if event is not None and isinstance(event.data, Steps):
            self._note_taken(event.rank, event.data)
        elif event is not None:
            self._page.take(event)

    def _note_taken(self, rank: int, taken: Steps) -> None:
        self._taken[rank] = taken
        waiting, grace_s = self._waiting(), self._grace_s
        if grace_s is None or self.released or not {rank.number for rank in waiting} <= self._taken.keys():
            return
        steps, patience_s = [self._taken[rank.number] for rank in waiting], 0.0
        pace_s = max((each.pace_s for each in steps if each.taken), default=0.0)
        if all(each.ago_s < 2 * pace_s + 0.2 for each in steps):  # they train, or have just begun
            patience_s = 2 * pace_s + _SAME_STEP_S if any(each.taken for each in steps) else _FIRST_STEP_S
            self._crew.send(StopAfter(max(each.taken for each in steps) + 1), waiting)
        self._replace_plan(self._to_stop(patience_s, grace_s))

    def _awaits_the_cause(self) -> bool:
        """Return whether all failures may follow from the end of a rank that has reported, which isn't known yet."""
        consequences = sum(rank.is_consequence for rank in self._ranks if rank.failed)
        return 0 < consequences < len(self._ranks) and not self.ending and all(rank.alive for rank in self._ranks)

    def _end_what_has_failed(self) -> None:
        failed = [rank for rank in self._ranks if rank.failed]
        if any(rank.raised == "BdbQuit" for rank in failed) and not self.ending:  # q in a debugger stops all
            self.stop()
        if not failed or self.ending:
            return
        self._failed_at = self._failed_at or time.monotonic()
        window_s = _LOSS_NOTICED_S if any(rank.host for rank in failed) else _CONSEQUENCE_WINDOW_S
        if time.monotonic() > self._failed_at + window_s or not all(rank.is_consequence for rank in failed):
            self.ending = "failed"
            self._locate_after_a_timeout(failure.first(failed))
            kill_s, interrupt_s = self._patience.after_failure_s, 2 * _RELEASE_S
            interrupts = [(interrupt_s, self._interrupt), (interrupt_s + _AGAIN_S, self._interrupt)]
            self._replace_plan([(_RELEASE_S, self._release), *interrupts, (kill_s, self._crew.kill)])

    def _locate_after_a_timeout(self, first: RankState) -> None:
        if not failure.is_timeout(first):
            return
        if first.report is None or self.locator.locate(_WHERE_S)[first.number].waiting_in:  # else the user's own error
            deadline = time.monotonic() + _ALSO_S
            while self._waiting() and (left := deadline - time.monotonic()) > 0:
                self._note(self._crew.take(left))
            self.where = hang.summary(self.locator.locate(_WHERE_S), stalled=True)

    def _end_what_is_late(self) -> None:
        if time.monotonic() > self._deadline and not self.ending and self._waiting():
            self.ending, self.where = "late", self.locator.report()
            self.stop()

    def _to_stop(self, after_s: float, grace_s: float) -> _Plan:
        kill_s = grace_s and after_s + grace_s
        actions = [(0.0, self._interrupt), (_RELEASE_S, self._release), (_RELEASE_S + _AGAIN_S, self._interrupt)]
        kill = self._kill if grace_s else self._crew.kill
        return [*((after_s + later_s, action) for later_s, action in actions), (kill_s, kill)]

    def _replace_plan(self, plan: _Plan) -> None:
        now = time.monotonic()
        self._plan = sorted(((now + later_s, action) for later_s, action in plan), key=lambda each: each[0])

    def _kill(self, ranks: Sequence[RankState]) -> None:
        waiting = {rank.number for rank in ranks}
        if saving := [each for each in self.locator.locate(_WHERE_S) if each.saves and each.rank in waiting]:
            who = f"{ranks_text([each.rank for each in saving])} {'were' if len(saving) > 1 else 'was'}"
            self.cut = f"{who.capitalize()} killed while saving ({saving[0].place}), so the file may be incomplete"
        self._crew.kill(ranks)

    def _release(self, ranks: Sequence[RankState]) -> None:
        self.released = True
        self._crew.send(Release(), ranks)

    def _interrupt(self, ranks: Sequence[RankState]) -> None:
        self.released = True
        self._crew.interrupt(ranks)
