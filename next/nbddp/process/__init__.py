"""The ranks' processes, as the notebook sees them; ``preloaded`` alone runs in the fork server.

``LocalMachine`` and its ``Event`` are the way in; ``dumps``, ``gauges.Memory``, and ``Output`` are plain data that
kernel/ reads; ``server`` ends the fork server.
"""
