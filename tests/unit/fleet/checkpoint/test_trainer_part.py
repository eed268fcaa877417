"""The state of an optimizer comes back as the optimizer itself would have laid it out."""

import numpy as np
import pytest
import torch

from fleet.checkpoint import GradientOrder, OwnRows, TrainerPart, restore_states
from fleet.errors import CheckpointError
from fleet.program import Program
from fleet.tables import TableRows


def own_rows(ids: list[int], **state: torch.Tensor) -> TrainerPart:
    rows = TableRows(np.array(ids, dtype=np.int64), torch.empty(len(ids), 0), state)
    return TrainerPart(own_rows=OwnRows(7, {"model.clicks": rows}))


def test_the_state_of_a_trainers_own_rows_comes_back():
    state = {"sum": torch.rand(3, 4), "norm": torch.rand(3, 1)}
    found = TrainerPart.from_bytes(own_rows([-5, 0, 1 << 40], **state).to_bytes(), "the file").own_rows
    assert found.steps == 7
    rows = found.tables["model.clicks"]
    assert rows.ids.tolist() == [-5, 0, 1 << 40]
    assert rows.state.keys() == state.keys()
    assert all(torch.equal(rows.state[name], state[name]) for name in state)


@pytest.mark.parametrize(
    "part",
    [
        own_rows([3, 3], sum=torch.rand(2, 4)),
        own_rows([4, 3], sum=torch.rand(2, 4)),
        own_rows([3, 4], sum=torch.rand(3, 4)),
        own_rows([3, 4], sum=torch.rand(2)),
        own_rows([3, 4], sum=torch.zeros(2, 4, dtype=torch.int32)),
    ],
    ids=["twice", "not-ascending", "too-many", "flat", "integers"],
)
def test_rows_that_no_trainer_has_saved_are_refused(part):
    with pytest.raises(
        CheckpointError, match=r"the file is not the trainer's part of a checkpoint: .*clicks"
    ):
        TrainerPart.from_bytes(part.to_bytes(), "the file")


@pytest.mark.parametrize("order", [None, GradientOrder(("b", None, "a")), GradientOrder(("a", None), ("a",))])
def test_the_order_of_gradients_comes_back(order):
    assert TrainerPart.from_bytes(TrainerPart(order=order).to_bytes(), "the file").order == order


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(GradientOrder((3, None)), id="a-number"),  # type: ignore[arg-type]
        pytest.param(GradientOrder(("a", None), ("b",)), id="another"),
    ],
)
def test_an_order_of_what_are_no_parameters_is_refused(order):
    with pytest.raises(CheckpointError, match="the order of gradients holds what is no parameter's name"):
        TrainerPart.from_bytes(TrainerPart(order=order).to_bytes(), "the file")


def test_a_fused_optimizer_goes_on_with_the_state_of_parameters_of_any_layout():
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 8, 8)
    adam = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    source = Program.from_optimizer(adam, model).source
    assert source is not None

    def step() -> torch.Tensor:
        adam.zero_grad()
        model(images).square().sum().backward()
        adam.step()
        return model.weight.detach().clone()

    step()
    weights = {name: value.detach().clone() for name, value in source.parameters.items()}
    saved = {
        name: {
            entry: kept.clone(memory_format=torch.contiguous_format)
            for entry, kept in adam.state[value].items()
        }
        for name, value in source.parameters.items()
    }
    expected = step()
    with torch.no_grad():
        for name, value in source.parameters.items():
            value.copy_(weights[name])
    restore_states(saved, source)
    torch.testing.assert_close(step(), expected)
