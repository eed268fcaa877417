"""Embedding tables: rows by id, their first values and the rules that step them."""

from fleet.tables.first_values import Constant, FirstValues, Normal, Uniform
from fleet.tables.table import Table, TableConfig, TableRows

__all__ = ["Constant", "FirstValues", "Normal", "Table", "TableConfig", "TableRows", "Uniform"]
