"""Hooks of the script's own, which run while the averages of a pass are awaited, too."""

FAILING = """
fleet.init()
rank = fleet.worker_index()
model = build(seed=0)
model.unused = torch.nn.Parameter(torch.ones(3))
model.unused.register_hook(lambda gradient: gradient.view(7))  # it is given zeros when the pass ends
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
loss_of(model, 0, rank).backward()
"""


def test_an_error_of_a_hook_is_told_as_it_is_and_blames_no_connection(trainers, tmp_path):
    for rank, process in enumerate(trainers(FAILING)):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1, err
        assert "RuntimeError: shape '[7]' is invalid for input of size 3" in err
        assert "every trainer is alive" not in err
        assert "shape '[7]' is invalid" in (tmp_path / f"words-{rank}").read_text()
