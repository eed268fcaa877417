"""The state of an optimizer comes back as the optimizer itself would have laid it out."""

import torch

from fleet.checkpoint import restore_states
from fleet.program import Program


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
