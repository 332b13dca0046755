"""Writes a run's metrics to where people keep them: TensorBoard, W&B, MLflow, files, any function."""
