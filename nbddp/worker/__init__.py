"""Worker side. What runs in the fresh processes; imports no kernel/, IPython or ipywidgets."""
