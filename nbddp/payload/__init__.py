"""Packs a notebook's objects into one block of memory that the notebook and all ranks map, and unpacks them.

Definitions are the notebook's classes and functions, which go by value. Packing lists them in their order
(``Packed.by_value``), and so does unpacking. Notebook and ranks both number all that have gone from the notebook so far
(``Crew.definitions`` there, ``main_module.received`` in a rank), which is why an order says how many went ``before``.
What comes back names a definition by its number, so an object has the notebook's own class again (``unpack(known=)``).
"""

from nbddp.payload.block import Block
from nbddp.payload.packing import Packed, Unpacked, definition, pack, unpack

__all__ = ["Block", "Packed", "Unpacked", "definition", "pack", "unpack"]
