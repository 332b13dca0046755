"""In the notebook: what is asked of the ranks, how they do it, and what of that is the cell's.

A ``Crew`` is all ranks, on one machine or several. Each rank has at most one order, and answers it with one report.
An ``Attempt`` follows one order on the cell's thread, where an interrupt is a request. A ``Run`` is the record of a
call; a ``Session`` is a crew that stays.
"""
