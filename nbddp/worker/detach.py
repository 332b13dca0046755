"""In the fork server, first. A session of its own: what ends the notebook's process group leaves it to clean up."""

from __future__ import annotations

import os

os.setsid()
