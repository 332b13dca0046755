"""The numbers of a run: metrics as columns, combined over ranks and restarts; uses no widgets and no processes."""
