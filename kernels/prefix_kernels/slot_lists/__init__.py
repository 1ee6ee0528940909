"""Lists of slots, out of the table that says at which slot each request's tokens lie."""

from prefix_kernels.slot_lists.api import common_slots, copy_slot_lists
from prefix_kernels.slot_lists.reference import common_slots_reference, copy_slot_lists_reference

__all__ = ["common_slots", "common_slots_reference", "copy_slot_lists", "copy_slot_lists_reference"]
