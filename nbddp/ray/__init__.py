"""Ranks on the nodes of a Ray cluster, by the methods of this machine."""
