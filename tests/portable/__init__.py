"""What depends on the version of Python and not on torch.

``python -m pytest --noconftest tests/portable`` needs numpy, cloudpickle, tblib, psutil and pytest alone.
"""
