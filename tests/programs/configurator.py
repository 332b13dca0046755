"""Not imported but executed in the program's own globals, as nanoGPT's."""

import sys

for arg in sys.argv[1:]:
    key, value = arg.removeprefix("--").split("=")
    assert key in globals(), f"Unknown config key: {key}"
    globals()[key] = type(globals()[key])(value)
