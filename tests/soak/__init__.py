"""Resources over a long time: ``python -m tests.soak`` (300 runs), ``python -m tests.soak --minutes 30`` (one run)."""
