"""Packs a notebook's objects into one block of memory that the notebook and all ranks map, and unpacks them."""

from nbddp.payload.block import open_block
from nbddp.payload.packing import Packed, Pickled, Unpacked, pack, prepare, probe, unpack
from nbddp.payload.refusals import refuse_uninherited, refuse_unshippable

__all__ = [
    "Packed",
    "Pickled",
    "Unpacked",
    "open_block",
    "pack",
    "prepare",
    "probe",
    "refuse_uninherited",
    "refuse_unshippable",
    "unpack",
]
