"""The ranks' processes, as the notebook sees them; ``preloaded`` alone runs in the fork server.

Outside of this folder, only ``LocalMachine`` and its ``Event`` are needed, and ``server`` to end the fork server.
"""
