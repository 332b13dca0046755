"""Tests on several hosts, which are network namespaces, each with its own ssh server."""
