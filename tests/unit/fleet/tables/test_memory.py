"""Rows of a table by number, of which there are only so many."""

import numpy as np
import pytest

from fleet.errors import ConfigurationError
from fleet.tables import memory
from fleet.tables.memory import RowMemory


def test_a_row_too_many_is_refused_before_anything_changes(monkeypatch):
    monkeypatch.setattr(memory, "_MOST", 3)
    rows = RowMemory(1)
    rows.add(np.arange(2))
    with pytest.raises(ConfigurationError, match="would hold 4 rows of one table, expected 3 at most"):
        rows.add(np.array([7, 8]))
    assert len(rows) == 2
    assert rows.add(np.array([7])).size == 1
