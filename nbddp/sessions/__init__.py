"""Ranks that stay: a session takes one call after the other on the same processes, also after a failure."""
