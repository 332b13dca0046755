"""``%%ddp`` and ``%ddp`` run a cell or a script of the notebook on all ranks."""
