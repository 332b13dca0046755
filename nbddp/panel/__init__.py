"""Kernel side. Draws a run: knows numbers and text, no process."""
