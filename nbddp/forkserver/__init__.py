"""The fork server that ranks come from: one per notebook kernel or host, with torch already imported."""
