"""The model of tests/golden/train_sync.npz by the program form: every optimizer, one after the other.

Arguments: the folder for results. Each optimizer has servers of its own, at the ports that follow.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fleet

STEPS, TRAINERS = 20, 2
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.0005),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.0002, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.001, betas=(0.9, 0.999), eps=1e-8),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.001, eps=1e-6),
}


class Model(torch.nn.Module):
    """tanh(x·w0 + b0)·w1 + b1, with the original's initial values."""

    def __init__(self) -> None:
        super().__init__()
        random = np.random.RandomState(0)
        random.randn(13, 2048)
        self.w0 = torch.nn.Parameter(torch.full((13, 2048), 0.05))
        self.b0 = torch.nn.Parameter(torch.zeros(2048))
        self.w1 = torch.nn.Parameter(torch.from_numpy((random.randn(2048, 1) * 0.02).astype("float32")))
        self.b1 = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Predict."""
        return torch.tanh(x @ self.w0 + self.b0) @ self.w1 + self.b1


def mean_square_error(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute the loss."""
    return torch.nn.functional.mse_loss(model(x), y)


def batches(trainer: int) -> Iterator[dict[str, np.ndarray]]:
    """Draw the data of a trainer, step by step."""
    random = np.random.RandomState(100 + trainer)
    for _ in range(STEPS):
        x = random.rand(20, 13).astype("float32")
        yield {"x": x, "y": (x @ (np.arange(13) / 13).astype("float32"))[:, None]}


def main(results: Path) -> None:
    """Train with each optimizer; the trainers write what they end with."""
    role, trainer = os.environ["TRAINING_ROLE"], int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    hosts = [endpoint.split(":") for endpoint in os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")]
    results_of: dict[str, Any] = {}
    for position, (name, make) in enumerate(OPTIMIZERS.items()):
        endpoints = [f"{host}:{int(port) + len(hosts) * position}" for host, port in hosts]
        model = Model()
        program = fleet.Program.capture(model, mean_square_error, make(model.parameters()))
        transpiler = fleet.DistributeTranspiler()
        transpiler.transpile(trainer, program=program, pservers=",".join(endpoints), trainers=TRAINERS)
        executor = fleet.Executor(fleet.CPUPlace())
        if role == "PSERVER":
            own = endpoints[[port for _, port in hosts].index(os.environ["PADDLE_PORT"])]
            served, startup = transpiler.get_pserver_programs(own)
            executor.run(startup)
            executor.run(served)
            continue
        trained = transpiler.get_trainer_program()
        executor.run(fleet.default_startup_program())
        losses = [executor.run(trained, feed=batch, fetch_list=["loss"])[0][0] for batch in batches(trainer)]
        executor.close()
        results_of[f"{name}/losses"] = np.array(losses, dtype=np.float64)
        results_of |= {f"{name}/{key}": value.numpy() for key, value in model.state_dict().items()}
    if role == "TRAINER":
        np.savez(results / f"trainer-{trainer}.npz", **results_of)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
