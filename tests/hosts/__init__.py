"""Several machines: hosts that are network namespaces, each with its own ssh server."""
