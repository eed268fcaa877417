"""The threads of a server and of a trainer do not depend on how many trainers or servers there are."""

import re
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch

import fleet
from tests.support.joined import joined
from tests.support.parameter_server import QUICK
from tests.support.threads import at_once

STEPS = 3
CONTROL = ("fleet-control", "fleet-state", "fleet-signs", "fleet-refuse", "fleet-heartbeat", "fleet-greet")
"""gRPC's and the heartbeats' threads, which carry no tensors."""


def large_and_small() -> torch.nn.Module:
    """Return a block that the pool steps, a small one, and a table."""
    return torch.nn.ModuleDict(
        {
            "rows": fleet.nn.DistributedEmbedding(1000, 8, name="clicks"),
            "large": torch.nn.Linear(8, 1 << 14),
            "small": torch.nn.Linear(8, 1),
        }
    )


def threads_of_data(trainers: int, servers: int, transport: str) -> Counter[str]:
    """Train a few steps; return the number of threads that carry and use tensors, by name."""
    before = set(threading.enumerate())
    settings = replace(QUICK, transport=transport)
    with joined(trainers, servers=servers, settings=settings, model=large_and_small) as made:

        def train(trainer: object, model: torch.nn.ModuleDict) -> None:
            for _ in range(STEPS):
                rows = model["rows"](torch.tensor([1, 2, 3]))
                (model["large"](rows).sum() + model["small"](rows).sum()).backward()
                trainer.step()  # type: ignore[attr-defined]

        at_once(*(lambda each=each: train(each[0], each[1]) for each in made))
        started = [thread.name for thread in set(threading.enumerate()) - before]
        at_once(*(trainer.complete for trainer, _, _ in made))
    names = [name for name in started if name.startswith("fleet-") and not name.startswith(CONTROL)]
    return Counter(re.sub(r"-\d+.*", "", name) for name in names)


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize(("trainers", "servers"), [(12, 1), (1, 12)])
def test_the_threads_of_a_process_do_not_depend_on_its_connections(trainers, servers, transport):
    single, many = threads_of_data(1, 1, transport), threads_of_data(trainers, servers, transport)
    of_trainer = Counter({"fleet-io": 1, "fleet-work": 2})
    of_server = single - of_trainer
    assert of_server["fleet-io"] == 1
    for name in single.keys() | many.keys():
        assert many[name] == trainers * of_trainer[name] + servers * of_server[name], name
