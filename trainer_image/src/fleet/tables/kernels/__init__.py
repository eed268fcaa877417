"""Loops in C over ids and rows, where they were compiled when the package was installed.

Each has a twin of numpy's or torch's operations, which gives the same to the bit and stands in for it.
"""

from fleet.tables.kernels.add_rows import add_rows
from fleet.tables.kernels.distinct_ids import distinct_ids
from fleet.tables.kernels.find_rows import compiled_find
from fleet.tables.kernels.library import library

__all__ = ["add_rows", "compiled_find", "distinct_ids", "library"]
