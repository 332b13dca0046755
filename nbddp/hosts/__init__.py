"""Several hosts, from the notebook: log in, run ranks there, receive what their agents report."""
