"""Row types: as what numbers rows are stored. One of one's own is a class that has what `RowType` says."""

from fleet.tables.row_types.bfloat16 import BFloat16
from fleet.tables.row_types.float32 import Float32
from fleet.tables.row_types.interface import RowType

__all__ = ["BFloat16", "Float32", "RowType"]
