"""What one process gets of a model that a job has trained."""

import io
import logging

import pytest
import torch

from fleet.checkpoint import named_state
from fleet.fluid import Program


class Scaled(torch.nn.Linear):
    """Keeps something beside its parameters and buffers, as quantized and FP8 layers do."""

    def __init__(self, extra: object) -> None:
        super().__init__(2, 1)
        self._extra = extra

    def get_extra_state(self) -> object:
        return self._extra

    def set_extra_state(self, state: object) -> None:
        self._extra = state


@pytest.mark.parametrize("extra", [{"amax": 3.0}, io.BytesIO(b"bytes")])
def test_what_is_no_tensor_is_left_out_and_named_once(extra, caplog):
    caplog.set_level(logging.INFO)
    name = type(extra).__name__
    model = torch.nn.ModuleDict({name: Scaled(extra), "other": Scaled(torch.ones(3))})
    source = Program.from_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model).source
    assert source is not None
    values = {each: torch.full_like(value, 7.0) for each, value in source.parameters.items()}
    for _ in range(2):
        state = named_state(source, values)
    assert set(state) == {*values, "other._extra_state"}
    assert (state[f"{name}.weight"] == 7).all()
    assert state["other._extra_state"].tolist() == [1, 1, 1]
    (said,) = caplog.messages
    assert f"leaves out {name}._extra_state of the model's state dict" in said
    model.load_state_dict(state, strict=False)
