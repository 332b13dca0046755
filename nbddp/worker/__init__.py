"""Code that runs in a rank; it does not import ``nbddp.kernel``, IPython or ipywidgets."""
