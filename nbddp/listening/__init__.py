"""Draws the curves of code that never heard of nbddp: what it logs with TensorBoard, W&B and others, once each."""
