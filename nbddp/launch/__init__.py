"""Starts, watches and ends the ranks on this machine, for a notebook kernel or for a host's agent."""
