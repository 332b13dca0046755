"""Code that runs in the fork server itself before it forks ranks; it imports nothing that starts ranks."""

LIGHT = b"\0"  # begins a request for a rank that needs none of the later imports
