"""How sentences name some pods."""

import pytest

from fleet_operator.plan.naming import some


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param(["a-0"], "a-0", id="one"),
        pytest.param(["a-0", "a-1"], "a-0 (and 1 more)", id="two"),
        pytest.param(["a-0", "a-1", "a-2"], "a-0 (and 2 more)", id="several"),
    ],
)
def test_some(names, expected):
    assert some(names) == expected
