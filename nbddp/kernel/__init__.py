"""Kernel side. What runs in the notebook's process: it starts, watches and ends the ranks."""
