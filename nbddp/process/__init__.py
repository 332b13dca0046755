"""The ranks' processes, as the notebook sees them; ``preloaded`` alone runs in the fork server.

A ``LocalMachine`` starts, hears, signals, and ends the ranks, and tells what happens as ``Event`` after ``Event``.
``dumps`` and ``gauges.Memory`` are plain data that kernel/ reads; ``server`` ends the fork server.
"""
