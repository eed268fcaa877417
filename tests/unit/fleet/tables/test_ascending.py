import numpy as np
import pytest

from fleet.tables.ascending import find_among


@pytest.mark.parametrize("ascending", [[], [5], [-9, -1, 0, 5, 2**62]], ids=["none", "one", "of-both-signs"])
@pytest.mark.parametrize("ids", [[], [5], [2**63 - 1, -1, 4, 5, -(2**63), 5]], ids=["none", "one", "many"])
def test_ids_are_found_among_those_that_ascend(ids, ascending):
    asked, known = np.array(ids, dtype=np.int64), np.array(ascending, dtype=np.int64)
    found, places = find_among(asked, known)
    assert found.tolist() == [each in ascending for each in ids]
    assert known[places].tolist() == asked[found].tolist()
