import torch

from fleet.parameter_server.shard import release
from fleet.program import Program


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
