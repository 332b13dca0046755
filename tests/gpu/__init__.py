"""What needs a GPU, part by part, for a machine that is there for a short time and has no network."""
