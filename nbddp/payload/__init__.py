"""Packs a notebook's objects into one block of memory that the notebook and all ranks map, and unpacks them."""

from nbddp.payload.block import note_call, open_block, was_called
from nbddp.payload.packing import Packed, Pickled, Unpacked, pack, prepare, probe, unpack
from nbddp.payload.refusals import refuse_uninherited, refuse_unshippable

__all__ = [
    "Packed",
    "Pickled",
    "Unpacked",
    "note_call",
    "open_block",
    "pack",
    "prepare",
    "probe",
    "refuse_uninherited",
    "refuse_unshippable",
    "unpack",
    "was_called",
]
