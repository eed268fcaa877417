"""Rules of one's own, as the documentation shows them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleet.tables import Constant, TableConfig
from tests.support.tables import Servers, assert_equal

PAGE = Path("docs/row-options.md").read_text()


@pytest.fixture(scope="module")
def shown():
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)  # noqa: S102
    return names


def test_rules_of_one_s_own_work_together(shown):
    config = TableConfig(
        "t",
        2,
        shown["SignSGD"](),
        first_values=Constant(1.0),
        options={"lr": 0.25},
        admission=shown["EvenOnly"](),
        eviction=(shown["AtMost"](3),),
    )
    many = [Servers(config, number) for number in (1, 3)]
    ids = np.arange(-50, 50)
    for each in many:
        each.update(ids, torch.ones(100, 2), 1)
        each.update(ids[50:], torch.ones(50, 2), 2)
        each.update(ids[75:], -torch.ones(25, 2) * 100.0, 3)
    assert_equal(many[0].rows(), many[1].rows())
    found = many[0].look_up(ids)[:, 0]
    even = ids % 2 == 0
    assert set(found[torch.from_numpy(~even)].tolist()) == {1.0}
    assert set(found[torch.from_numpy(even & (ids < 0))].tolist()) == {0.75}
    assert set(found[torch.from_numpy(even & (ids >= 0) & (ids < 25))].tolist()) == {0.5}
    assert set(found[torch.from_numpy(even & (ids >= 25))].tolist()) == {1.0}  # gone after three updates
