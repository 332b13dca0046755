"""Imports what a rank of any first run needs, once, in the fork server."""

import nbddp.worker.data
import nbddp.worker.entry
import nbddp.worker.model
import nbddp.worker.snapshot  # noqa: F401
from nbddp.worker import blas

blas.find()
