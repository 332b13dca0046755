"""In the notebook: what is asked of the ranks, how they do it, and what of that is the cell's.

The user's ``Options`` are decided into ``Settings``. A ``Crew`` is all ranks, on one machine or several, with what's
known about each; one thread uses it, and takes what the machines tell and other threads ask from its inbox. Each rank
has at most one order, and answers it with one report, which carries the value or the exception. An ``Attempt`` follows
one order on the cell's thread, where an interrupt is a request. A ``Run`` is what the user sees of a function, script,
or cell. ``start`` opens a crew for one run; a ``Session`` is a crew that stays. ``cells`` has what both do with cells.

An order is what a rank is told to do, a call is the user's function with its arguments, a record is what ``log()``
has written.
"""
