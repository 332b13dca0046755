"""Runs jobs without a notebook: files of functions, and their ranks under torchrun, srun or a shell."""
