"""Imports what every rank needs, once, in the fork server."""

import torch._dynamo  # noqa: F401 - 1 s at the first torch.optim.Optimizer otherwise, in every rank of every run

import nbddp.worker.data
import nbddp.worker.entry
import nbddp.worker.model
import nbddp.worker.snapshot  # noqa: F401
from nbddp.worker import blas

blas.find()
