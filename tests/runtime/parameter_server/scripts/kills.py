"""A training whose gradients are a function of the values, the batch and the step; replicas of it are killed.

Arguments: the number of steps. Each trainer says what it has made, and at the end a digest of its weights.

``OPTIMIZER`` is ``sgd``, ``momentum`` or ``adam``; ``CLIP`` clips by the global norm; ``STRATEGY`` has
options of the strategy as JSON. A part of the model is used by one trainer, by the other or by none, step by
step. Trainer 0 saves every ``SAVE_EVERY`` steps to ``FLEET_CHECKPOINT_DIR``, which the servers begin with.
``PAUSE`` is how many seconds pass between two gradients.

``KILL_AT`` makes a trainer end as by kill -9 in that step's backward pass, before its last gradients. It
waits until the servers have taken the others, and with ``KILL_ANSWERED`` until a block was answered: it has
been stepped, and what this trainer has not sent has not.
"""

import hashlib
import json
import os
import signal
import sys
import time

import torch

import fleet.parameter_server.sessions
from fleet import ClipGradByGlobalNorm
from fleet.parameter_server import fleet as ps

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


class Model(torch.nn.Module):
    """Two layers that are always used, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 64)
        self.second = torch.nn.Linear(64, 32)
        self.last = torch.nn.Linear(32, 1)
        self.rare = torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, *, rare: bool) -> torch.Tensor:
        """Predict."""
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        predicted: torch.Tensor = self.last(hidden) + (self.rare(x) if rare else 0.0)
        return predicted


def die() -> None:
    """End as by kill -9, once the servers have what was sent."""
    (trainer,) = fleet.parameter_server.sessions._trainers.values()
    session = trainer.session
    session.flush()
    session.wait_until(
        lambda: "KILL_ANSWERED" not in os.environ or len(session._missing) < len(session._blocks),
        lambda: "an answer before the end",
    )
    os.kill(os.getpid(), signal.SIGKILL)


def main(steps: int) -> None:
    """Train, or serve."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ps.init()
    model = Model()
    strategy = ps.DistributedStrategy(
        overlap=True,
        grad_clip=ClipGradByGlobalNorm(0.05) if "CLIP" in os.environ else None,
        **json.loads(os.environ.get("STRATEGY", "{}")),
    )
    made = OPTIMIZERS[os.environ.get("OPTIMIZER", "sgd")](model.parameters())
    optimizer = ps.distributed_optimizer(made, strategy, model=model)
    if ps.is_server():
        ps.run_server()
        return
    ps.init_worker()
    print("begins at step", ps.step, flush=True)
    kill_at, pause = int(os.environ.get("KILL_AT", "-1")), float(os.environ.get("PAUSE", "0"))
    for parameter in model.parameters():
        parameter.register_hook(lambda _: time.sleep(pause))
    model.first.weight.register_hook(lambda _: die() if ps.step == kill_at else None)
    save_every, trainer = int(os.environ.get("SAVE_EVERY", "0")), ps.worker_index()
    while (step := ps.step) < steps:
        random = torch.Generator().manual_seed(1000 * trainer + step)
        x = torch.randn(8, 16, generator=random)
        optimizer.zero_grad()
        model(x, rare=(step + trainer) % 3 == 0).sub(x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        print("made step", ps.step, flush=True)
        if save_every and ps.step % save_every == 0:
            ps.save_check_point(
                os.environ["FLEET_CHECKPOINT_DIR"], ps.TrainStatus(0), remain_all_checkpoint=False
            )
    ps.stop_worker()
    weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
