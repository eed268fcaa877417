"""What travels together when parameters are averaged, and that nobody is waited for after the end."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fleet.averaging import LocalSGD
from fleet.collective.copies import Copies
from fleet.collective.local_sgd import ParameterAverager, _buckets
from tests.support.collective import GroupOfOne


def test_tensors_of_one_kind_share_buckets_up_to_a_size():
    wide = [torch.zeros(4 << 20) for _ in range(3)]  # of 16 MiB
    halves = [torch.zeros(3, dtype=torch.bfloat16) for _ in range(2)]
    buckets = _buckets([wide[0], halves[0], wide[1], wide[2], halves[1]])
    sizes = [[(value.dtype, len(value)) for value in bucket] for bucket in buckets]
    single, half = (torch.float32, 4 << 20), (torch.bfloat16, 3)
    assert sizes == [[single, single], [half, half], [single]]


def test_a_step_after_close_is_local():
    weight = torch.ones(1, requires_grad=True)
    copies = Copies([("weight", weight)], None, cast("Any", SimpleNamespace()))  # a group that has gone
    averager = ParameterAverager(copies, torch.optim.SGD([weight]), LocalSGD())
    averager.close()
    averager.on_step([])
    assert averager.steps.number == 0


@pytest.mark.usefixtures("process_group")
def test_steps_are_compared_even_if_all_parameters_are_sharded():
    copies = Copies(
        [], None, cast("Any", GroupOfOne())
    )  # of those that are not sharded, which are averaged here
    averager = ParameterAverager(copies, torch.optim.SGD([torch.ones(1)]), LocalSGD())
    averager.on_step([])
    averager.equalize("a checkpoint")
    assert averager.steps.number == 1
