"""Host side. On each of several hosts, between the notebook's kernel and the ranks: ``python -m nbddp.host``."""
