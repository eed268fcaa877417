from typing import Any

import torch

from fleet.fluid import Program
from fleet.parameter_server.modes import Sync
from fleet.parameter_server.shard import release
from tests.support.modes import OneServer


def test_a_server_gives_back_the_memory_of_the_module_that_it_has_taken_over():
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    source = Program.from_optimizer(optimizer, model).source
    assert source is not None
    release(source)
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(4, 8), (4,)]
    assert all(parameter.untyped_storage().nbytes() == 4 for parameter in model.parameters())
    assert not optimizer.state
    assert model(torch.ones(1, 8)).isnan().all()


def test_the_state_that_is_handed_out_does_not_change_with_the_next_step():
    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)

    server = OneServer(Sync(), 1, momentum)
    hyper = ({"lr": 1.0, "momentum": 0.5, "dampening": 0.0, "weight_decay": 0.0},)
    server.begin(0, 0, hyper)
    server.send(0, 0, 2.0)
    before = dict(server.shard.store.state())[0]["momentum_buffer"]
    server.begin(0, 1, hyper)
    server.send(0, 0, 2.0, step=1)
    assert before.tolist() == [2.0]
