"""A replica for `benchmarks.change_checks` that times the detection of changes."""

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fleet import DistributedStrategy
from fleet.parameter_server import fleet
from fleet.parameter_server.trainer.gradients import SentGradient
from fleet.parameter_server.trainer.parameters import Mark, ParameterStore

__all__ = ["Counted", "main"]

WIDTH, LAYERS, BATCH = 226, 20, 64
WARM_STEPS = 20
STEPS = 50


class Counted:
    """A timer that sums the time spent in selected functions; nested calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper that adds the time of each call to this timer."""

        @functools.wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            if self._inside:
                return function(*arguments, **options)
            self._inside, began = True, time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - began
                self._inside = False

        return counted


def _count(counted: Counted) -> None:
    """Wrap the functions that detect changes, to measure their time in this process."""
    unchanged = vars(SentGradient)["unchanged"]
    setattr(SentGradient, "unchanged", property(counted.around(unchanged.fget)))  # noqa: B010
    setattr(ParameterStore, "check_kept", counted.around(ParameterStore.check_kept))  # noqa: B010
    setattr(Mark, "take", counted.around(Mark.take))  # noqa: B010


def main(transport: str, rounds: int) -> None:
    """Run a replica; a trainer prints, for each round, the seconds that a step and its checks take."""
    torch.set_num_threads(1)
    fleet.init()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    strategy = DistributedStrategy(transport=transport)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), strategy, model)
    if fleet.is_server():
        fleet.run_server()
        return
    counted = Counted()
    _count(counted)
    fleet.init_worker()
    data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    for _ in range(WARM_STEPS):
        step()
    for _ in range(rounds):
        counted.seconds, began = 0.0, time.perf_counter()
        for _ in range(STEPS):
            step()
        seconds = time.perf_counter() - began
        print("round", json.dumps({"step": seconds / STEPS, "checks": counted.seconds / STEPS}), flush=True)
    fleet.stop_worker()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
