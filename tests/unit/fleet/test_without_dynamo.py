"""A process that compiles nothing does not pay for TorchDynamo; one that does has torch's own optimizers."""

import os
from pathlib import Path

import pytest

from tests.support.forked_python import ForkedPython

pytestmark = pytest.mark.programs

PROLOGUE = """
import functools
import sys

import torch

from fleet.without_dynamo import defer_dynamo, step_directly

defer_dynamo()
layer = torch.nn.Linear(2, 1)
"""

NOTHING_COMPILES = """
PLAIN = (
    "SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta Adafactor RMSprop Rprop ASGD Muon".split()
)
TRIED = [
    *((kind, {}) for kind in PLAIN),
    *((kind, {"fused": True}) for kind in ("SGD", "Adam", "AdamW", "Adagrad")),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1, "foreach": True}),
]


def train(kind, options, step):
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1, **options)
    for scale in (1.0, -2.0, 3.0):
        optimizer.zero_grad()
        (scale * weight.square()).sum().backward()
        step(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [torch.zeros(1, 1, requires_grad=True)]})
    assert len(optimizer.param_groups) == 2
    optimizer.zero_grad(set_to_none=False)
    assert not weight.grad.any()
    return weight.detach()


direct = [train(*each, step_directly) for each in TRIED]
assert "torch._dynamo" not in sys.modules
usual = [train(*each, lambda optimizer: optimizer.step()) for each in TRIED]
assert "torch._dynamo" in sys.modules
assert all(torch.equal(one, other) for one, other in zip(direct, usual, strict=True))
"""

COMPILED_LATER = """
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
graphs = []


def count(graph, _):
    graphs.append(graph)
    return graph.forward


@torch.compile(backend=count)
def work(x):
    y = x * 2
    optimizer.zero_grad()
    return y + 1


layer(torch.ones(4, 2)).sum().backward()
assert work(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]
assert all(parameter.grad is None for parameter in layer.parameters())
assert len(graphs) == 2, "zero_grad is left out, and so parts the graph in two"
"""

OF_THE_USERS_OWN = """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        print("stepped its own way")
        super().step(closure)


layer(torch.ones(4, 2)).sum().backward()
before = layer.bias.item()
step_directly(Own(layer.parameters(), lr=0.1))
assert layer.bias.item() != before


def clipped(self, closure=None, usual=torch.optim.Adam.step):
    print("somebody's own")
    return usual(self, closure)


torch.optim.Adam.step = functools.update_wrapper(clipped, torch.optim.Adam.step)
step_directly(torch.optim.Adam(layer.parameters()))


class Counted(torch.optim.SGD):
    step = functools.partialmethod(torch.optim.SGD.step, closure=lambda: print("its own closure"))


step_directly(Counted(layer.parameters(), lr=0.1))
"""


def run(program: str, folder: Path) -> str:
    """Run a program in a process that has imported torch already, but not TorchDynamo."""
    (folder / "program.py").write_text(program)
    with (folder / "said").open("w") as said:
        forked = ForkedPython(folder / "program.py", env=os.environ, output=said, errors=said, cwd=folder)
    status = forked.wait(100)
    assert status == 0, (folder / "said").read_text()
    return (folder / "said").read_text()


@pytest.mark.parametrize("then", [NOTHING_COMPILES, COMPILED_LATER], ids=["never", "later"])
def test_optimizers_work_whether_or_not_something_is_compiled(then: str, tmp_path: Path):
    run(PROLOGUE + then, tmp_path)


def test_what_somebody_has_put_around_a_step_is_called(tmp_path: Path):
    said = run(PROLOGUE + OF_THE_USERS_OWN, tmp_path)
    assert said == "stepped its own way\nsomebody's own\nits own closure\n"
