"""Code that runs in the fork server itself before it forks ranks; it imports nothing that starts ranks."""
