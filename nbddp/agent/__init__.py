"""The process on each host that carries out the notebook kernel's orders: ``python -m nbddp.agent``."""
