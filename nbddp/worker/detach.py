"""In the fork server, first. A session of its own, and no CUDA driver before the fork."""

from __future__ import annotations

import os

# What ends the notebook's process group leaves the server, which then cleans up.
os.setsid()
# What asks torch.cuda.is_available() while it is imported must not initialise the driver: no fork survives that.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
