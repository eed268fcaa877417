"""What a program says of tables, which every process and every checkpoint must have in common."""

from typing import Any

import pytest
import torch

import fleet
from fleet.nn import DistributedEmbedding, DistributedTable
from fleet.tables import BFloat16, CountFilter, Normal, TimeToLive
from fleet.tables.rules import SGD


def looked_up(**said: Any) -> fleet.Operator:
    """Return the operator that looks up rows of a table, as a program captures it."""
    table = DistributedTable("users", 4, 10, **{"rule": SGD(), **said})
    model = torch.nn.Sequential(DistributedEmbedding(10, 4, table=table), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = fleet.Program.capture(model, lambda model, ids: model(ids).sum(), optimizer)
    (found,) = [op for op in program.global_block().ops if op.type == "lookup_table"]
    return found


def test_a_table_is_read_by_the_originals_operator():
    found = looked_up()
    assert found.input("W") == ["users"]
    assert found.attr("is_distributed") is True


@pytest.mark.parametrize(
    "said",
    [
        {"seed": 1},
        {"first_values": Normal(std=0.5)},
        {"rule": SGD(), "options": {"weight_decay": 0.1}},
        {"row_type": BFloat16()},
        {"row_type": BFloat16(stochastic=True)},
        {"admission": CountFilter(2)},
        {"eviction": (TimeToLive(10),)},
    ],
    ids=["seed", "first-values", "rule", "row-type", "rounding", "admission", "eviction"],
)
def test_whatever_makes_another_table_is_told(said: dict[str, Any]):
    others = [{}, {"row_type": BFloat16()}] if said != {"row_type": BFloat16()} else [{}]
    assert looked_up(**said).attr("table") not in [looked_up(**other).attr("table") for other in others]
