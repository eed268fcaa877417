"""What trainers have copies of, and what they tell each other of it."""

from typing import Any, cast

import torch

from fleet.collective.copies import Copies


class Told:
    """Stands in for a group: notes what is shared."""

    def __init__(self) -> None:
        self.shared: list[str] = []

    def broadcast_(self, values: torch.Tensor, what: str) -> None:
        self.shared.append(what)


def test_the_rest_of_the_model_is_shared_and_described_as_well():
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
