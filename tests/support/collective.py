"""Trainers of a collective job: separate processes on this machine, or a group of one trainer."""

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from fleet.collective.world import World
from tests.support.forked_python import ForkedPython

__all__ = ["ForkedTrainer", "GroupOfOne", "environments"]


class GroupOfOne:
    """A collective group with a single trainer and without connections.

    Attributes
    ----------
    used : list of set
        The devices of each call of `use`.
    """

    world = World(0, 1, "localhost", 1)

    def __init__(self) -> None:
        self.used: list[set[torch.device]] = []

    def channel(self) -> None:
        """Return None, which selects the default process group."""

    def use(self, parameters: Iterable[torch.Tensor], channel: None = None) -> None:
        """Record the devices of the given tensors."""
        self.used.append({parameter.device for parameter in parameters})

    def broadcast_(self, values: torch.Tensor, what: str) -> None:
        """Leave the values unchanged."""

    def agree(self, key: str, value: str) -> dict[int, str]:
        """Return this trainer's value."""
        return {0: value}

    gather = agree

    def waiting(
        self, what: str, kind: Any = None, device: torch.device | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return contextlib.nullcontext()


class ForkedTrainer(ForkedPython):
    """The process of one trainer.

    TorchDynamo is preloaded, because torch's optimizers import it in their first step, which is slow.
    """

    preloaded = (*ForkedPython.preloaded, "torch._dynamo")


def environments(directory: Path, ports: Sequence[int]) -> list[dict[str, str]]:
    """Return the environment variables of each trainer process.

    Parameters
    ----------
    directory : Path
        The folder of the termination messages.
    ports : sequence of int
        One port for each trainer.
    """
    shared = {
        "TRAINING_ROLE": "TRAINER",
        "PADDLE_TRAINERS_NUM": str(len(ports)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(f"127.0.0.1:{port}" for port in ports),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]),
        "GLOO_SOCKET_IFNAME": "lo",
        "FLEET_JOB_KEY": "6b" * 32,
        "OMP_NUM_THREADS": "1",
    }
    return [
        shared
        | {
            "PADDLE_TRAINER_ID": str(rank),
            "RANK": str(rank),
            "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{port}",
            "FLEET_TERMINATION_LOG": str(directory / f"words-{rank}"),
        }
        for rank, port in enumerate(ports)
    ]
