"""What trainers have copies of, and what they tell each other of it."""

from typing import Any, cast

import torch

from fleet.collective.copies import Copies
from fleet.collective.world import World


class Told:
    """Stands in for a group of two: notes what is shared, which is 1 at trainer 0."""

    world = World(1, 2, "localhost", 1)

    def __init__(self) -> None:
        self.shared: list[str] = []

    def broadcast_(self, values: torch.Tensor, what: str) -> None:
        self.shared.append(what)
        values.fill_(1)


def test_share_and_describe_include_the_rest_of_the_model():
    linear = torch.nn.Linear(2, 2)
    linear.bias.requires_grad_(False)
    model = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(2))
    stepped = [("0.weight", linear.weight), ("0.bias", linear.bias)]
    group = Told()
    copies = Copies(stepped, model, cast("Any", group))
    copies.share("first")
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"]
    assert group.shared == [f"first: {name}" for name in [*names, "1.num_batches_tracked"]]
    assert copies.describe() == [
        "0.weight (2, 2) torch.float32",
        "0.bias (2,) torch.float32 frozen",
        "no more parameters",
        *(f"{name} (2,) torch.float32" for name in names[2:]),
        "1.num_batches_tracked () torch.int64",
    ]
    assert [name for name, _ in copies.trained] == ["0.weight"]


def test_share_buffers_sends_the_current_buffers_by_dtype():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    model.register_buffer("mask", torch.zeros(2, 2, dtype=torch.bool).t())
    model.register_buffer("gone", torch.zeros(3))
    group = Told()
    Copies([], model, cast("Any", group), broadcast_buffers=False).share_buffers()
    assert not group.shared
    copies = Copies([], model, cast("Any", group))
    model.register_buffer("gone", None)
    model[0].running_var = torch.zeros(2)  # another tensor
    copies.share_buffers()
    assert group.shared == [f"trainer 0's buffers of torch.{dtype}" for dtype in ("bool", "float32", "int64")]
    assert all((buffer == 1).all() for buffer in model.buffers())
    assert all((parameter != 1).any() for parameter in model[1].parameters())
