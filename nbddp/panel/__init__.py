"""Draws a run from its numbers, its status and its output; uses no processes."""
