"""Runs in the notebook kernel: from the call of ``run()`` to its value."""
